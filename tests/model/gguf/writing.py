"""Writes GGUF files of small random models with the `gguf` package, as llama.cpp's converter does."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

Array = npt.NDArray[Any]

NAMES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "granite": "granite",
    "olmo2": "olmo2",
    "starcoder2": "starcoder2",
    "smollm3": "smollm3",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "glm4": "glm4",
    "gpt_oss": "gpt-oss",
}
"""GGUF's names for Hugging Face's model_types."""

_PERMUTED = ("llama", "granite", "smollm3")
_PLUS_ONE = ("gemma", "gemma2", "gemma3")
_BLOCK_BYTES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "IQ4_NL": 18, "IQ4_XS": 136, "MXFP4": 17}
"""Types that the package cannot quantize to. Their blocks are random bytes with sensible scales."""

_SCALE_FIELDS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": ()}


def write_model(
    model: PreTrainedModel,
    path: Path,
    kind: str | Callable[[str], str] = "F32",
    change: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Write a model to a file. kind: the type of the matrices whose rows are whole blocks, or a function from a tensor's name to it;
    all others and norms are F32. change: writes further metadata."""
    config: Any = model.config
    name = NAMES[config.model_type]
    writer = gguf.GGUFWriter(path, name)
    _write_metadata(writer, config, name)
    if change is not None:
        change(writer)
    for tensor, array in tensors_of(model, name).items():
        add_tensor(writer, tensor, array, kind if isinstance(kind, str) else kind(tensor))
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensor(writer: gguf.GGUFWriter, name: str, array: Array, kind: str) -> None:
    type_ = gguf.GGMLQuantizationType[kind]
    block_len, _ = gguf.GGML_QUANT_SIZES[type_]
    if array.ndim == 1 or array.shape[-1] % block_len or kind == "F32":
        writer.add_tensor(name, array)
        return
    raw = random_blocks(kind, array) if kind in _BLOCK_BYTES else gguf.quants.quantize(array, type_)
    writer.add_tensor(name, raw, raw_dtype=type_)


def random_blocks(kind: str, like: Array) -> Array:
    """Random bytes for a matrix of that shape, with scales that give its numbers the size of a layer's weights."""
    rng = np.random.default_rng(like.size)
    block_len, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    size = _BLOCK_BYTES[kind]
    blocks = rng.integers(0, 256, (*like.shape[:-1], like.shape[-1] // block_len, size), dtype=np.uint8)
    for first in _SCALE_FIELDS[kind]:
        scales = rng.uniform(0.5, 1.5, blocks.shape[:-1]) * 2.0 ** (-13 if kind == "IQ4_XS" else -11)
        blocks[..., first : first + 2] = scales.astype("<f2")[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = rng.integers(120, 124, blocks.shape[:-1])
    return blocks.reshape(*like.shape[:-1], -1)


def tensors_of(model: PreTrainedModel, name: str) -> dict[str, Array]:
    """The model's weights with the converter's names and changes."""
    config: Any = model.config
    arch = next(a for a in gguf.MODEL_ARCH if gguf.MODEL_ARCH_NAMES[a] == name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors: dict[str, Array] = {}
    for key, parameter in model.named_parameters():
        array = parameter.detach().float().numpy()
        if key == "lm_head.weight":
            tensors["output.weight"] = array
        elif ".experts." in key:
            tensors |= _gpt_oss_experts(key, array) if name == "gpt-oss" else _expert_tensors(key, array)
        elif key.endswith(".sinks"):
            tensors[f"{names.get_name(key)}.weight"] = array
        else:
            own = re.sub(r"\.mlp\.gate\.weight$", ".block_sparse_moe.gate.weight", key) if name == "llama" else key
            tensors[str(names.get_name(own, try_suffixes=(".weight", ".bias")))] = _converted(key, array, config, name)
    return tensors


def _expert_tensors(key: str, array: Array) -> dict[str, Array]:
    layer = key.split(".")[2]
    if key.endswith("down_proj"):
        return {f"blk.{layer}.ffn_down_exps.weight": array}
    gate, up = np.split(array, 2, axis=1)
    return {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}


def _gpt_oss_experts(key: str, array: Array) -> dict[str, Array]:
    """Converts gpt-oss's experts, whose parameters are [experts, in, out], with gates and values alternating."""
    layer, suffix = key.split(".")[2], "bias" if key.endswith("_bias") else "weight"
    array = array if suffix == "bias" else np.ascontiguousarray(array.swapaxes(1, 2))
    if "down_proj" in key:
        return {f"blk.{layer}.ffn_down_exps.{suffix}": array}
    parts = {"gate": array[:, ::2], "up": array[:, 1::2]}
    return {f"blk.{layer}.ffn_{part}_exps.{suffix}": np.ascontiguousarray(a) for part, a in parts.items()}


def _converted(key: str, array: Array, config: Any, name: str) -> Array:
    if name in _PLUS_ONE and key.endswith("norm.weight"):
        return array + 1
    if name in _PERMUTED and ".q_proj." in key:
        return _permuted(array, config.num_attention_heads)
    if name in _PERMUTED and ".k_proj." in key:
        return _permuted(array, config.num_key_value_heads)
    return array


def _permuted(array: Array, num_heads: int) -> Array:
    """As llama.cpp's converter permutes the rows of q and k."""
    parts = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return np.ascontiguousarray(parts.swapaxes(1, 2).reshape(array.shape))


def _write_metadata(writer: gguf.GGUFWriter, config: Any, name: str) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    _write_norms(writer, config)
    _write_rope(writer, config, head_dim)
    for write in _OF_ARCHITECTURE.get(config.model_type, ()):
        write(writer, config)


def _write_norms(writer: gguf.GGUFWriter, config: Any) -> None:
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(config.norm_epsilon if hasattr(config, "norm_epsilon") else config.layer_norm_eps)


def _write_rope(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(
            rope.get("original_max_position_embeddings", config.max_position_embeddings)
        )


def _write_window(writer: gguf.GGUFWriter, config: Any) -> None:
    if config.sliding_window:
        writer.add_sliding_window(config.sliding_window)


def _write_layer_types(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def _write_caps(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _write_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    has_local = config.model_type in ("mixtral", "gpt_oss")
    writer.add_expert_count(config.num_local_experts if has_local else config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _write_expert_width(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_feed_forward_length(config.intermediate_size)


def _write_scales(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _write_logit_scale(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_logit_scale(config.logit_scale)


_OF_ARCHITECTURE: Mapping[str, tuple[Callable[[gguf.GGUFWriter, Any], None], ...]] = {
    "mixtral": (_write_experts,),
    "qwen3_moe": (_write_experts,),
    "gemma2": (_write_window, _write_caps),
    "gemma3_text": (_write_window, _write_layer_types),
    "phi3": (_write_window,),
    "granite": (_write_scales,),
    "cohere": (_write_logit_scale,),
    "cohere2": (_write_logit_scale, _write_window),
    "gpt_oss": (_write_experts, _write_window, _write_expert_width),
}
