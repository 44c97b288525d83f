"""Figures are ratios of sums, for known counts and for runs combined in any way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.bench.figures import (
    Figures,
    expected_length,
    first_difference,
    formula_acceptance_length,
    num_repeated,
    repeated_share,
)
from foredraft.bench.records import Answer, GroupRun, Turn
from foredraft.engine.stats import SpeculationStats


def stats_of(*rounds: tuple[int, int]) -> SpeculationStats:
    """The stats of some steps. rounds: (drafted, accepted) tokens of each step."""
    stats = SpeculationStats()
    for drafted, accepted in rounds:
        stats.record(num_drafted=drafted, num_accepted=accepted, num_kept=accepted + 1)
    return stats


def turn_of(rounds: list[tuple[int, int]], *, first: float = 0.5, gap: float = 0.25) -> Turn:
    """A turn with one delivery for each step, `gap` seconds apart."""
    stats = stats_of(*rounds)
    return Turn(
        prompt_len=3,
        token_ids=tuple(range(stats.num_emitted_tokens)),
        finish_reason="length",
        seconds=first + gap * (len(rounds) - 1),
        time_to_first_token=first,
        gaps=(gap,) * (len(rounds) - 1),
        stats=stats,
    )


def run_of(*turns: Turn, group: int = 0, repeat: int = 0, question_id: str = "1") -> GroupRun:
    answer = Answer(question_id, "code", turns)
    return GroupRun("plain", group, repeat, "code", answer.seconds, (answer,))


Rounds = st.lists(st.integers(0, 6).flatmap(lambda g: st.tuples(st.just(g), st.integers(0, g))), min_size=1, max_size=8)


def test_figures_of_a_known_run() -> None:
    figures = Figures.of([run_of(turn_of([(4, 4), (4, 1), (4, 0), (0, 0)]))])
    assert (figures.num_tokens, figures.seconds) == (9, 1.25)
    assert figures.tokens_per_second == pytest.approx(9 / 1.25)
    assert figures.stats.draft_acceptance_rate == pytest.approx(5 / 12)
    assert figures.acceptance_by_position == [2 / 3, 1 / 2, 1.0, 1.0]
    assert figures.stats.mean_acceptance_length == pytest.approx(1 + 5 / 3)
    assert figures.spec_bench_mean_accepted_tokens == pytest.approx(9 / 4)
    assert figures.inter_token_latency is not None
    assert (figures.inter_token_latency.p50, figures.inter_token_latency.num) == (0.25, 3)
    assert figures.time_per_output_token is not None
    assert figures.time_per_output_token.p50 == pytest.approx(0.75 / 8)


@given(st.lists(Rounds, min_size=1, max_size=6))
def test_counts_of_many_runs_are_the_sums_of_each(texts: list[list[tuple[int, int]]]) -> None:
    runs = [run_of(turn_of(rounds), group=i, question_id=str(i)) for i, rounds in enumerate(texts)]
    together, each = Figures.of(runs), [Figures.of([run]) for run in runs]
    assert together.stats == sum((figures.stats for figures in each), SpeculationStats())
    for name in ("num_questions", "num_answers", "num_tokens", "num_repeated_tokens", "seconds"):
        assert getattr(together, name) == pytest.approx(sum(getattr(figures, name) for figures in each))


def test_a_ratio_is_of_the_sums_not_a_mean_of_ratios() -> None:
    short, long = turn_of([(4, 4)]), turn_of([(4, 0)] * 9)
    figures = Figures.of([run_of(short), run_of(long, group=1, question_id="2")])
    assert figures.tokens_per_second == pytest.approx((5 + 9) / (short.seconds + long.seconds))
    assert figures.spec_bench_tokens_per_second == pytest.approx((5 / short.seconds + 9 / long.seconds) / 2)
    assert figures.stats.draft_acceptance_rate == pytest.approx(4 / 40)


def test_repeats_count_as_answers_but_not_as_questions() -> None:
    runs = [run_of(turn_of([(0, 0)] * 3), repeat=repeat) for repeat in range(4)]
    figures = Figures.of(runs)
    assert (figures.num_questions, figures.num_answers) == (1, 4)


def test_plain_decoding_has_no_acceptance_and_one_token_a_pass() -> None:
    figures = Figures.of([run_of(turn_of([(0, 0)] * 5))])
    assert figures.stats.conditional_acceptance is None
    assert figures.formula_acceptance_length is None
    assert figures.acceptance_by_position == []
    assert figures.spec_bench_mean_accepted_tokens == 1.0


@given(st.integers(1, 8), st.lists(st.integers(0, 8), min_size=1, max_size=20))
def test_with_one_draft_length_tau_is_the_papers_formula(gamma: int, accepted: list[int]) -> None:
    stats = stats_of(*((gamma, min(num, gamma)) for num in accepted))
    alpha = stats.conditional_acceptance
    assert alpha is not None
    assert formula_acceptance_length(stats) == pytest.approx(expected_length(alpha, gamma))


def test_with_several_draft_lengths_the_formula_averages_them() -> None:
    stats = stats_of((1, 1), (3, 1))
    alpha = 2 / 3
    expected = (expected_length(alpha, 1) + expected_length(alpha, 3)) / 2
    assert formula_acceptance_length(stats) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ours", "theirs", "position"),
    [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([4, 5], [4], 1), ([1], [2], 0)],
)
def test_first_difference_is_the_first_differing_position(
    ours: list[int], theirs: list[int], position: int | None
) -> None:
    assert first_difference(ours, theirs) == position


@given(st.lists(st.integers(0, 2), max_size=40))
def test_repeated_tokens_are_those_of_grams_that_come_again(ids: list[int]) -> None:
    inside = set()
    for a in range(len(ids) - 7):
        if any(ids[a : a + 8] == ids[b : b + 8] for b in range(len(ids) - 7) if b != a):
            inside |= set(range(a, a + 8))
    assert num_repeated(ids) == len(inside)


@pytest.mark.parametrize(
    ("alpha", "gamma", "length"), [(0.0, 4, 1.0), (1.0, 4, 5.0), (0.5, 1, 1.5), (0.8, 4, 3.3616), (0.9, 0, 1.0)]
)
def test_expected_length_follows_the_formula(alpha: float, gamma: int, length: float) -> None:
    assert expected_length(alpha, gamma) == pytest.approx(length)


def test_repeated_share_counts_every_occurrence() -> None:
    assert repeated_share(list(range(16))) == 0.0
    assert repeated_share([*range(8), *range(8), *range(50, 66)]) == 0.5
    assert repeated_share([7] * 16) == 1.0
    assert repeated_share([]) == 0.0
