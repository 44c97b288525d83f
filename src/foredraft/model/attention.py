"""Our attention, registered in the interface through which transformers routes the attention of its models.

A pass is one flattened ragged batch [1, T]: each span of rows belongs to one sequence, reads that sequence's own keys and values, and is
masked by the rule that the library made for the layer, evaluated at the sequence's own positions.

Bits: a plain product, a float32 softmax and a plain product, with keys padded to a multiple of 16. In bfloat16 a row's bits then depend
neither on how many rows share the pass nor on how many keys follow its own (see docs/internals/exactness.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_causal_mask_function,
)

from foredraft.engine.region import KEY_MULTIPLE
from foredraft.kernels import AttentionShape, AttentionSpan, Kernels
from foredraft.model.batch import Branch, RaggedBatch, Span, branches_of
from foredraft.model.rows import SMALL_PRODUCT

NAME = "foredraft"
_KEY_BLOCK = 1024

MaskFunction = Callable[[Any, Any, Tensor, Tensor], Tensor]
"""(batch, head, query positions, key positions) -> bool: which keys a query may see."""


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Passed through a model in place of its attention mask."""

    function: MaskFunction


class Chain(NamedTuple):
    """Rows of a pass that follow each other, with the keys and values they see. rows: [R], their indices in the pass, or a slice of it.
    start: the position of the first. keys: [H, N, Dk], values: [H, N, Dv], in order of position; those after the last row are finite."""

    rows: slice | Tensor
    start: int
    keys: Tensor
    values: Tensor

    @property
    def num_rows(self) -> int:
        return self.rows.stop - self.rows.start if isinstance(self.rows, slice) else len(self.rows)


@dataclass(slots=True)
class AttentionMetadata:
    """What attention reads in one forward pass of the model: spans that cover its rows in order, padding included.

    kernels: the compiled ones, if the model is in bfloat16 on the CPU; None: PyTorch's.
    """

    spans: list[Span]
    kernels: Kernels | None = None
    _masks: dict[tuple[MaskFunction, int, int, int, int, torch.device], Tensor] = field(default_factory=dict)
    _seen: dict[tuple[MaskFunction, int, int, int], Tensor] = field(default_factory=dict)
    _branches: dict[int, list[Branch]] = field(default_factory=dict)

    @property
    def has_bias(self) -> bool:
        """Whether scores get a bias by the distance of a key, which replaces the library's own."""
        return False

    @classmethod
    def of(cls, batch: RaggedBatch, kernels: Kernels | None) -> AttentionMetadata:
        return cls(batch.spans, kernels)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kind: LayerAttention) -> Tensor:
        """The attention of one layer. query: [Hq, T, Dk], key: [Hkv, T, Dk], value: [Hkv, T, Dv] -> [T, Hq, Dv]"""
        return attend_spans(self, int(module.layer_idx), query, key, value, kind)  # type: ignore[arg-type]

    def scores_added(
        self, layer: int, rule: MaskFunction, chain: Chain, num_rows: int, groups: int, like: Tensor
    ) -> Tensor:
        """What is added to the scores of num_rows positions, starting at the chain's first. -> [1 or H, groups * R, N]"""
        return self.mask(rule, chain, num_rows, groups, like)

    def bias_table(self, layer: int) -> Tensor | None:
        """The bias by distance for the compiled kernels, see AttentionShape; None: only the mask."""
        return None

    def chains(self, layer: int, key: Tensor, value: Tensor) -> Iterator[Chain]:
        """Write the keys and values of all rows to their regions -> the rows of each span as chains: one, or one per branch of a tree.
        key: [H, T, Dk], value: [H, T, Dv]"""
        for index, span in enumerate(self.spans):
            rows = slice(span.first_row, span.first_row + span.num_rows)
            if span.paths is None:
                yield Chain(rows, span.start, *span.region.write(layer, key[:, rows], value[:, rows], span.start))
                continue
            span.region.write_to(layer, key[:, rows], value[:, rows], [path[-1] for path in span.paths])
            for branch in self._branches_of(index):
                start = span.start + len(branch.slots) - len(branch.rows)
                places = torch.tensor(branch.rows, device=key.device) + span.first_row
                yield Chain(places, start, *span.region.along(layer, span.start, branch.slots))

    def seen(self, rule: MaskFunction, chain: Chain) -> Tensor:
        """[R, N] bool: which keys the rows may see by the rule; keys after a row need not be hidden."""
        num_keys = chain.keys.shape[1]
        key = (rule, chain.start, chain.num_rows, num_keys)
        if key not in self._seen:
            queries = torch.arange(chain.start, chain.start + chain.num_rows)[:, None]
            shape = (chain.num_rows, num_keys)
            self._seen[key] = rule(0, 0, queries, torch.arange(num_keys)[None]).expand(shape).contiguous()
        return self._seen[key]

    def mask(self, rule: MaskFunction, chain: Chain, num_rows: int, groups: int, like: Tensor) -> Tensor:
        """Additive mask [1, groups * R, N] of num_rows positions, starting at the chain's first, made once per rule, device and pass."""
        num_keys = chain.keys.shape[1]
        key = (rule, chain.start, num_rows, num_keys, groups, like.device)
        if key not in self._masks:
            queries = torch.arange(chain.start, chain.start + num_rows, device=like.device)[:, None]
            keys = torch.arange(num_keys, device=like.device)[None]
            hidden = ~(rule(0, 0, queries, keys) & (keys <= queries))
            mask = like.new_zeros(num_rows, num_keys).masked_fill_(hidden, -torch.inf)
            self._masks[key] = mask.repeat(groups, 1)[None]
        return self._masks[key]

    def _branches_of(self, index: int) -> list[Branch]:
        if index not in self._branches:
            paths = self.spans[index].paths
            assert paths is not None
            self._branches[index] = branches_of(paths)
        return self._branches[index]


class PassMetadata(Protocol):
    """What attention needs to know of its pass."""

    @property
    def has_bias(self) -> bool: ...

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kind: LayerAttention) -> Tensor: ...


class LayerAttention(NamedTuple):
    """How one layer attends. rule: which keys a query sees. scale, softcap: of the scores. sinks: one per head."""

    rule: MaskFunction
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskRule | Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    attention_metadata: PassMetadata | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query: [1, Hq, T, Dk], key: [1, Hkv, T, Dk], value: [1, Hkv, T, Dv] -> [1, T, Hq, Dv]."""
    if attention_metadata is None:
        raise NotImplementedError("it does not pass its keyword arguments on to its attention")
    if (position_bias is not None and not attention_metadata.has_bias) or isinstance(attention_mask, Tensor):
        raise NotImplementedError("its attention needs a mask or a bias of its own")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = rule_of_mask(attention_mask, sliding_window, is_causal=getattr(module, "is_causal", True))
    kind = LayerAttention(rule, scale, softcap, s_aux)
    return attention_metadata.attend(module, query[0], key[0], value[0], kind)[None], None


def attend_spans(
    metadata: AttentionMetadata, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: LayerAttention
) -> Tensor:
    """One layer's attention. query: [Hq, T, Dk], key: [Hkv, T, Dk], value: [Hkv, T, Dv] -> [T, Hq, Dv]."""
    if metadata.kernels is not None:
        return _attend_by_kernels(metadata, metadata.kernels, layer, query, key, value, kind)
    groups = query.shape[0] // key.shape[0]
    out = query.new_zeros(query.shape[1], query.shape[0], value.shape[2])
    for chain in metadata.chains(layer, key, value):
        queries, given = query[:, chain.rows], chain.num_rows
        missing = max(0, _least_rows(chain.keys, chain.values, groups) - given)
        if missing:
            queries = nn.functional.pad(queries, (0, 0, 0, missing))
        added = metadata.scores_added(layer, kind.rule, chain, given + missing, groups, query)
        grouped = queries.reshape(chain.keys.shape[0], added.shape[1], -1)
        output = attention(grouped, chain.keys, chain.values, added, kind)
        out[chain.rows] = output.view(query.shape[0], given + missing, -1)[:, :given].transpose(0, 1)
    return out


def _attend_by_kernels(
    metadata: AttentionMetadata,
    kernels: Kernels,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kind: LayerAttention,
) -> Tensor:
    chains = list(metadata.chains(layer, key, value))
    is_in_order = all(isinstance(chain.rows, slice) for chain in chains)
    order = None if is_in_order else torch.cat([torch.arange(query.shape[1])[chain.rows] for chain in chains])
    spans, first = [], 0
    for chain in chains:
        is_own = order is None and isinstance(chain.rows, slice)
        rows: slice = chain.rows if is_own else slice(first, first + chain.num_rows)  # type: ignore[assignment]
        first += chain.num_rows
        mask = None if kind.rule is causal_mask_function else metadata.seen(kind.rule, chain)
        spans.append(AttentionSpan(rows, chain.start, chain.keys, chain.values, mask))
    shape = shape_of(kind, metadata.bias_table(layer))
    if order is None:
        return kernels.attend(spans, query, shape, query.shape[1])
    attended = kernels.attend(spans, query[:, order], shape, len(order))
    out = attended.new_zeros(query.shape[1], *attended.shape[1:])
    out[order] = attended
    return out


def shape_of(kind: LayerAttention, bias: Tensor | None = None) -> AttentionShape:
    """The AttentionShape for the compiled kernels. bias: by distance."""
    sinks = None if kind.sinks is None else kind.sinks.float()
    return AttentionShape(kind.scale, softcap=kind.softcap or 0.0, sinks=sinks, bias=bias)


def attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, kind: LayerAttention) -> Tensor:
    """query: [H, G * R, Dk], keys: [H, N, Dk], values: [H, N, Dv], mask: added to the scores, broadcast to [H, G * R, N]
    -> [H, G * R, Dv]"""
    scores = torch.bmm(query, keys.transpose(1, 2))
    if kind.softcap is None:
        scores = torch.add(mask, scores, alpha=kind.scale)
    else:
        scores = torch.tanh(scores * (kind.scale / kind.softcap)) * kind.softcap + mask
    if kind.sinks is None:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    else:
        weights = _softmax_with_sinks(scores, kind.sinks)
    return _weighted_sum(weights.to(values.dtype), values)


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """weights: [H, M, N], values: [H, N, Dv] -> [H, M, Dv]

    On a CPU a product with an inner size above 1,024 sums in a different order than a smaller one, so a row's bits would depend on how
    many keys follow its own. Blocks of keys have fixed places, and those past a row's own add exact zeros.
    """
    if values.shape[1] <= _KEY_BLOCK or values.device.type != "cpu":
        return torch.bmm(weights, values)
    blocks = zip(torch.split(weights, _KEY_BLOCK, dim=2), torch.split(values, _KEY_BLOCK, dim=1), strict=True)
    total = torch.zeros(*weights.shape[:2], values.shape[2], dtype=torch.float32)
    for block_weights, block_values in blocks:
        total += torch.bmm(block_weights, block_values)
    return total.to(values.dtype)


def _softmax_with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """A sink is a score that takes weight but has no value. scores: [H, G * R, N], sinks: [H * G] -> [H, G * R, N]

    It goes first, in a whole key multiple, so that the others keep their places in the vectorised sum.
    """
    num_heads, num_rows, _ = scores.shape
    per_row = sinks.view(num_heads, -1, 1).expand(-1, -1, num_rows * num_heads // sinks.numel())
    front = scores.new_full((num_heads, num_rows, KEY_MULTIPLE), -torch.inf)
    front[..., 0] = per_row.reshape(num_heads, num_rows).to(scores.dtype)
    return torch.softmax(torch.cat([front, scores], dim=-1), dim=-1, dtype=torch.float32)[..., KEY_MULTIPLE:]


def _least_rows(keys: Tensor, values: Tensor, groups: int) -> int:
    """At least two query rows per key head, and more if heads are so few and small that a product with so few rows would use another
    kernel (see rows.py)."""
    num_heads, num_keys, _ = keys.shape
    num_keys = 1 + (num_keys - 1) % _KEY_BLOCK  # in the last block
    work = groups * num_heads * num_keys * min(keys.shape[2], values.shape[2])
    return max(2 // groups, SMALL_PRODUCT // work + 1)


def rule_of_mask(
    attention_mask: MaskRule | None, sliding_window: int | None = None, *, is_causal: bool = True
) -> MaskFunction:
    """The library's rule. If it gave none: that of a sliding window, a causal one, or for a module that is not causal one that hides
    nothing."""
    if attention_mask is not None:
        return attention_mask.function
    if sliding_window is not None:
        return _sliding(sliding_window)
    return causal_mask_function if is_causal else bidirectional_mask_function  # type: ignore[no-any-return]


@cache
def _sliding(window: int) -> MaskFunction:
    """One function per window, because masks are kept by function."""
    return sliding_window_causal_mask_function(window)  # type: ignore[no-any-return]


def _mask_rule(*, mask_function: MaskFunction, **_: Any) -> MaskRule:
    return MaskRule(mask_function)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, _mask_rule)
