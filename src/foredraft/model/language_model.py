"""A Hugging Face decoder that reads ragged batches from our cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.cache import KVCache, MemoryPool
from foredraft.model.attention import Pass, Span
from foredraft.model.routing import route, routed
from foredraft.model.rows import rule_of


@dataclass(frozen=True, slots=True)
class Read:
    """Tokens of one sequence that follow what the cache holds of it; logits are wanted for the last num_logits."""

    seq_id: int
    tokens: Sequence[int]
    num_logits: int


@dataclass(frozen=True, slots=True)
class Traits:
    """What loading found out about a model.

    vocab_size: the width of its logits. context_len: the longest sequence it can read. bytes_per_token: of cache.
    row_exact: whether a row's bits were seen not to depend on its company (see docs/exactness.md).
    """

    name: str
    vocab_size: int
    context_len: int
    bytes_per_token: int
    row_exact: bool


class LanguageModel:
    """Tokens in, logits out. The Hugging Face model itself stays as its owner made it."""

    def __init__(self, hf: PreTrainedModel, traits: Traits) -> None:
        self.hf = hf
        self.traits = traits
        self._row_rule = rule_of(hf)
        self._is_taken_over = False
        self._keeps_rows = "logits_to_keep" in inspect.signature(hf.forward).parameters

    def take_over(self) -> None:
        """From now on the model reads for us alone: it stays routed, which spares every pass the way there and back."""
        route(self.hf)
        self._is_taken_over = True

    @property
    def device(self) -> torch.device:
        return torch.device(self.hf.device)

    def new_cache(self, pool: MemoryPool) -> KVCache:
        return KVCache(pool, self.traits.bytes_per_token, self.traits.context_len)

    def read(self, reads: Sequence[Read], cache: KVCache) -> Tensor:
        """One pass over all reads; afterwards the cache holds their tokens too. Room must have been reserved.

        -> logits [sum(num_logits), V], read after read
        """
        ids: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        spans = []
        for read in reads:
            region = cache.region(read.seq_id)
            start, first_row = len(region.tokens), len(ids)
            if start + len(read.tokens) > region.capacity:
                raise RuntimeError(f"sequence {read.seq_id}: no room reserved for {len(read.tokens)} more tokens")
            ids.extend(read.tokens)
            positions.extend(range(start, start + len(read.tokens)))
            wanted.extend(range(len(ids) - read.num_logits, len(ids)))
            spans.append(Span(region, first_row, len(read.tokens), start))
        padding = self._row_rule.pad(len(ids)) - len(ids)
        spans[-1] = replace(spans[-1], padding=padding)
        logits = self._forward(ids + [0] * padding, positions + positions[-1:] * padding, wanted, spans)
        for read, span in zip(reads, spans, strict=True):
            span.region.tokens.extend(read.tokens)
        return logits

    @torch.inference_mode()
    def _forward(self, ids: list[int], positions: list[int], wanted: list[int], spans: list[Span]) -> Tensor:
        rows = wanted + [0] * (self._row_rule.pad(len(wanted)) - len(wanted))
        device = self.device
        index = torch.tensor(rows, device=device)
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([ids], device=device),
            "position_ids": torch.tensor([positions], device=device),
            # without it the library would take the ragged batch for packed training sequences
            "attention_mask": torch.ones(1, len(ids), dtype=torch.bool, device=device),
            "use_cache": False,
            "reading": Pass(spans),
        }
        if self._keeps_rows:
            inputs["logits_to_keep"] = index
        with nullcontext() if self._is_taken_over else routed(self.hf):
            logits: Tensor = self.hf(**inputs).logits[0]
        if not self._keeps_rows:
            logits = logits[index]
        return logits[: len(wanted)]
