"""A model that several processes compute together, each with a share of the weights, heads, keys and values (Megatron-LM,
arXiv:1909.08053, as in transformers' `tp_plan`).

The first rank decides: it schedules, drafts, samples and verifies, as if it had the model to itself. Before each pass it sends the others
what they need to run the pass too: the batch, and the changes to the regions of its cache since the last pass. Their regions hold the
same rows of other heads. They know nothing about texts.
"""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple, NoReturn, Protocol

import torch
from transformers import PretrainedConfig

from foredraft.engine.region import Region
from foredraft.errors import ModelError
from foredraft.kernels import Kernels
from foredraft.model.batch import RaggedBatch, Reading, Span
from foredraft.model.language_model import Body, LanguageModel
from foredraft.model.ranks import Ranks, reason_of
from foredraft.model.warm_up import WarmUpSizes


class RowsCopied(NamedTuple):
    """See Region.copy_rows. target, source: numbers of regions."""

    target: int
    source: int
    length: int
    capacity: int

    def repeat(self, regions: dict[int, Region]) -> None:
        regions.setdefault(self.target, Region()).copy_rows(regions[self.source], self.length, self.capacity)


class RowsMoved(NamedTuple):
    """See Region.move_rows."""

    target: int
    slots: Sequence[int]
    first: int

    def repeat(self, regions: dict[int, Region]) -> None:
        regions[self.target].move_rows(self.slots, self.first)


class RegionFreed(NamedTuple):
    target: int

    def repeat(self, regions: dict[int, Region]) -> None:
        regions.pop(self.target, None)


Change = RowsCopied | RowsMoved | RegionFreed
"""A change to a region outside of a pass."""


class SharedPass(NamedTuple):
    """A pass that all ranks run. changes: to the regions before it. batch: its spans have no regions. regions: the number of each span's
    region."""

    changes: list[Change]
    batch: RaggedBatch
    regions: list[int]


class Journal:
    """The changes that have not been sent to the other ranks yet, in order."""

    def __init__(self) -> None:
        self._changes: list[Change] = []
        self._numbers = count()

    def new_region(self) -> JournaledRegion:
        return JournaledRegion(self, next(self._numbers))

    def add(self, change: Change) -> None:
        self._changes.append(change)

    def take(self) -> list[Change]:
        """Remove and return all changes, which then count as sent."""
        changes, self._changes = self._changes, []
        return changes


class JournaledRegion(Region):
    """A region of the first rank, which records its changes."""

    def __init__(self, journal: Journal, number: int) -> None:
        super().__init__()
        self.number = number
        self._journal = journal
        weakref.finalize(self, journal.add, RegionFreed(number)).atexit = False

    def copy_rows(self, source: Region, length: int, capacity: int) -> None:
        super().copy_rows(source, length, capacity)
        self._journal.add(RowsCopied(self.number, number_of(source), length, capacity))

    def move_rows(self, slots: Sequence[int], first: int) -> None:
        super().move_rows(slots, first)
        self._journal.add(RowsMoved(self.number, slots, first))


def number_of(region: Region) -> int:
    assert isinstance(region, JournaledRegion)
    return region.number


class Sender(Protocol):
    """Sends to the other ranks. is_broken: a pass has failed, so the ranks are no longer in step."""

    is_broken: bool

    def send(self, message: object) -> None: ...

    def end(self) -> None: ...


class LeadingBody:
    """The first rank's body. body: computes its share of a pass, and waits for the others' shares in it."""

    is_batch_invariant = False
    kernels: Kernels | None = None

    def __init__(self, body: Body, others: Sender) -> None:
        self._body = body
        self._others = others
        self._journal = Journal()
        self._failure: str | None = None
        weakref.finalize(self, others.end)

    def new_region(self) -> Region:
        """A region whose changes the other ranks repeat."""
        return self._journal.new_region()

    def __call__(self, batch: RaggedBatch, taps: Sequence[int] = ()) -> Reading:
        """Raises ModelError if the pass fails, for example because another rank has ended; no pass can be run after that."""
        if self._failure is not None:
            raise ModelError(self._failure)
        try:
            self._others.send(self._shared(batch))
            return self._body(batch, taps)
        except Exception as error:
            raise ModelError(self._break(f"has failed ({reason_of(error)})")) from error
        except BaseException:
            self._break("was interrupted")
            raise

    def _break(self, how: str) -> str:
        """Run no more passes. -> why"""
        self._others.is_broken = True
        self._failure = f"a pass that all ranks share {how}: restart all ranks"
        return self._failure

    def _shared(self, batch: RaggedBatch) -> SharedPass:
        regions = [number_of(span.region) for span in batch.spans]
        spans = [replace(span, region=_NOWHERE) for span in batch.spans]
        return SharedPass(self._journal.take(), batch._replace(spans=spans), regions)

    def take_over(self) -> None:
        self._body.take_over()

    def warm_up(self, sizes: WarmUpSizes) -> None:
        """The library's code prepares nothing."""


_NOWHERE = Region()
"""Replaces a region that only the first rank knows."""


class Follower:
    """Runs the passes of another rank. body: computes its share."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._regions: dict[int, Region] = {}

    @property
    def regions(self) -> Mapping[int, Region]:
        """The regions by their numbers."""
        return self._regions

    @torch.inference_mode()
    def read(self, shared: SharedPass) -> Reading:
        for change in shared.changes:
            change.repeat(self._regions)
        spans = [self._at_home(span, number) for span, number in zip(shared.batch.spans, shared.regions, strict=True)]
        return self._body(shared.batch._replace(spans=spans))

    def _at_home(self, span: Span, number: int) -> Span:
        return replace(span, region=self._regions[number])


def lead_or_follow(model: LanguageModel, ranks: Ranks) -> LanguageModel:
    """-> on the first rank, the model whose passes all ranks run. The other ranks run those passes here, and then end their process.

    model: as each rank has loaded it. No row's bits are promised: sums over ranks depend on the number of rows.
    """
    if not ranks.is_first:
        model.take_over()
        follow(Follower(model.body), ranks)
    return LanguageModel(model.hf, replace(model.traits, row_exact=False), LeadingBody(model.body, ranks))


def follow(follower: Follower, ranks: Ranks) -> NoReturn:
    """Run every pass of the first rank. Raises SystemExit when that rank ends, with a message if it ended badly or a pass fails here."""
    _leave_signals_to_the_first_rank()
    try:
        while (shared := ranks.receive()) is not None:
            follower.read(shared)
    except Exception as error:
        raise SystemExit(f"error: rank {ranks.world.rank}: no more passes can be run ({reason_of(error)})") from error
    raise SystemExit(0)


def _leave_signals_to_the_first_rank() -> None:
    """A terminal's Ctrl-C and torchrun's SIGTERM reach every rank; the first may have texts to finish."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def refuse_unsplittable(config: PretrainedConfig, name: str, num_ranks: int) -> None:
    """Raise ModelError for a model whose heads the ranks cannot share evenly. The library refuses models without a plan."""
    text = config.get_text_config()
    for what in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, what, None)
        if isinstance(heads, int) and heads % num_ranks:
            raise ModelError(
                f"{name}: its {what} is {heads}, which {num_ranks} ranks cannot share evenly: use a number of ranks that divides it"
            )
