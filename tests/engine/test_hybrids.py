"""A hybrid is added where a lookup and a model can share the drafting, and nowhere else."""

from __future__ import annotations

import pytest

from foredraft.drafters import HybridDrafter, ScriptedDrafter
from foredraft.engine.hybrids import hybrid_of, with_hybrid
from foredraft.engine.proposal import Drafter
from foredraft.policy import Hybrid

PAIRS = [
    (["suffix", "draft_model"], ("suffix", "draft_model")),
    (["eagle", "ngram"], ("ngram", "eagle")),
    (["ngram", "self-int8", "suffix"], ("ngram", "self-int8")),
    (["suffix", "mtp", "none"], ("suffix", "mtp")),
]


def drafters_of(names: list[str]) -> dict[str, Drafter]:
    return {name: ScriptedDrafter(lambda request: ()) for name in names}


@pytest.mark.parametrize(("names", "pair"), PAIRS, ids=str)
def test_a_hybrid_asks_the_first_lookup_and_the_first_model(names: list[str], pair: tuple[str, str]) -> None:
    given = drafters_of(names)
    drafters = with_hybrid(given)
    assert [*drafters] == [*names, "hybrid"], "the first drafter stays the first"
    hybrid = drafters["hybrid"]
    assert isinstance(hybrid, HybridDrafter)
    assert hybrid._parts == {name: given[name] for name in pair}
    assert hybrid_of(drafters) == Hybrid("hybrid", *pair)
    assert hybrid_of(names) is None


@pytest.mark.parametrize("names", [["suffix", "ngram"], ["draft_model"], ["none"], ["suffix", "remote"]], ids=str)
def test_no_hybrid_without_both(names: list[str]) -> None:
    drafters = with_hybrid(drafters_of(names))
    assert [*drafters] == names
    assert hybrid_of(drafters) is None
