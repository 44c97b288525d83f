"""Statistics merge by addition, and their ratios are those of the literature."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.engine.sequence import TokenSequence
from foredraft.engine.stats import SpeculationStats
from tests.laws import sampler_for


@st.composite
def records(draw: st.DrawFn) -> dict[str, int]:
    drafted = draw(st.integers(0, 5))
    accepted = draw(st.integers(0, drafted))
    return {
        "num_drafted": drafted,
        "num_accepted": accepted,
        "num_kept": draw(st.integers(0, accepted + 1)),
        "near_ties": draw(st.integers(0, 2)),
    }


def total(rows: list[dict[str, int]]) -> SpeculationStats:
    stats = SpeculationStats()
    for row in rows:
        stats.record(**row)
    return stats


@given(a=st.lists(records()), b=st.lists(records()), c=st.lists(records()))
def test_stats_merge_by_addition(a: list[dict[str, int]], b: list[dict[str, int]], c: list[dict[str, int]]) -> None:
    before = astuple(total(a))
    left = total(a)
    assert left + total(b) + total(c) == total(a + b + c)
    assert left + total(b) == total(b) + total(a)
    assert left + SpeculationStats() == left
    assert astuple(left) == before


@given(rows=st.lists(records(), min_size=1))
def test_the_counts_are_consistent(rows: list[dict[str, int]]) -> None:
    stats = total(rows)
    assert stats.num_steps == len(rows)
    assert stats.num_spec_steps == sum(stats.acceptance_histogram) == sum(row["num_drafted"] > 0 for row in rows)
    assert stats.num_draft_tokens == sum(stats.drafted_per_position) == sum(row["num_drafted"] for row in rows)
    assert stats.num_accepted_tokens == sum(stats.accepted_per_position)
    assert stats.num_accepted_tokens == sum(j * n for j, n in enumerate(stats.acceptance_histogram))
    assert stats.num_evaluated_tokens == sum(stats.evaluated_per_position)
    assert stats.num_emitted_tokens == sum(row["num_kept"] for row in rows)
    assert stats.num_accepted_tokens <= stats.num_evaluated_tokens <= stats.num_draft_tokens
    assert stats.num_accepted_tokens <= stats.num_emitted_tokens
    for accepted, evaluated, drafted in zip(
        stats.accepted_per_position, stats.evaluated_per_position, stats.drafted_per_position, strict=False
    ):
        assert accepted <= evaluated <= drafted


def test_the_ratios_have_their_usual_meanings() -> None:
    """Two drafts of four tokens, with four and one accepted, and a step without a draft."""
    stats = total(
        [
            {"num_drafted": 4, "num_accepted": 4, "num_kept": 5},
            {"num_drafted": 4, "num_accepted": 1, "num_kept": 2},
            {"num_drafted": 0, "num_accepted": 0, "num_kept": 1},
        ]
    )
    assert stats.draft_acceptance_rate == 5 / 8
    assert stats.conditional_acceptance == 5 / 6
    assert stats.mean_acceptance_length == 1 + 5 / 2
    assert stats.tokens_per_pass == 8 / 3
    assert stats.acceptance_histogram == [0, 1, 0, 0, 1]
    assert stats.drafted_per_position == [2, 2, 2, 2]
    assert stats.evaluated_per_position == [2, 2, 1, 1]
    assert stats.accepted_per_position == [2, 1, 1, 1]


@pytest.mark.parametrize(
    ("kept", "accepted", "evaluated"),
    [(4, 3, 4), (3, 3, 3), (2, 2, 2), (1, 1, 1)],
    ids=["recovered token kept", "cut behind the accepted", "cut inside", "cut at the first"],
)
def test_tokens_after_a_stop_are_not_counted(kept: int, accepted: int, evaluated: int) -> None:
    """Of five drafted tokens three are accepted, and the text ends after `kept` tokens."""
    stats = total([{"num_drafted": 5, "num_accepted": 3, "num_kept": kept}])
    assert (stats.num_accepted_tokens, stats.num_evaluated_tokens, stats.num_emitted_tokens) == (
        accepted,
        evaluated,
        kept,
    )
    assert stats.num_draft_tokens == 5


def test_the_counts_of_a_cut_text_are_those_of_its_tokens() -> None:
    """The stats of a sequence count exactly the tokens that it keeps."""
    sequence = TokenSequence(0, [9], sampler_for({}), max_len=50, speculative_tokens=4, end_ids=frozenset({0}))
    for new_ids, num_drafted in (([1, 2, 3], 4), ([4], 0), ([5, 0, 6, 7], 3)):
        kept = sequence.commit(new_ids, num_drafted)
        sequence.stats.record(num_drafted=num_drafted, num_accepted=len(new_ids) - 1, num_kept=kept)
    assert sequence.output_ids == [1, 2, 3, 4, 5, 0]
    assert sequence.stats.num_emitted_tokens == sequence.num_output
    assert sequence.stats.num_accepted_tokens == sum(origin == 1 for origin in sequence.origins)


def test_without_counts_ratios_are_none() -> None:
    stats = SpeculationStats()
    for ratio in ("mean_acceptance_length", "draft_acceptance_rate", "conditional_acceptance", "tokens_per_pass"):
        assert getattr(stats, ratio) is None
