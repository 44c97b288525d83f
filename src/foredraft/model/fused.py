"""Decoder layers of Llama's form in two dozen operations in place of five dozen.

A small model's step is paid by the operation, not by the multiplication: so query, key and value are one product, gate
and up another, both are rotated at once, and the norm is one call. Only layers of the classes named here are replaced,
and the probe compares the model's logits before and after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from foredraft.model.attention import Kind, MaskRule, Pass, read_spans, rule_of_mask
from foredraft.model.packed import PackedLinear

LLAMA_FORM = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer")


class FusedLayer(nn.Module):
    """norm, attention, norm, gated MLP, each with its residual. Runs inside a Pass only."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._layer = int(attention.layer_idx)
        self._head_dim = int(attention.head_dim)
        self._scaling = float(attention.scaling)
        self._num_heads = attention.q_proj.out_features // self._head_dim
        self._num_kv_heads = attention.k_proj.out_features // self._head_dim
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        self._norm_weights = nn.ParameterList([norm.weight for norm in norms])
        self._norm_epsilons = [float(norm.variance_epsilon) for norm in norms]
        self._qkv = _joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self._out = _joined([attention.o_proj])
        self._gate_up = _joined([mlp.gate_proj, mlp.up_proj])
        self._down = _joined([mlp.down_proj])

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: MaskRule | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        reading: Pass | None = None,
        **_: Any,
    ) -> Tensor:
        """hidden_states: [1, T, D] -> [1, T, D]"""
        assert reading is not None
        assert position_embeddings is not None
        query, key, value = self._heads(self._normed(hidden_states, 0), *reading.rotation(*position_embeddings))
        kind = Kind(rule_of_mask(attention_mask), self._scaling)
        attended = read_spans(reading, self._layer, query, key, value, kind)
        hidden_states = hidden_states + self._out(attended.reshape(*hidden_states.shape[:2], -1))
        gate, up = self._gate_up(self._normed(hidden_states, 1)).chunk(2, dim=-1)
        out: Tensor = hidden_states + self._down(nn.functional.silu(gate) * up)
        return out

    def _normed(self, x: Tensor, which: int) -> Tensor:
        weight = self._norm_weights[which]
        normed: Tensor = nn.functional.rms_norm(x, weight.shape, weight, self._norm_epsilons[which])
        return normed

    def _heads(self, x: Tensor, cos: Tensor, signed_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, [H, T, D] each, the first two rotated."""
        heads = self._qkv(x).view(x.shape[1], -1, self._head_dim)
        turned = heads[:, : -self._num_kv_heads]
        turned = torch.addcmul(turned * cos, turned.roll(self._head_dim // 2, -1), signed_sin).transpose(0, 1)
        return turned[: self._num_heads], turned[self._num_heads :], heads[:, -self._num_kv_heads :].transpose(0, 1)


@torch.inference_mode()
def fuse_layers(hf: PreTrainedModel) -> int:
    """Replace what can be replaced, in place, one layer at a time; say how many."""
    count = 0
    for layers in [module for module in hf.modules() if isinstance(module, nn.ModuleList)]:
        for index, layer in enumerate(layers):
            if _has_llamas_form(layer):
                layers[index] = FusedLayer(layer)
                count += 1
    return count


def _has_llamas_form(layer: Any) -> bool:
    return type(layer).__name__ in LLAMA_FORM and type(layer.mlp.act_fn) in (nn.SiLU, type(ACT2FN["silu"]))


def _joined(linears: Sequence[nn.Linear]) -> PackedLinear:
    """Several products of one input as one."""
    has_bias = any(linear.bias is not None for linear in linears)
    biases: list[Tensor] = [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears
    ]
    weight = torch.cat([linear.weight for linear in linears])
    return PackedLinear(weight, torch.cat(biases) if has_bias else None)
