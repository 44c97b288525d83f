"""Pack a decoder's layers for the compiled body, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.kernels import (
    InMemory,
    Interleaved,
    Joined,
    Kernels,
    NormWeights,
    PackedMatrix,
    Reordered,
    RowSlice,
    StackForm,
    StackLayer,
    StackMlp,
    WeightFormat,
    WeightMemory,
    WeightSource,
    dequantized,
    read_all,
)
from foredraft.model.exits import ExitAdapter
from foredraft.model.families import Family, Mixture, rotary_table_of, window_of
from foredraft.model.packed import NativeLinear
from foredraft.model.pages import AddressRanges, free, give_back, mapped_files
from foredraft.model.progress import with_bar
from foredraft.model.rotary import pairs_as_halves
from foredraft.model.stored import StoredExperts, source_of


def take_layers(
    hf: PreTrainedModel, family: Family, form: StackForm, kernels: Kernels, weight_format: WeightFormat
) -> list[StackLayer]:
    """Pack the matrices of all layers. Each layer is replaced by a holder of its packed matrices, so that it is never in memory twice."""
    layers: Any = hf.model.layers
    memory, files, taken = WeightMemory(), mapped_files(), []
    for index in with_bar(range(len(layers)), "Packing"):
        weights = list(layers[index].parameters())
        packer = Packer(kernels, weight_format, memory, files)
        taken.append(_take_layer(hf, index, family, form, packer))
        layers[index] = packer.holder
        give_back(weights, files)
    return taken


class Packer:
    """Packs one layer's matrices, and frees each linear layer's weight once it is packed. holder: a module that has the packed matrices
    as buffers."""

    def __init__(
        self, kernels: Kernels, weight_format: WeightFormat, memory: WeightMemory, files: AddressRanges
    ) -> None:
        self._kernels, self._format, self._memory, self._files = kernels, weight_format, memory, files
        self.holder = nn.Module()
        self._being_packed: list[nn.Parameter] = []

    def source(self, linear: Any) -> WeightSource:
        self._being_packed += linear.parameters()
        return source_of(linear, self._format)

    def in_memory(self, weight: Tensor) -> WeightSource:
        return InMemory(weight, self._format)

    def pack(self, name: str, source: WeightSource, bias: Tensor | None) -> PackedMatrix:
        matrix = self._kernels.pack(source, bias, self._memory)
        setattr(self.holder, name, NativeLinear(matrix, self._kernels))
        free(self._being_packed, self._files)
        self._being_packed = []
        return matrix


def _take_layer(hf: Any, index: int, family: Family, form: StackForm, packer: Packer) -> StackLayer:
    layer = hf.model.layers[index]
    attention, mlp = layer.self_attn, layer.mlp
    mixture = family.mixture if hasattr(mlp, "experts") else None
    sinks = getattr(attention, "sinks", None)
    return StackLayer(
        attention_norm=_norm_called(family.attention_norm, layer, family),
        mlp_norm=_norm_called(family.mlp_norm, layer, family),
        attention_post_norm=_norm_called(family.attention_post_norm, layer, family),
        mlp_post_norm=_norm_called(family.mlp_post_norm, layer, family),
        q_norm=_head_norm(getattr(attention, "q_norm", None), family, form),
        k_norm=_head_norm(getattr(attention, "k_norm", None), family, form),
        qkv=packer.pack("qkv", *_joined_heads(attention, family, form, packer)),
        out=packer.pack("out", packer.source(attention.o_proj), attention.o_proj.bias),
        mlps=_take_experts(mlp.experts, mixture, packer) if mixture else [_take_dense_mlp(mlp, family, packer)],
        router=_take_router(getattr(mlp, mixture.router), packer) if mixture else None,
        sinks=None if sinks is None else sinks.detach().float(),
        window=window_of(hf, family, index),
        rotary_table=rotary_table_of(hf, family, index),
    )


def take_adapter(
    adapter: ExitAdapter, family: Family, form: StackForm, kernels: Kernels, weight_format: WeightFormat
) -> StackLayer:
    """An exit's adapter as a layer without attention."""
    gates, ups = (InMemory(linear.weight, weight_format) for linear in (adapter.gate_proj, adapter.up_proj))
    # a layer's addition to the residual stream is scaled, but an adapter's is not
    down = InMemory(adapter.down_proj.weight.detach() / form.residual_scale, weight_format)
    none = NormWeights()
    mlp = StackMlp(kernels.pack(Interleaved(gates, ups)), kernels.pack(down))
    return StackLayer(none, take_norm(adapter.norm, family), none, none, None, None, None, None, [mlp])


def take_norm(norm: Any, family: Family) -> NormWeights:
    """A norm's parameters, as the kernels apply them."""
    bias = getattr(norm, "bias", None)
    return NormWeights(_norm_weight(norm, family), None if bias is None else bias.detach().float())


def _norm_called(name: str | None, layer: Any, family: Family) -> NormWeights:
    return NormWeights() if name is None else take_norm(getattr(layer, name), family)


def _norm_weight(norm: Any, family: Family) -> Tensor:
    weight: Tensor = norm.weight.detach().float()
    return weight + 1 if family.norm_adds_one else weight


def _head_norm(norm: Any, family: Family, form: StackForm) -> Tensor | None:
    """[D], or [heads, D] where heads differ."""
    if norm is None:
        return None
    weight = _norm_weight(norm, family)
    if weight.numel() > form.head_dim:
        weight = weight.view(-1, form.head_dim)
    return weight[..., _order(form)].contiguous() if family.rotates_pairs else weight.contiguous()


def _order(form: StackForm) -> Tensor:
    return pairs_as_halves(form.head_dim, form.rotary_dim)


# Attention


def _joined_heads(
    attention: Any, family: Family, form: StackForm, packer: Packer
) -> tuple[WeightSource, Tensor | None]:
    """Queries, keys and values as one product. If neighbours are rotated together, the order within a head is changed for queries and
    keys alike, which leaves their products the same."""
    linears = [getattr(attention, name) for name in family.qkv]
    joined, bias = Joined([packer.source(linear) for linear in linears]), joined_bias(linears)
    if not family.rotates_pairs:
        return joined, bias
    num_rotated = (form.num_heads + form.num_kv_heads) * form.head_dim
    parts = RowSlice(joined, 0, num_rotated), RowSlice(joined, num_rotated, joined.shape[0])
    if bias is not None:
        heads = bias[:num_rotated].view(-1, form.head_dim)[:, _order(form)]
        bias = torch.cat([heads.flatten(), bias[num_rotated:]])
    return Joined([Reordered(parts[0], _order(form)), parts[1]]), bias


def joined_bias(linears: Sequence[Any]) -> Tensor | None:
    """The joined bias of several products of one input; None if none of them has one."""
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat(
        [torch.zeros(linear.out_features) if linear.bias is None else linear.bias.float() for linear in linears]
    )


# MLPs


def _take_dense_mlp(mlp: Any, family: Family, packer: Packer) -> StackMlp:
    linears = [getattr(mlp, name) for name in family.up]
    return take_mlp(linears, getattr(mlp, family.down), packer, is_gated=family.is_gated)


def take_mlp(linears: Sequence[Any], down: Any, packer: Packer, *, is_gated: bool) -> StackMlp:
    """linears: those that read the hidden states, gates before the values that they gate."""
    up: WeightSource = Joined([packer.source(linear) for linear in linears])
    bias = joined_bias(linears)
    if is_gated:
        middle, end = up.shape[0] // 2, up.shape[0]
        up = Interleaved(RowSlice(up, 0, middle), RowSlice(up, middle, end))
        bias = None if bias is None else _interleaved_bias(*(_column(part) for part in bias.chunk(2)))
    return StackMlp(packer.pack("up", up, bias), packer.pack("down", packer.source(down), down.bias))


def _interleaved_bias(gates: WeightSource, ups: WeightSource) -> Tensor:
    """Interleave two biases as Interleaved does with rows. Each has one column."""
    return dequantized(read_all(Interleaved(gates, ups)))[:, 0]


def _column(bias: Tensor) -> WeightSource:
    return InMemory(bias.detach().float()[:, None])


def _take_router(router: Any, packer: Packer) -> PackedMatrix:
    """The router stays in bfloat16: it is small, and its result decides which experts run."""
    return packer.pack("router", InMemory(router.weight), getattr(router, "bias", None))


def _take_experts(experts: Any, mixture: Mixture, packer: Packer) -> list[StackMlp]:
    return [_take_expert(experts, expert, mixture, packer) for expert in range(experts.num_experts)]


def _take_expert(experts: Any, expert: int, mixture: Mixture, packer: Packer) -> StackMlp:
    up, down = (_expert_source(experts, name, expert, packer) for name in ("gate_up_proj", "down_proj"))
    up_bias, down_bias = (_expert_bias(experts, f"{name}_proj_bias", expert) for name in ("gate_up", "down"))
    bias = None if up_bias is None else _interleaved_bias(*_gates_and_ups(_column(up_bias), mixture))
    return StackMlp(
        packer.pack(f"up{expert}", Interleaved(*_gates_and_ups(up, mixture)), bias),
        packer.pack(f"down{expert}", down, down_bias),
    )


def _gates_and_ups(rows: WeightSource, mixture: Mixture) -> tuple[WeightSource, WeightSource]:
    count = rows.shape[0]
    if mixture.are_gates_alternating:
        return RowSlice(rows, 0, count, 2), RowSlice(rows, 1, count, 2)
    return RowSlice(rows, 0, count // 2), RowSlice(rows, count // 2, count)


def _expert_source(experts: Any, name: str, expert: int, packer: Packer) -> WeightSource:
    """The weight [out, in] of one expert."""
    weights = getattr(experts, name)
    if isinstance(weights, StoredExperts):
        return weights.sources[expert]
    weight: Tensor = weights[expert].detach()
    return packer.in_memory(weight.T if experts.is_transposed else weight)


def _expert_bias(experts: Any, name: str, expert: int) -> Tensor | None:
    return getattr(experts, name)[expert].detach() if experts.has_bias else None
