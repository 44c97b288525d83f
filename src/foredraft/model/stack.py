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

from foredraft.kernels import (
    DrawSpec,
    Interleaved,
    Joined,
    Kernels,
    PackedMatrix,
    Stack,
    StackBatch,
    StackLayer,
    WeightFormat,
    WeightSource,
    unquantized,
)
from foredraft.model.batch import RaggedBatch, Reading
from foredraft.model.generation import Generated
from foredraft.model.packed import NativeLinear
from foredraft.model.pages import give_back
from foredraft.model.stored import is_linear, source_of
from foredraft.model.warm_up import WarmUpSizes
from foredraft.sampling import TokenProbs

_FORM = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_WINDOW_IN_CONFIG = ("MistralForCausalLM",)
"""Where the layers do not say how many keys they see, and the others' configurations may say what nobody reads."""

_FIRST_POSITIONS = 512


class StackBody:
    """hf: gives up its layers and its head, one matrix at a time; the embedding stays. context_len: the longest sequence.
    weight_format: what its matrices become."""

    is_batch_invariant = False
    supports_taps = False

    def __init__(
        self, hf: PreTrainedModel, kernels: Kernels, context_len: int, weight_format: WeightFormat = unquantized
    ) -> None:
        self.kernels = kernels
        self._hf = hf
        self._context_len = context_len
        self._stack = _take(hf, kernels, weight_format)
        self._keys_like = torch.empty(self._stack.num_kv_heads, 0, self._stack.head_dim, dtype=torch.bfloat16)
        self._rotation = rotation_table(hf, min(_FIRST_POSITIONS, context_len))

    def __call__(self, batch: RaggedBatch, taps: Sequence[int] = ()) -> Reading:
        return Reading(self.kernels.read(self._stack, self._located(batch), self._rotation_for(batch)))

    def can_generate(self, specs: Sequence[DrawSpec]) -> bool:
        """All specs are supported."""
        return True

    def generate(
        self, batch: RaggedBatch, lens: Sequence[int], vocab_size: int, specs: Sequence[DrawSpec]
    ) -> Generated:
        """See LanguageModel.generate: in one call."""
        rotation = self._rotation_for(batch, max(lens))
        ids, probs, kept_ids = self.kernels.generate(
            self._stack, self._located(batch), rotation, lens, vocab_size, specs
        )
        return Generated(ids, None if probs is None else TokenProbs(probs, kept_ids))

    def _located(self, batch: RaggedBatch) -> StackBatch:
        return batch.located(self._stack.num_layers, self._keys_like)

    def _rotation_for(self, batch: RaggedBatch, num_generated: int = 0) -> tuple[Tensor, Tensor]:
        """cos and sin, at least as far as this batch goes."""
        end = max(span.start + span.num_rows for span in batch.spans) + num_generated
        if end > self._rotation[0].shape[0]:
            # no further than the context: some embeddings change every angle with the longest position they see
            self._rotation = rotation_table(self._hf, max(end, min(2 * end, self._context_len)))
        return self._rotation

    def take_over(self) -> None:
        """The model runs nothing else already."""

    def warm_up(self, sizes: WarmUpSizes) -> None:
        """Nothing to prepare."""


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
    parts = [part for parent in [*mlps, *attentions] for part in parent.children()]
    rotated = hf.model.rotary_emb(torch.zeros(1), torch.zeros(1, 1, dtype=torch.int64))[0].shape[-1]
    return (
        all(type(mlp.act_fn) in (nn.SiLU, type(ACT2FN["silu"])) for mlp in mlps)
        and all(mlp.gate_proj.bias is None and mlp.up_proj.bias is None for mlp in mlps)
        and all(is_linear(part) or not hasattr(part, "weight") or _is_norm(part) for part in parts)
        and all(attention.head_dim == rotated for attention in attentions)
        and rotated % 2 == 0
    )


@torch.inference_mode()
def _take(hf: Any, kernels: Kernels, weight_format: WeightFormat) -> Stack:
    layers = hf.model.layers
    first = layers[0].self_attn
    head_dim, scale = int(first.head_dim), float(first.scaling)
    num_heads = first.q_proj.out_features // head_dim
    num_kv_heads = first.k_proj.out_features // head_dim
    taken: list[StackLayer] = []
    for index in range(len(layers)):
        weights = list(layers[index].parameters())
        taken.append(_take_layer(hf, index, kernels, weight_format))
        give_back(weights)
    head = hf.lm_head
    hf.lm_head = NativeLinear(kernels.pack(source_of(head, weight_format), head.bias), kernels)
    embedding = hf.model.embed_tokens
    weights = list(head.parameters())
    give_back(weight for weight in weights if weight is not embedding.weight)
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


def _take_layer(hf: Any, index: int, kernels: Kernels, weight_format: WeightFormat) -> StackLayer:
    """One layer's matrices packed; the layer itself is replaced by what holds them, so that it is never there twice."""
    layers = hf.model.layers
    layer: Any = layers[index]
    attention, mlp = layer.self_attn, layer.mlp
    holder = nn.Module()

    def source(linear: Any) -> WeightSource:
        return source_of(linear, weight_format)

    def packed(name: str, weight: WeightSource, bias: Tensor | None = None) -> PackedMatrix:
        matrix = kernels.pack(weight, bias)
        setattr(holder, name, NativeLinear(matrix, kernels))
        return matrix

    inputs = [attention.q_proj, attention.k_proj, attention.v_proj]
    qkv = packed("qkv", Joined([source(linear) for linear in inputs]), joined_bias(inputs))
    out = packed("out", source(attention.o_proj), attention.o_proj.bias)
    layer.self_attn = None
    gate_up = packed("gate_up", Interleaved(source(mlp.gate_proj), source(mlp.up_proj)))
    mlp.gate_proj = mlp.up_proj = None
    down = packed("down", source(mlp.down_proj), mlp.down_proj.bias)
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


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm")


def _weight_of(norm: Any) -> Tensor | None:
    return None if norm is None else norm.weight.float()


def joined_bias(linears: Sequence[Any]) -> Tensor | None:
    """The bias of several products of one input as one; None where no product has one."""
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat(
        [torch.zeros(linear.out_features) if linear.bias is None else linear.bias.float() for linear in linears]
    )
