"""The drafters of an engine, asked by name."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from foredraft.forced import Lead, fitted
from foredraft.proposal import Drafter, DraftRequest, Proposal
from foredraft.stats import PrefixStats
from foredraft.step import Work


@runtime_checkable
class RetainingDrafter(Drafter, Protocol):
    """A drafter that keeps what it holds of ended sequences for those that begin like them."""

    prefix_stats: PrefixStats

    def retain(self, seq_id: int, history: Sequence[int]) -> None:
        """This sequence ended with this history: of what is held for it, what belongs to the history may be kept, as long
        as the pool can have it back at any moment."""
        ...

    def drop_retained(self) -> None: ...


class Panel:
    """drafters: by the names that a policy knows them by."""

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        self._drafters = dict(drafters)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._drafters)

    def propose(self, works: Sequence[Work], vocab_size: int) -> tuple[Proposal, dict[str, float]]:
        """Every work's draft from the drafter it names; who names none gets none, but for the tokens that are forced.

        -> the proposal, row b for works[b], and the seconds each drafter took.

        Raises RuntimeError for a drafter that breaks the contract.
        """
        if not any(work.max_draft for work in works):
            return Proposal.merged([], len(works)), {}
        leads = [Lead.of(work.sequence, work.max_draft) for work in works]
        places: dict[str, list[int]] = {}
        for b, (work, lead) in enumerate(zip(works, leads, strict=True)):
            if work.drafter and lead.room:
                places.setdefault(work.drafter, []).append(b)
        parts, times = [], {}
        for name, rows in places.items():
            started = time.perf_counter()
            parts.append((rows, self._ask(name, [leads[b] for b in rows], vocab_size)))
            times[name] = time.perf_counter() - started
        return fitted(Proposal.merged(parts, len(works)), leads), times

    def forget(self, seq_ids: list[int]) -> None:
        for drafter in self._drafters.values():
            drafter.forget(seq_ids)

    def retain(self, seq_id: int, history: Sequence[int]) -> None:
        """A sequence ended whose beginning others may share; who keeps nothing forgets it."""
        for drafter in self._drafters.values():
            if isinstance(drafter, RetainingDrafter):
                drafter.retain(seq_id, history)
            else:
                drafter.forget([seq_id])

    def drop_retained(self) -> None:
        for drafter in self._retaining:
            drafter.drop_retained()

    @property
    def prefix_stats(self) -> PrefixStats:
        """Of all drafters together."""
        return sum((drafter.prefix_stats for drafter in self._retaining), PrefixStats())

    def give_up(self, seq_ids: list[int]) -> list[str]:
        """Forget, to make room -> the names of the drafters that held any of the cache memory."""
        held = [name for name, drafter in self._drafters.items() if getattr(drafter, "bytes_held", 0)]
        self.forget(seq_ids)
        return held

    @property
    def _retaining(self) -> list[RetainingDrafter]:
        return [drafter for drafter in self._drafters.values() if isinstance(drafter, RetainingDrafter)]

    def _ask(self, name: str, leads: list[Lead], vocab_size: int) -> Proposal:
        drafter = self._drafters[name]
        proposal = drafter.propose(
            [DraftRequest(lead.sequence.seq_id, lead.tokens, lead.room, lead.sequence.sampler) for lead in leads]
        )
        lens, allowed = proposal.lens.tolist(), [lead.room for lead in leads]
        if len(lens) != len(allowed) or any(length > most for length, most in zip(lens, allowed, strict=True)):
            raise RuntimeError(f"{type(drafter).__name__} proposed {lens}, allowed {allowed}")
        ids = [token for row, length in zip(proposal.ids.tolist(), lens, strict=True) for token in row[:length]]
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise RuntimeError(f"{type(drafter).__name__} proposed an id outside the vocabulary")
        return proposal
