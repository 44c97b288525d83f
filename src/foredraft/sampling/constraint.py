"""The seam for what a text may go on with, and the masks that come of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foredraft.sampling.devices import to_device

Bits: TypeAlias = npt.NDArray[np.uint8]
"""Bit i % 8 of byte i // 8 says whether id i may come next. Ids beyond the last byte may not."""

_ALL = np.uint8(255)


class Constraint(Protocol):
    """What one text may go on with. A pure function of the text's output, which is what stands behind its prompt in
    history + drafted: it may keep its place there, so that a call costs the tokens that are new, but not give another
    answer for it.

    Every method raises ForedraftError where it cannot say.
    """

    @property
    def allows_drafts(self) -> bool:
        """Whether a step may draft for this text. Asked once a step, before anything of the draft is known."""
        ...

    def allowed(self, history: Sequence[int], drafted: Sequence[int]) -> Bits:
        """Which ids may follow history + drafted. Do not write to it."""
        ...

    def num_allowed(self, history: Sequence[int], drafted: Sequence[int]) -> int:
        """How many draft tokens stand before the first that is not `allowed` behind those before it, or that comes behind the
        end."""
        ...

    def forced(self, history: Sequence[int], drafted: Sequence[int], at_most: int) -> list[int]:
        """The ids that follow history + drafted, as long as nothing else may; until the text ends with one of them."""
        ...


def has_id(bits: Bits, token: int) -> bool:
    """Whether this id may come next."""
    return token // 8 < len(bits) and bool(bits[token // 8] >> token % 8 & 1)


def only_id(bits: Bits) -> int | None:
    """The one id that may come next; None where there are others, or none."""
    places = np.flatnonzero(bits)
    if len(places) != 1:
        return None
    byte = int(bits[places[0]])
    return None if byte & (byte - 1) else 8 * int(places[0]) + byte.bit_length() - 1


def refused_ids(masks: Sequence[Bits], width: int) -> Tensor:
    """Which of the first `width` ids may not come next, for each of R masks. [R, width] bool"""
    packed = np.full((len(masks), -(-width // 8)), _ALL)
    for place, bits in enumerate(masks):
        size = min(len(bits), packed.shape[1])
        np.invert(bits[:size], out=packed[place, :size])
    return torch.from_numpy(np.unpackbits(packed, axis=1, count=width, bitorder="little")).view(torch.bool)


def refuse(logits: Tensor, masks: Sequence[tuple[int, Bits]]) -> None:
    """Write -inf over every id that may not come next. logits: [R, V]; masks: (row, its bits)"""
    if not masks:
        return
    refused = to_device(refused_ids([bits for _, bits in masks], logits.shape[1]), logits.device, torch.bool)
    if len(masks) == logits.shape[0]:
        logits.masked_fill_(refused, -torch.inf)
        return
    rows = to_device([row for row, _ in masks], logits.device, torch.int64)
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(refused, -torch.inf))
