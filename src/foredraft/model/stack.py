"""A decoder of Llama's form as one call: embedding, layers, norm and head, without an operation of PyTorch between.

A small model's pass is paid by the operation, not by the multiplication. Only models of the classes named here are run
so, and the probe compares their logits with the library's forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from foredraft.kernels import DrawSpec, Kernels, PackedMatrix, Stack, StackLayer, StackPass, StackSpan, interleaved
from foredraft.model.attention import Span
from foredraft.model.demand import Demand
from foredraft.model.language_model import Written
from foredraft.model.packed import NativeLinear
from foredraft.model.pages import give_back
from foredraft.model.rows import RowRule
from foredraft.sampling import TokenProbs

_FORM = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_WINDOW_IN_CONFIG = ("MistralForCausalLM",)
"""Where the layers do not say how many keys they see, and the others' configurations may say what nobody reads."""

_FIRST_POSITIONS = 512


class StackBody:
    """hf: gives up its layers and its head, one matrix at a time; the embedding stays. context_len: no position beyond."""

    row_rule = RowRule(least=1)
    is_batch_invariant = False

    def __init__(self, hf: PreTrainedModel, kernels: Kernels, context_len: int, *, int8: bool) -> None:
        self.kernels = kernels
        self._hf = hf
        self._context_len = context_len
        self._stack = _take(hf, kernels, int8=int8)
        self._keys_like = torch.empty(self._stack.num_kv_heads, 0, self._stack.head_dim, dtype=torch.bfloat16)
        self._rotation = rotation_table(hf, min(_FIRST_POSITIONS, context_len))

    def __call__(self, ids: list[int], positions: list[int], wanted: list[int], spans: Sequence[Span]) -> Tensor:
        """-> logits [len(wanted), V]"""
        return self.kernels.read(self._stack, self._pass(ids, positions, wanted, spans))

    def can_write(self, specs: Sequence[DrawSpec]) -> bool:
        """In every way there is."""
        return True

    def write(
        self,
        ids: list[int],
        positions: list[int],
        spans: Sequence[Span],
        lens: Sequence[int],
        vocab_size: int,
        specs: Sequence[DrawSpec],
    ) -> Written:
        """Read, and go on: lens[i] tokens of the first vocab_size ids behind span i, chosen by ways[i], in one call."""
        wanted = [span.first_row + span.num_rows - 1 for span in spans]
        reading = self._pass(ids, positions, wanted, spans, num_more=max(lens))
        written, probs, kept_ids = self.kernels.write(self._stack, reading, lens, vocab_size, specs)
        return Written(written, None if probs is None else TokenProbs(probs, kept_ids))

    def _pass(
        self, ids: list[int], positions: list[int], wanted: list[int], spans: Sequence[Span], num_more: int = 0
    ) -> StackPass:
        rotation = self._rotation_to(max(span.start + span.num_rows for span in spans) + num_more)
        return StackPass(ids, positions, wanted, self._located(spans), rotation)

    def _located(self, spans: Sequence[Span]) -> list[StackSpan]:
        return [
            StackSpan(
                span.first_row,
                span.num_rows,
                span.start,
                span.region.capacity,
                span.region.addresses(self._stack.num_layers, self._keys_like),
            )
            for span in spans
        ]

    def _rotation_to(self, end: int) -> tuple[Tensor, Tensor]:
        if end > self._rotation[0].shape[0]:
            # no further than the context: some embeddings change every angle with the longest position they see
            self._rotation = rotation_table(self._hf, max(end, min(2 * end, self._context_len)))
        return self._rotation

    def take_over(self) -> None:
        """The model is ours already."""

    def warm_up(self, demand: Demand) -> None:
        """It needs nothing."""


@torch.inference_mode()
def rotation_table(hf: Any, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, [num_positions, D / 2] float32 each: the two halves of the library's are the same."""
    positions = torch.arange(num_positions, device=hf.device)
    cos, sin = hf.model.rotary_emb(torch.zeros(1, device=hf.device), positions[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


def has_stack_form(hf: Any) -> bool:
    """Whether StackBody computes what this model does."""
    if type(hf).__name__ not in _FORM:
        return False
    mlps = [layer.mlp for layer in hf.model.layers]
    attentions = [layer.self_attn for layer in hf.model.layers]
    linears = [part for parent in [*mlps, *attentions] for part in parent.children() if hasattr(part, "weight")]
    rotated = hf.model.rotary_emb(torch.zeros(1), torch.zeros(1, 1, dtype=torch.int64))[0].shape[-1]
    return (
        all(type(mlp.act_fn) in (nn.SiLU, type(ACT2FN["silu"])) for mlp in mlps)
        and all(mlp.gate_proj.bias is None and mlp.up_proj.bias is None for mlp in mlps)
        and all(type(part) is nn.Linear or type(part).__name__.endswith("RMSNorm") for part in linears)
        and all(attention.head_dim == rotated for attention in attentions)
        and rotated % 2 == 0
    )


@torch.inference_mode()
def _take(hf: Any, kernels: Kernels, *, int8: bool) -> Stack:
    layers = hf.model.layers
    first = layers[0].self_attn
    head_dim, scale = int(first.head_dim), float(first.scaling)
    num_heads = first.q_proj.out_features // head_dim
    num_kv_heads = first.k_proj.out_features // head_dim
    taken: list[StackLayer] = []
    for index in range(len(layers)):
        weights = list(layers[index].parameters())
        taken.append(_take_layer(hf, index, kernels, int8=int8))
        give_back(weights)
    head = hf.lm_head
    hf.lm_head = NativeLinear(kernels.pack(head.weight, head.bias, int8=int8), kernels)
    embedding = hf.model.embed_tokens
    if head.weight is not embedding.weight:
        give_back([head.weight])
    embedding.weight = nn.Parameter(embedding.weight.to(torch.bfloat16).contiguous(), requires_grad=False)
    return Stack(
        taken,
        embedding.weight.detach(),  # stays where it is, whatever becomes of the parameter
        hf.model.norm.weight.float(),
        hf.lm_head.matrix,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        epsilon=float(hf.model.norm.variance_epsilon),
        scale=scale,
    )


def _take_layer(hf: Any, index: int, kernels: Kernels, *, int8: bool) -> StackLayer:
    """One layer's matrices packed; the layer itself is replaced by what holds them, so that it is never there twice."""
    layers = hf.model.layers
    layer: Any = layers[index]
    attention, mlp = layer.self_attn, layer.mlp
    holder = nn.Module()

    def packed(name: str, weight: Tensor, bias: Tensor | None = None) -> PackedMatrix:
        matrix = kernels.pack(weight, bias, int8=int8)
        setattr(holder, name, NativeLinear(matrix, kernels))
        return matrix

    qkv = packed("qkv", *joined_linears([attention.q_proj, attention.k_proj, attention.v_proj]))
    out = packed("out", attention.o_proj.weight, attention.o_proj.bias)
    layer.self_attn = None
    gate_up = packed("gate_up", interleaved(mlp.gate_proj.weight, mlp.up_proj.weight))
    mlp.gate_proj = mlp.up_proj = None
    down = packed("down", mlp.down_proj.weight, mlp.down_proj.bias)
    layers[index] = holder
    return StackLayer(
        layer.input_layernorm.weight.float(),
        layer.post_attention_layernorm.weight.float(),
        q_norm=_weight_of(getattr(attention, "q_norm", None)),
        k_norm=_weight_of(getattr(attention, "k_norm", None)),
        qkv=qkv,
        out=out,
        gate_up=gate_up,
        down=down,
        window=window_of(hf, attention),
    )


def window_of(hf: Any, attention: Any) -> int:
    """How many keys a query of this layer sees; 0: all."""
    owner = hf.config if type(hf).__name__ in _WINDOW_IN_CONFIG else attention
    return int(getattr(owner, "sliding_window", None) or 0)


def _weight_of(norm: Any) -> Tensor | None:
    return None if norm is None else norm.weight.float()


def joined_linears(linears: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """Several products of one input as one."""
    weights: list[Tensor] = [linear.weight for linear in linears]
    weight = torch.cat(weights)
    if all(linear.bias is None for linear in linears):
        return weight, None
    biases = [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears
    ]
    return weight, torch.cat(biases)
