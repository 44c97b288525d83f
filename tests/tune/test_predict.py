"""Predictions follow the formula of arXiv:2211.17192, with the measured cost of verification. Nothing here is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft import ForedraftError
from foredraft.bench import Configuration
from foredraft.tune.costs import StepCosts
from foredraft.tune.predict import PlainSpeed, Prediction, Predictor, predict
from foredraft.tune.rounds import Round, Trial

MOST = 6
EVERYTHING = np.zeros((1, 1), dtype=np.int64)

costs = st.floats(0.01, 1.0)
histograms = st.lists(st.integers(0, 20), min_size=MOST + 1, max_size=MOST + 1).filter(lambda counts: sum(counts) >= 8)


def a_round(drafted: int, kept: int, depth: int, verify: Callable[[int], float], draft: float) -> Round:
    return Round(verify(1 + drafted) + draft, draft, depth, int(depth > 0), (drafted,), (kept,))


def a_trial(rounds: Sequence[Round], group: int = 0, openings: Sequence[Round] = ()) -> Trial:
    steps = [*openings, *rounds]
    return Trial(group, sum(sum(one.num_kept) for one in steps), sum(one.seconds for one in steps), openings, rounds)


def runs_of(
    histogram: Sequence[int], verify: Callable[[int], float], draft: Callable[[int], float]
) -> dict[int, list[Trial]]:
    """Runs with drafts of 1 and of MOST tokens; histogram[j] of the uncut drafts had j accepted tokens."""
    return {
        depth: [
            a_trial(
                [
                    a_round(depth, min(accepted, depth) + 1, depth, verify, draft(depth))
                    for accepted, count in enumerate(histogram)
                    for _ in range(count)
                ]
            )
        ]
        for depth in (1, MOST)
    }


def plain_of(verify: Callable[[int], float]) -> PlainSpeed:
    return PlainSpeed([a_trial([a_round(0, 1, 0, verify, 0.0)] * 10)])


def predicted(runs: dict[int, list[Trial]], plain: PlainSpeed, gamma: int) -> Prediction:
    return predict(Predictor(runs), plain, Configuration("suffix", gamma))


@given(histograms, st.integers(1, MOST), costs, st.floats(0.0, 0.5), costs)
def test_the_speedup_follows_the_formula(
    histogram: list[int], gamma: int, first: float, more: float, draft: float
) -> None:
    """S = E[τ] / (γc + v(γ + 1)), E[τ] = 1 + Σ_{k≤γ} Π_{i≤k} α_i, c and v in plain steps."""

    def verify(num_rows: int) -> float:
        return first + more * num_rows

    plain_step = verify(1)
    reached = [sum(histogram[k:]) for k in range(MOST + 1)]  # drafts of which the first k tokens were accepted
    alphas = [reached[k + 1] / reached[k] if reached[k] else 0.0 for k in range(MOST)]
    expected_length = 1 + sum(float(np.prod(alphas[:k])) for k in range(1, gamma + 1))
    expected = expected_length / (gamma * draft / plain_step + verify(gamma + 1) / plain_step)
    runs = runs_of(histogram, verify, lambda depth: depth * draft)
    assert predicted(runs, plain_of(verify), gamma).speedup.value == pytest.approx(expected)


@pytest.mark.parametrize("gamma", range(1, MOST + 1))
def test_with_a_constant_alpha_the_prediction_is_the_closed_form(gamma: int) -> None:
    alpha, draft = 0.5, 0.1
    histogram = [2 ** (MOST - j - 1) for j in range(MOST)] + [
        1
    ]  # half of the drafts that reached this position are accepted here
    found = predicted(
        runs_of(histogram, lambda rows: 1.0, lambda depth: depth * draft), plain_of(lambda rows: 1.0), gamma
    )
    assert found.speedup.value == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha) / (gamma * draft + 1))


rounds_of_any_kind = st.builds(
    lambda seconds, share, drafted, accepted: Round(
        seconds, seconds * share, MOST, 1, (drafted,), (min(accepted, drafted) + 1,)
    ),
    st.floats(1.0, 2.0),
    st.floats(0.0, 0.3),
    st.integers(0, MOST),
    st.integers(0, MOST),
)


@given(st.lists(rounds_of_any_kind, min_size=1, max_size=30), st.lists(rounds_of_any_kind, max_size=3), costs)
def test_what_was_run_is_predicted_exactly(rounds: list[Round], openings: list[Round], rest: float) -> None:
    """Including the time between steps and that of prefill."""
    told = a_trial(rounds, openings=openings)
    trial = Trial(0, told.num_tokens, told.seconds + rest, openings, rounds)
    rate = Predictor({MOST: [trial]}).rate(MOST, EVERYTHING)
    assert rate[0] == pytest.approx(trial.num_tokens / trial.seconds)


def test_a_lookup_costs_the_rows_it_found_not_the_requested_ones() -> None:
    def verify(num_rows: int) -> float:
        return 1.0 if num_rows == 1 else 10.0

    found_nothing = [a_round(0, 1, 4, verify, 0.0)] * 30
    found = [a_round(4, 5, 4, verify, 0.0)] * 10
    speedup = predicted({4: [a_trial([*found_nothing, *found])]}, plain_of(verify), 4).speedup.value
    assert speedup == pytest.approx(80 / 130)


def test_texts_of_one_token_are_predicted_to_gain_nothing() -> None:
    """All their tokens come from the step that reads the prompt."""
    opening = [a_round(0, 1, 0, lambda rows: 1.0, 0.0)]
    runs = {depth: [a_trial([], openings=opening)] for depth in (1, MOST)}
    plain = PlainSpeed([a_trial([], openings=opening)])
    for gamma in range(1, MOST + 1):
        assert predicted(runs, plain, gamma).speedup.value == 1.0


def test_shorter_drafts_take_more_steps_in_easy_text() -> None:
    """All drafts in half of the text are accepted, and none in the other half. What long drafts predict for γ = 1 and γ = 2 is corrected
    by the results of drafts of one token."""

    def rounds(depth: int) -> list[Round]:
        easy = 840 // (depth + 1)
        return [a_round(depth, depth + 1, depth, lambda rows: 1.0, 0.0)] * easy + [
            a_round(depth, 1, depth, lambda rows: 1.0, 0.0)
        ] * 840

    runs = {depth: [a_trial(rounds(depth))] for depth in (1, MOST)}
    plain = plain_of(lambda rows: 1.0)
    for gamma in range(1, MOST + 1):
        truth = 1680 / len(rounds(gamma))
        alone = predicted({MOST: runs[MOST]}, plain, gamma).speedup.value
        mended = predicted(runs, plain, gamma).speedup.value
        assert abs(mended - truth) <= abs(alone - truth) + 1e-9
        if gamma in runs:
            assert mended == pytest.approx(truth)


def test_a_stall_does_not_count() -> None:
    """Neither in plain decoding nor with drafts, in a step or in a whole repeat."""
    quick = [a_round(2, 3, 2, lambda rows: 1.0, 0.5)] * 40
    held_up = [*quick[1:], a_round(2, 3, 2, lambda rows: 1000.0, 0.5)]
    plain = plain_of(lambda rows: 1.0)
    expected = predicted({2: [a_trial(quick)]}, plain, 2).speedup.value
    assert predicted({2: [a_trial(held_up)]}, plain, 2).speedup.value == pytest.approx(expected, rel=0.06)
    slow = [a_round(2, 3, 2, lambda rows: 2.0, 1.0)] * 40
    assert predicted({2: [a_trial(quick), a_trial(slow), a_trial(quick)]}, plain, 2).speedup.value == expected


def test_the_interval_is_over_the_prompts() -> None:
    same = [a_trial([a_round(2, 3, 2, lambda rows: 1.0, 0.5)] * 10, group) for group in range(4)]
    plain = PlainSpeed([a_trial([a_round(0, 1, 0, lambda rows: 1.0, 0.0)] * 30, group) for group in range(4)])
    interval = predicted({2: same}, plain, 2).speedup.interval
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx((2.0, 2.0))
    differing = [*same[:3], a_trial([a_round(2, 1, 2, lambda rows: 1.0, 0.5)] * 30, 3)]
    wider = predicted({2: differing}, plain, 2).speedup
    assert wider.interval is not None
    assert wider.interval.low < wider.value < wider.interval.high


def test_one_group_has_no_interval() -> None:
    runs = runs_of([4] * (MOST + 1), lambda rows: 1.0, lambda depth: 0.1)
    assert predicted(runs, plain_of(lambda rows: 1.0), 2).speedup.interval is None


def test_nothing_is_predicted_beyond_the_measured_lengths() -> None:
    runs = runs_of([4] * (MOST + 1), lambda rows: 1.0, lambda depth: 0.1)
    for gamma in (0, MOST + 1):
        with pytest.raises(ForedraftError, match="1 to 6"):
            predicted(runs, plain_of(lambda rows: 1.0), gamma)
    with pytest.raises(ForedraftError, match="runs with drafts"):
        Predictor({})


@given(st.lists(rounds_of_any_kind, max_size=20), st.integers(1, MOST), st.integers(1, 4), st.integers(1, 40))
def test_costs_are_never_negative(rounds: list[Round], depth: int, size: int, rows: int) -> None:
    found = StepCosts(rounds)
    assert found.draft_seconds(size, depth) >= 0.0
    assert found.verify_seconds(size, rows) >= 0.0
    assert found.draft_seconds(size, 0) == 0.0
    for one in rounds:
        least = -one.seconds - 1e-12
        assert found.difference(one, depth) >= least
        assert found.usual_seconds(one) + found.difference(one, depth) >= -1e-12


def test_a_busy_moment_at_one_depth_makes_no_prediction_negative() -> None:
    """All steps with many rows but one met a stall. The one that did not would have saved more than it took."""
    slow, quick, short = (
        Round(seconds, 0.001, depth, 1, (drafted,), (1,))
        for seconds, depth, drafted in ((0.03, 6, 6), (0.002, 6, 6), (0.001, 1, 1))
    )
    found = StepCosts([slow] * 5 + [quick, *[short] * 5])
    assert 0.0 < quick.seconds + found.difference(quick, 1) < quick.seconds
    runs = {1: [a_trial([short] * 5)], MOST: [a_trial([quick])]}
    assert predicted(runs, plain_of(lambda rows: 0.001), 2).speedup.value > 0
