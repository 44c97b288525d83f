"""The interface of constraints on how a text may continue, and the masks made from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foredraft.sampling.devices import to_device

Bits: TypeAlias = npt.NDArray[np.uint8]
"""Bit i % 8 of byte i // 8 says whether id i is allowed next. Ids beyond the last byte are not."""

_ALL = np.uint8(255)


class Constraint(Protocol):
    """Decides how one text may continue. A pure function of the text's output, i.e. the tokens after its prompt in
    history + drafted: it may remember its state there, so that a call costs only the new tokens, but this must not change the result.

    Every method raises ForedraftError if it cannot decide.
    """

    @property
    def allows_drafts(self) -> bool:
        """Whether a step may draft for this text. Called once per step, before anything is drafted."""
        ...

    def allowed(self, history: Sequence[int], drafted: Sequence[int]) -> Bits:
        """The ids that may follow history + drafted. Do not write to the result."""
        ...

    def num_allowed(self, history: Sequence[int], drafted: Sequence[int]) -> int:
        """The number of draft tokens before the first that is not `allowed` after those before it, or that follows the end of the
        text."""
        ...

    def forced(self, history: Sequence[int], drafted: Sequence[int], at_most: int) -> list[int]:
        """The ids that must follow history + drafted, as long as only one is allowed, up to the end of the text."""
        ...


def has_id(bits: Bits, token: int) -> bool:
    """Whether this id is allowed next."""
    return token // 8 < len(bits) and bool(bits[token // 8] >> token % 8 & 1)


def only_id(bits: Bits) -> int | None:
    """The only id that is allowed next; None if there are several, or none."""
    places = np.flatnonzero(bits)
    if len(places) != 1:
        return None
    byte = int(bits[places[0]])
    return None if byte & (byte - 1) else 8 * int(places[0]) + byte.bit_length() - 1


def refused_ids(masks: Sequence[Bits], width: int) -> Tensor:
    """Which of the first `width` ids are not allowed next, for each of R masks. [R, width] bool"""
    packed = np.full((len(masks), -(-width // 8)), _ALL)
    for place, bits in enumerate(masks):
        size = min(len(bits), packed.shape[1])
        np.invert(bits[:size], out=packed[place, :size])
    return torch.from_numpy(np.unpackbits(packed, axis=1, count=width, bitorder="little")).view(torch.bool)


def refuse(logits: Tensor, masks: Sequence[tuple[int, Bits]]) -> None:
    """Write -inf to the logits of all ids that are not allowed next. logits: [R, V]; masks: (row, its bits)"""
    if not masks:
        return
    refused = to_device(refused_ids([bits for _, bits in masks], logits.shape[1]), logits.device, torch.bool)
    if len(masks) == logits.shape[0]:
        logits.masked_fill_(refused, -torch.inf)
        return
    rows = to_device([row for row, _ in masks], logits.device, torch.int64)
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(refused, -torch.inf))
