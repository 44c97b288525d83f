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
        # a module's own attributes are looked up slowly; in a small model that is a tenth of the step
        self._products = tuple(part.forward for part in (self._qkv, self._out, self._gate_up, self._down))
        self._norms = tuple(zip(self._norm_weights, self._norm_epsilons, strict=True))

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
        qkv, out, gate_up, down = self._products
        before_attention, before_mlp = self._norms
        heads = qkv(_normed(hidden_states, *before_attention))
        query, key, value = self._rotated(heads, *reading.rotation(*position_embeddings))
        kind = Kind(rule_of_mask(attention_mask), self._scaling)
        attended = read_spans(reading, self._layer, query, key, value, kind)
        hidden_states = hidden_states + out(attended.reshape(*hidden_states.shape[:2], -1))
        gate, up = gate_up(_normed(hidden_states, *before_mlp)).chunk(2, dim=-1)
        return hidden_states + down(nn.functional.silu(gate) * up)

    def _rotated(self, heads: Tensor, cos: Tensor, signed_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, [H, T, D] each, the first two rotated. heads: [1, T, (Hq + 2 Hkv) D]"""
        heads = heads.view(heads.shape[1], -1, self._head_dim)
        turned = heads[:, : -self._num_kv_heads]
        turned = torch.addcmul(turned * cos, turned.roll(self._head_dim // 2, -1), signed_sin).transpose(0, 1)
        return turned[: self._num_heads], turned[self._num_heads :], heads[:, -self._num_kv_heads :].transpose(0, 1)


def _normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return torch.rms_norm(x, weight.shape, weight, epsilon)


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
