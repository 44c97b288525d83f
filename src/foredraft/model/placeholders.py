"""Passes over tokens that a device is still choosing. In their reads a placeholder, the number -1 - i, stands for number i of a tensor on
that device.

So the device goes on with the target's pass as soon as it has drafted, while the host waits for the draft, checks it and builds the
tables of its verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from foredraft.model.batch import RaggedBatch, Read, Reading
from foredraft.utils.host_copy import HostCopy


def placeholders(num_tokens: int, column: int, num_columns: int) -> list[int]:
    """Those of the first num_tokens numbers of a column of a matrix."""
    return [-1 - (row * num_columns + column) for row in range(num_tokens)]


class LaunchedRead(NamedTuple):
    """A pass under way. reads, batch: with placeholders. ids: what these stand for; the pass reads 0 instead of a negative one."""

    reads: Sequence[Read]
    batch: RaggedBatch
    ids: HostCopy
    reading: Reading

    def is_of(self, reads: Sequence[Read]) -> bool:
        """Whether it reads the same tokens as these, which have no placeholders. Waits for the ids."""
        numbers = [number for row in self.ids.tolist() for number in row]
        return list(reads) == [replace(read, tokens=_known(read.tokens, numbers)) for read in self.reads]


def _known(tokens: Sequence[int], numbers: Sequence[int]) -> list[int]:
    return [numbers[-1 - token] if token < 0 else token for token in tokens]
