"""Attention of encoder-decoders: among the tokens of a source, and from a decoder's rows to a source.

A decoder's layers attend twice. The mask rule that the library made tells the two apart: a causal one for the decoder's own keys, and one
that hides nothing for the source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.masking_utils import bidirectional_mask_function

from foredraft.engine.region import KEY_MULTIPLE
from foredraft.engine.sources import SourceKeys
from foredraft.kernels import AttentionSpan, Kernels
from foredraft.model.attention import AttentionMetadata, Chain, LayerAttention, MaskFunction, attention, shape_of
from foredraft.model.batch import Span


class PositionBias(NamedTuple):
    """The bias of attention scores by the distance of a key from its query (T5). table: [H, 2 * most + 1] float32 or more, for the
    distances key - query from -most to most; larger distances count as `most`."""

    table: Tensor

    @classmethod
    def of(cls, module: Any) -> PositionBias:
        """As computed by the library's module that has the embedding of the distances."""
        most = int(module.relative_attention_max_distance)
        with torch.inference_mode():
            scores = module.compute_bias(most + 1, most + 1)[0]  # [H, queries, keys]
        # the last query sees keys up to `most` before it, the first one up to `most` after it
        table = torch.cat([scores[:, -1], scores[:, 0, 1:]], dim=1)
        return cls(table.to(torch.promote_types(table.dtype, torch.float32)).contiguous())

    def between(self, queries: Tensor, keys: Tensor) -> Tensor:
        """queries: [R], keys: [N], positions -> [H, R, N]"""
        most = self.table.shape[1] // 2
        distances = (keys[None] - queries[:, None]).clamp(-most, most) + most
        return self.table[:, distances]


Biases = Mapping[int, PositionBias]
"""By layer. Empty for a model that adds positions to its embeddings."""


@dataclass(slots=True)
class DecoderMetadata(AttentionMetadata):
    """A pass of a decoder whose regions have sources. biases: of its self-attention."""

    biases: Biases = field(default_factory=dict)
    _biased: dict[tuple[int, MaskFunction, int, int, int], Tensor] = field(default_factory=dict)

    @property
    def has_bias(self) -> bool:
        return bool(self.biases)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kind: LayerAttention) -> Tensor:
        """See AttentionMetadata.attend."""
        if kind.rule is bidirectional_mask_function:
            return self._attend_to_sources(int(module.layer_idx), query, kind)  # type: ignore[arg-type]
        return AttentionMetadata.attend(self, module, query, key, value, kind)  # slots forbid super() in a dataclass

    def scores_added(
        self, layer: int, rule: MaskFunction, chain: Chain, num_rows: int, groups: int, like: Tensor
    ) -> Tensor:
        """The mask with the layer's bias. -> [1 or H, groups * R, N]"""
        mask = self.mask(rule, chain, num_rows, groups, like)
        bias = self.biases.get(layer)
        if bias is None:
            return mask
        num_keys = chain.keys.shape[1]
        key = (id(bias.table), rule, chain.start, num_rows, num_keys)
        if key not in self._biased:
            queries = torch.arange(chain.start, chain.start + num_rows, device=like.device)
            added = bias.between(queries, torch.arange(num_keys, device=like.device)).to(like.dtype)
            self._biased[key] = mask + added.reshape(chain.keys.shape[0], groups * num_rows, num_keys)
        return self._biased[key]

    def bias_table(self, layer: int) -> Tensor | None:
        """See AttentionMetadata."""
        bias = self.biases.get(layer)
        return None if bias is None else bias.table

    def _attend_to_sources(self, layer: int, query: Tensor, kind: LayerAttention) -> Tensor:
        """query: [Hq, T, Dk] -> [T, Hq, Dv]. Every row sees all of its sequence's source."""
        if self.kernels is not None:
            spans = [_span_over_source(span, layer) for span in self.spans]
            return self.kernels.attend(spans, query, shape_of(kind), query.shape[1])
        parts = []
        for span in self.spans:
            assert span.region.source is not None
            keys, values = span.region.source.layers[layer]
            queries = query[:, span.first_row : span.first_row + span.num_rows]
            parts.append(_attend_to_all(queries, keys, values, query.new_zeros(1, 1, keys.shape[1]), kind))
            if span.padding:
                parts.append(query.new_zeros(span.padding, query.shape[0], values.shape[2]))
        return torch.cat(parts)


@dataclass(slots=True)
class EncoderMetadata:
    """A pass of an encoder. sources: flattened, in order. num_padding: rows after them that belong to no source. biases: of its layers.
    kernels: see AttentionMetadata."""

    sources: Sequence[SourceKeys]
    num_padding: int
    biases: Biases
    kernels: Kernels | None = None

    @property
    def has_bias(self) -> bool:
        return bool(self.biases)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kind: LayerAttention) -> Tensor:
        """See AttentionMetadata.attend. A row sees the tokens of its source that the layer's rule allows."""
        bias = self.biases[int(module.layer_idx)] if self.biases else None  # type: ignore[arg-type]
        if self.kernels is not None:
            spans = [
                AttentionSpan(
                    *(rows, 0, readable(key[:, rows]), readable(value[:, rows])),
                    None if kind.rule is bidirectional_mask_function else _seen(kind.rule, rows, query).contiguous(),
                    rows.stop - rows.start,
                )
                for rows in rows_of_sources(self.sources)
            ]
            shape = shape_of(kind, None if bias is None else bias.table)
            return self.kernels.attend(spans, query, shape, query.shape[1])
        parts = []
        for rows in rows_of_sources(self.sources):
            seen = _seen(kind.rule, rows, query)
            added = query.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)[None]
            if bias is not None:
                positions = torch.arange(rows.stop - rows.start, device=query.device)
                added = added + bias.between(positions, positions).to(query.dtype)
            groups = query.shape[0] // key.shape[0]
            added = (
                added.repeat(1, groups, 1)
                if added.shape[0] == 1
                else added.reshape(key.shape[0], -1, rows.stop - rows.start)
            )
            parts.append(_attend_to_all(query[:, rows], key[:, rows], value[:, rows], added, kind))
        parts.append(query.new_zeros(self.num_padding, query.shape[0], value.shape[2]))
        return torch.cat(parts)


def rows_of_sources(sources: Sequence[SourceKeys]) -> Iterator[slice]:
    """The rows of each source, when they follow each other."""
    ends = accumulate((source.length for source in sources), initial=0)
    return (slice(*pair) for pair in pairwise(ends))


def encoded_rows(sources: Sequence[SourceKeys]) -> Tensor:
    """The outputs of another model's encoder that these sources carry, [T, width], one after the other."""
    rows = [source.encoded for source in sources if source.encoded is not None]
    assert len(rows) == len(sources)
    return torch.cat(rows)


def readable(states: Tensor) -> Tensor:
    """A copy of keys or values [.., N, D], followed by memory that the kernels may read: they read sixteen keys at a time."""
    memory = states.new_zeros(states.numel() + (KEY_MULTIPLE - 1) * states.shape[-1])
    return memory[: states.numel()].view(states.shape).copy_(states)


def _seen(rule: MaskFunction, rows: slice, like: Tensor) -> Tensor:
    """[R, R] bool: which of a source's tokens see which others by the rule"""
    positions = torch.arange(rows.stop - rows.start, device=like.device)
    seen: Tensor = rule(0, 0, positions[:, None], positions[None])
    return seen.expand(len(positions), len(positions))


def _span_over_source(span: Span, layer: int) -> AttentionSpan:
    assert span.region.source is not None
    rows = slice(span.first_row, span.first_row + span.num_rows)
    return AttentionSpan(rows, span.start, *span.region.source.layers[layer], num_seen=span.region.source.length)


def _attend_to_all(query: Tensor, keys: Tensor, values: Tensor, added: Tensor, kind: LayerAttention) -> Tensor:
    """query: [Hq, R, Dk], keys: [H, N, Dk], values: [H, N, Dv], added: to the scores, broadcast to [H, G * R, N] -> [R, Hq, Dv]"""
    grouped = query.reshape(keys.shape[0], -1, query.shape[2])
    return attention(grouped, keys, values, added, kind).view(query.shape[0], query.shape[1], -1).transpose(0, 1)
