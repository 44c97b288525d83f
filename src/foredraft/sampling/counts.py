"""How often each token was seen, kept as the prefix grows, so that a penalty costs O(new tokens) per row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from foredraft.sampling.sending import sent


class TokenCounts:
    """Distinct tokens of a prompt and the output after it, with the output's counts."""

    def __init__(self, prompt: Sequence[int]) -> None:
        distinct = list(dict.fromkeys(prompt))
        self._slots = {token: slot for slot, token in enumerate(distinct)}
        self._ids = np.array(distinct, dtype=np.int64)
        self._outputs = np.zeros(len(distinct), dtype=np.int64)
        self._num_prompt_ids = len(distinct)
        self._num_read = len(prompt)

    def catch_up(self, history: Sequence[int]) -> None:
        """Count what `history` (prompt and output, append-only) holds beyond the last call."""
        for position in range(self._num_read, len(history)):
            self.add(history[position])
        self._num_read = max(self._num_read, len(history))

    def add(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.append(self._ids, np.array([token] + [0] * max(slot, 16), dtype=np.int64))
            self._outputs = np.append(self._outputs, np.zeros(max(slot, 16) + 1, dtype=np.int64))
        elif slot >= self._num_prompt_ids:
            self._ids[slot] = token
        self._outputs[slot] += 1

    def remove(self, token: int) -> None:
        self._outputs[self._slots[token]] -= 1

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """(ids [N], their counts in the output [N], whether the repetition penalty sees them [N])."""
        n = len(self._slots)
        outputs = self._outputs[:n]
        seen = (outputs > 0) | (np.arange(n) < self._num_prompt_ids)
        return (
            sent(torch.from_numpy(self._ids[:n].copy()), device, torch.int64),
            sent(torch.from_numpy(outputs.copy()), device, torch.int64),
            sent(torch.from_numpy(seen), device, torch.bool),
        )
