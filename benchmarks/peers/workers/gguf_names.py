"""Names of a Llama model's tensors in a GGUF file and in a Hugging Face checkpoint. Standard library only."""

from __future__ import annotations

_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
"""Matrices whose rows have another order in the GGUF file -> the configuration's name for their number of heads."""
PERMUTED = tuple(f"{name}.weight" for name in HEADS)


def gguf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_LAYER[rest.removesuffix('.weight')]}.weight"


def checkpoint_name(name: str) -> str:
    if name in _TOP.values():
        return next(ours for ours, theirs in _TOP.items() if theirs == name)
    _, layer, kind, _ = name.split(".")
    ours = next(ours for ours, theirs in _LAYER.items() if theirs == kind)
    return f"model.layers.{layer}.{ours}.weight"
