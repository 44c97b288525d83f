"""Adds the drafter that asks a lookup first and a model elsewhere, where "auto" chooses the drafts."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from foredraft.drafters import HybridDrafter
from foredraft.engine.methods import DRAFT_METHODS, HYBRID, LOOKUPS, OWN_DRAFTS
from foredraft.engine.proposal import Drafter
from foredraft.policy import Hybrid


def with_hybrid(drafters: Mapping[str, Drafter]) -> dict[str, Drafter]:
    """These drafters, and a hybrid of the first lookup and the first method that drafts with a model or a head, if there are both."""
    pair = _pair_of(drafters)
    if pair is None:
        return dict(drafters)
    lookup, model = ((name, drafters[name]) for name in (pair.lookup, pair.model))
    return {**drafters, pair.name: HybridDrafter(lookup, model)}


def hybrid_of(names: Collection[str]) -> Hybrid | None:
    """The hybrid among the drafters of these names; None if there is none."""
    return _pair_of(names) if HYBRID in names else None


def _pair_of(names: Collection[str]) -> Hybrid | None:
    lookup = next((name for name in names if name in LOOKUPS), None)
    model = next((name for name in names if name in DRAFT_METHODS or name in OWN_DRAFTS), None)
    return None if lookup is None or model is None else Hybrid(HYBRID, lookup, model)
