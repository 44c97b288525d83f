"""Counts the tokens before a row. The cost is proportional to the tokens by which it differs from the previous row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from foredraft.sampling.devices import to_device
from foredraft.utils.prefix import common_prefix


class TokenCounts:
    """The distinct tokens of a prompt and the output after it, with their counts in the output.

    `go_to` moves the counts to a prefix. They depend on that prefix alone, so a drafter and the verifier can share them.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        distinct = list(dict.fromkeys(prompt))
        self._slots = {token: slot for slot, token in enumerate(distinct)}
        self._ids = np.array(distinct, dtype=np.int64)
        self._counts = np.zeros(len(distinct), dtype=np.int64)
        self._num_prompt_ids = len(distinct)
        self._prompt_len = len(prompt)
        self._output: list[int] = []  # the counted tokens

    def go_to(self, history: Sequence[int], drafted: Sequence[int] = ()) -> None:
        """Count the output part of history + drafted, and nothing else."""
        output = [*history[self._prompt_len :], *drafted]
        kept = common_prefix(self._output, output)
        for token in self._output[kept:]:
            self._remove(token)
        for token in output[kept:]:
            self._add(token)
        self._output = output

    def arrays(self) -> tuple[Tensor, Tensor, int]:
        """(ids [N], their counts in the output [N], how many of them are in the prompt: these come first)."""
        n = len(self._slots)
        ids, counts = (torch.from_numpy(each[:n].copy()) for each in (self._ids, self._counts))
        return ids, counts, self._num_prompt_ids

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """(ids [N], their counts in the output [N], whether the repetition penalty applies to them [N])."""
        ids, counts, num_prompt_ids = self.arrays()
        seen = (counts > 0) | (torch.arange(len(ids)) < num_prompt_ids)
        return (
            to_device(ids, device, torch.int64),
            to_device(counts, device, torch.int64),
            to_device(seen, device, torch.bool),
        )

    def _add(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.append(self._ids, np.zeros(max(slot, 16) + 1, dtype=np.int64))
            self._counts = np.append(self._counts, np.zeros(max(slot, 16) + 1, dtype=np.int64))
        self._ids[slot] = token
        self._counts[slot] += 1

    def _remove(self, token: int) -> None:
        self._counts[self._slots[token]] -= 1
