"""The drafters of an engine, called by name."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from foredraft.engine.cache import KVCache
from foredraft.engine.contract import check_drafter, check_probs, check_proposal
from foredraft.engine.forced_prefix import ForcedPrefix, apply_constraints
from foredraft.engine.proposal import (
    DeviceDraft,
    Drafter,
    DraftRequest,
    Features,
    PendingProposal,
    Proposal,
    begin,
    bytes_held,
    grows_trees,
    reads_encoder,
    shares_cache,
    taps_of,
)
from foredraft.engine.stats import PrefixStats
from foredraft.engine.step import ScheduledSequence
from foredraft.sampling import Pending
from foredraft.utils.isolation import Shield

T = TypeVar("T")

NUM_CHECKED = 16
"""How many sampled proposals of a drafter have their probabilities checked. In Python's development mode (python -X dev) all do."""


@runtime_checkable
class RetainingDrafter(Drafter, Protocol):
    """A drafter that can keep what it holds for ended sequences, for later ones with the same prefix."""

    prefix_stats: PrefixStats

    def retain(self, seq_id: int, history: Sequence[int]) -> None:
        """This sequence ended with this history. The part of its keys and values that belongs to the history may be kept, as long as
        the pool can evict it at any time."""
        ...

    def drop_retained(self) -> None: ...


class Drafts(NamedTuple):
    """The drafts of a step. proposal: row b for scheduled[b]. times: the seconds that each drafter took, by name. check_time: the seconds
    that checks of the first proposals took besides. failures: the exceptions of drafters that raised or broke their contract, by name;
    their rows have no draft."""

    proposal: Proposal
    times: dict[str, float]
    check_time: float
    failures: dict[str, Exception]


class DrafterGroup:
    """All drafters of an engine. An exception in one of them ends no request.

    drafters: by the names that policies use. taps: the hidden states of the target that any of them reads. reads_encoder: whether
    any of them reads the output of the target's encoder.

    Raises DrafterError for an object that is not a drafter.
    """

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        for drafter in drafters.values():
            check_drafter(drafter)
        self._drafters = dict(drafters)
        self._inputs = {name: _Inputs.of(drafter) for name, drafter in drafters.items()}
        self.taps = tuple(sorted({tap for inputs in self._inputs.values() for tap in inputs.taps}))
        self.reads_encoder = any(inputs.encoded for inputs in self._inputs.values())
        self._shield = Shield()
        self._num_sampled: Counter[str] = Counter()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._drafters)

    def propose(self, scheduled: Sequence[ScheduledSequence], vocab_size: int, cache: KVCache | None = None) -> Drafts:
        """`begin` and `collect`."""
        return self.collect(self.begin(scheduled, cache), vocab_size)

    def begin(self, scheduled: Sequence[ScheduledSequence], cache: KVCache | None = None) -> Drafting:
        """Start to draft for each sequence with the drafter that it names; a sequence without one gets only forced tokens. All drafters
        begin before any is waited for.

        cache: the target's, for drafters that read it.
        """
        if not any(item.max_draft for item in scheduled):
            return Drafting(len(scheduled), [], [])
        forced_prefixes = [ForcedPrefix.of(item.sequence, item.max_draft, item.shape) for item in scheduled]
        places: dict[str, list[int]] = {}
        for b, (item, forced) in enumerate(zip(scheduled, forced_prefixes, strict=True)):
            if item.drafter and forced.room:
                places.setdefault(item.drafter, []).append(b)
        questions = [_Question(name, rows) for name, rows in places.items()]
        for question in questions:
            question.timed(partial(self._begin, question, forced_prefixes, cache))
        return Drafting(len(scheduled), forced_prefixes, questions)

    def collect(self, drafting: Drafting, vocab_size: int) -> Drafts:
        """Wait for the drafters, and check their proposals."""
        parts: list[tuple[Sequence[int], Proposal]] = []
        for question in drafting.questions:
            part = question.timed(partial(self._collect, question, vocab_size))
            if part is not None and question.checked(partial(self._check_probs, question.name, part)):
                parts.append((question.rows, part))
        times = {question.name: question.seconds for question in drafting.questions}
        failures = {question.name: question.error for question in drafting.questions if question.error is not None}
        proposal = Proposal.merged(parts, drafting.num_rows)
        check_time = sum(question.check_seconds for question in drafting.questions)
        return Drafts(apply_constraints(proposal, drafting.forced_prefixes), times, check_time, failures)

    def forget(self, seq_ids: list[int], names: Sequence[str] | None = None) -> None:
        """Let drafters forget these sequences. names: the drafters; None: all."""
        for name, drafter in self._drafters.items():
            if names is not None and name not in names:
                continue
            self._shield.call(drafter, partial(drafter.forget, seq_ids), None)

    def retain(self, seq_id: int, history: Sequence[int]) -> None:
        """A sequence ended whose prefix others may share; drafters that cannot retain it forget it."""
        for drafter in self._drafters.values():
            if isinstance(drafter, RetainingDrafter):
                self._shield.call(drafter, partial(drafter.retain, seq_id, history), None)
            else:
                self._shield.call(drafter, partial(drafter.forget, [seq_id]), None)

    def drop_retained(self) -> None:
        for drafter in self._retaining:
            self._shield.call(drafter, drafter.drop_retained, None)

    @property
    def prefix_stats(self) -> PrefixStats:
        """The prefix hits of all drafters together."""
        return sum((drafter.prefix_stats for drafter in self._retaining), PrefixStats())

    def give_up(self, seq_ids: list[int]) -> list[str]:
        """Forget these sequences to make room. -> the names of the drafters that held any cache memory"""
        held = [
            name
            for name, drafter in self._drafters.items()
            if self._shield.call(drafter, partial(bytes_held, drafter), 0)
        ]
        self.forget(seq_ids)
        return held

    def follows_target(self, name: str) -> bool:
        """Whether this drafter reads the target's hidden states, keys or values, which there are not before the target has read a text."""
        inputs = self._inputs[name]
        return bool(inputs.taps) or inputs.cache

    @property
    def _retaining(self) -> list[RetainingDrafter]:
        return [drafter for drafter in self._drafters.values() if isinstance(drafter, RetainingDrafter)]

    def _request_for(self, inputs: _Inputs, forced: ForcedPrefix, cache: KVCache | None) -> DraftRequest:
        sequence = forced.sequence
        return DraftRequest(
            sequence.seq_id,
            forced.tokens,
            forced.room,
            sequence.sampler,
            self._features(inputs.taps, sequence.seq_id, cache) if inputs.taps else None,
            len(forced.ids),
            cache.region(sequence.seq_id).shared_view() if cache is not None and inputs.cache else None,
            forced.shape if inputs.shapes else None,
            sequence.source,
            _encoded(cache, sequence.seq_id) if inputs.encoded else None,
        )

    def _features(self, taps: tuple[int, ...], seq_id: int, cache: KVCache | None) -> Features:
        region = None if cache is None else cache.region(seq_id)
        if region is None or region.features is None:
            return Features(torch.empty(0, 0)).narrowed(taps, self.taps)
        return Features(region.features, length=len(region.tokens)).narrowed(taps, self.taps)

    def _begin(self, question: _Question, forced_prefixes: Sequence[ForcedPrefix], cache: KVCache | None) -> None:
        inputs = self._inputs[question.name]
        question.requests = [self._request_for(inputs, forced_prefixes[b], cache) for b in question.rows]
        question.answer = begin(self._drafters[question.name], question.requests)

    def _collect(self, question: _Question, vocab_size: int) -> Proposal | None:
        """The proposal for the question's rows; None if the drafter failed when it began."""
        if question.answer is None:
            return None
        proposal = question.answer.resolve()
        if isinstance(proposal, Proposal):
            proposal = proposal.reread()
        check_proposal(self._drafters[question.name], proposal, question.requests, vocab_size)
        return proposal

    def _check_probs(self, name: str, proposal: Proposal) -> None:
        """The checks of a drafter's first proposals with probabilities."""
        if proposal.probs is not None and (self._num_sampled[name] < NUM_CHECKED or sys.flags.dev_mode):
            self._num_sampled[name] += 1
            check_probs(self._drafters[name], proposal)


class _Inputs(NamedTuple):
    """The inputs that a drafter declares (see Drafter): hidden states, the target's keys and values, the output of its encoder, and
    tree shapes."""

    taps: tuple[int, ...]
    cache: bool
    encoded: bool
    shapes: bool

    @classmethod
    def of(cls, drafter: Drafter) -> _Inputs:
        return cls(taps_of(drafter), shares_cache(drafter), reads_encoder(drafter), grows_trees(drafter))


class _Question:
    """One call of a drafter in a step. name: of the drafter. rows: the indices in the batch of the sequences to draft for. seconds:
    the time it has taken so far. check_seconds: that of checks which later steps do not need. error: the exception it raised."""

    def __init__(self, name: str, rows: Sequence[int]) -> None:
        self.name = name
        self.rows = rows
        self.requests: list[DraftRequest] = []
        self.answer: Pending[Proposal] | None = None
        self.seconds = self.check_seconds = 0.0
        self.error: Exception | None = None

    def timed(self, call: Callable[[], T]) -> T | None:
        """call(), whose time is added to seconds; None if it raises, and its exception is kept."""
        result, seconds = self._guarded(call)
        self.seconds += seconds
        return result

    def checked(self, check: Callable[[], None]) -> bool:
        """Whether check() passes; its time is added to check_seconds, and its exception is kept."""
        _, seconds = self._guarded(check)
        self.check_seconds += seconds
        return self.error is None

    def _guarded(self, call: Callable[[], T]) -> tuple[T | None, float]:
        """call(), or None if it raises, and the seconds that it took."""
        started = time.perf_counter()
        try:
            result = call()
        except Exception as error:
            self.error, result = error, None
        return result, time.perf_counter() - started


class Drafting(NamedTuple):
    """The drafts of a step, under way. num_rows: the number of sequences. forced_prefixes: one for each; () if nothing is drafted."""

    num_rows: int
    forced_prefixes: Sequence[ForcedPrefix]
    questions: Sequence[_Question]

    @property
    def on_device(self) -> DeviceDraft | None:
        """The whole draft, with a row for each sequence, if a device is still choosing its tokens and nothing will change them."""
        if len(self.questions) != 1 or any(forced.sequence.sampler.constraint for forced in self.forced_prefixes):
            return None
        [question] = self.questions
        draft = question.answer.draft if isinstance(question.answer, PendingProposal) else None
        if draft is None:
            return None
        by_row = dict(zip(question.rows, draft.rows, strict=True))
        return draft._replace(rows=[by_row.get(b, []) for b in range(self.num_rows)])


def _encoded(cache: KVCache | None, seq_id: int) -> Tensor | None:
    """The output of the target's encoder for a sequence's source; None before the encoder has run."""
    source = None if cache is None else cache.source(seq_id)
    return None if source is None else source.encoded
