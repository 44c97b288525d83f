"""GGUF's architectures as data: the Hugging Face class of each, and how its file differs from that class's weights.

Sources: llama.cpp's convert_hf_to_gguf.py (what is changed when a file is written) and src/models (what is not in the file but in the
code that reads it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foredraft.model.gguf.container import GGUFFile
from foredraft.model.gguf.metadata import Metadata

_RMS_EPSILON, _EPSILON = "{arch}.attention.layer_norm_rms_epsilon", "{arch}.attention.layer_norm_epsilon"
_GEMMA2_LAYERS_OF_27B, _GEMMA3_LAYERS_OF_27B = 46, 62
_LOCAL_THETA = 10_000.0

Fields = dict[str, Any]


def _windows(metadata: Metadata, fields: Fields, period: int) -> Fields:
    """A window in all layers but the last of each `period`. The file may say which layers have it."""
    pattern = metadata.array("{arch}.attention.sliding_window_pattern", bool) if _has_flags(metadata) else ()
    if not pattern and "{arch}.attention.sliding_window_pattern" in metadata:
        period = metadata.integer("{arch}.attention.sliding_window_pattern")
    num_layers = fields["num_hidden_layers"]
    flags = pattern or [(layer + 1) % period != 0 for layer in range(num_layers)]
    kinds = ["sliding_attention" if flag else "full_attention" for flag in flags]
    return {"sliding_window": metadata.integer("{arch}.attention.sliding_window"), "layer_types": kinds}


def _has_flags(metadata: Metadata) -> bool:
    return metadata.is_array("{arch}.attention.sliding_window_pattern")


def _llama(metadata: Metadata, file: GGUFFile, fields: Fields) -> Fields:
    if "{arch}.expert_count" in metadata and metadata.integer("{arch}.expert_count", low=0) > 0:
        return {
            "model_type": "mixtral",
            "num_local_experts": metadata.integer("{arch}.expert_count"),
            "num_experts_per_tok": metadata.integer("{arch}.expert_used_count"),
            "sliding_window": None,
        }
    return _biases(metadata, file, fields)


def _biases(metadata: Metadata, file: GGUFFile, fields: Fields) -> Fields:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": "blk.0.ffn_up.bias" in file.tensors}


def _gemma2(metadata: Metadata, file: GGUFFile, fields: Fields) -> Fields:
    is_27b = fields["num_hidden_layers"] == _GEMMA2_LAYERS_OF_27B
    return {
        "query_pre_attn_scalar": _per_head(fields) if is_27b else fields["head_dim"],
        "attn_logit_softcapping": metadata.number("{arch}.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("{arch}.final_logit_softcapping", 30.0),
        **_windows(metadata, fields, 2),
    }


def _gemma3(metadata: Metadata, file: GGUFFile, fields: Fields) -> Fields:
    is_27b = fields["num_hidden_layers"] == _GEMMA3_LAYERS_OF_27B
    capping = "{arch}.final_logit_softcapping"
    local_theta = metadata.number("{arch}.rope.freq_base_swa", _LOCAL_THETA)
    return {
        "query_pre_attn_scalar": _per_head(fields) if is_27b else fields["head_dim"],
        "final_logit_softcapping": metadata.number(capping) if capping in metadata else None,
        "rope_parameters": {
            "full_attention": fields["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
        **_windows(metadata, fields, 6),
    }


def _per_head(fields: Fields) -> float:
    return float(fields["hidden_size"] / fields["num_attention_heads"])


def _phi3(metadata: Metadata, file: GGUFFile, fields: Fields) -> Fields:
    window = metadata.integer("{arch}.attention.sliding_window", 0, low=0)
    original = metadata.integer("{arch}.rope.scaling.original_context_length", fields["max_position_embeddings"])
    return {"sliding_window": window or None, "original_max_position_embeddings": original}


def _granite(metadata: Metadata, file: GGUFFile, fields: Fields) -> Fields:
    default_scale = 1 / math.sqrt(fields["head_dim"])
    return {
        "embedding_multiplier": metadata.number("{arch}.embedding_scale", 1.0),
        "residual_multiplier": metadata.number("{arch}.residual_scale", 1.0),
        "logits_scaling": metadata.number("{arch}.logit_scale", 1.0),
        "attention_multiplier": metadata.number("{arch}.attention.scale", default_scale),
        **_biases(metadata, file, fields),
    }


def _qwen3moe(metadata: Metadata, file: GGUFFile, fields: Fields) -> Fields:
    return {
        "num_experts": metadata.integer("{arch}.expert_count"),
        "num_experts_per_tok": metadata.integer("{arch}.expert_used_count"),
        "moe_intermediate_size": metadata.integer("{arch}.expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gpt_oss(metadata: Metadata, file: GGUFFile, fields: Fields) -> Fields:
    rope = fields["rope_parameters"]
    return {
        "num_local_experts": metadata.integer("{arch}.expert_count"),
        "num_experts_per_tok": metadata.integer("{arch}.expert_used_count"),
        "intermediate_size": metadata.integer("{arch}.expert_feed_forward_length", fields["intermediate_size"]),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        # as in the original model, although no file states it: the bounds of yarn's ramp are not rounded
        "rope_parameters": rope | {"truncate": False} if rope["rope_type"] == "yarn" else rope,
        **_windows(metadata, fields, 2),
    }


def _starcoder2(metadata: Metadata, file: GGUFFile, fields: Fields) -> Fields:
    return {"use_bias": "blk.0.attn_q.bias" in file.tensors, "sliding_window": None}


def _smollm3(metadata: Metadata, file: GGUFFile, fields: Fields) -> Fields:
    """llama.cpp leaves every fourth layer without a rotary embedding."""
    num_layers = fields["num_hidden_layers"]
    return {
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(num_layers)],
        "use_sliding_window": False,
        **_biases(metadata, file, fields),
    }


def _cohere(metadata: Metadata, file: GGUFFile, fields: Fields) -> Fields:
    return {
        "logit_scale": metadata.number("{arch}.logit_scale"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def _cohere2(metadata: Metadata, file: GGUFFile, fields: Fields) -> Fields:
    return {
        "logit_scale": metadata.number("{arch}.logit_scale"),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        **_windows(metadata, fields, 4),
    }


def _glm4(metadata: Metadata, file: GGUFFile, fields: Fields) -> Fields:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors}


def _nothing_more(metadata: Metadata, file: GGUFFile, fields: Fields) -> Fields:
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """model_type: the Hugging Face one. epsilon: (field, key) of the norms' epsilon. has_permuted_heads: rows of q and k are in pairs
    that are rotated together, not in halves. norm_offset: how much larger norm weights are in the file than in the class. more: fields in
    addition to the common ones."""

    model_type: str
    more: Callable[[Metadata, GGUFFile, Fields], Fields] = _nothing_more
    epsilon: tuple[str, str] = ("rms_norm_eps", _RMS_EPSILON)
    has_permuted_heads: bool = False
    norm_offset: float = 0.0


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _llama, has_permuted_heads=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", _biases),
    "qwen3moe": Architecture("qwen3_moe", _qwen3moe),
    "gemma": Architecture("gemma", norm_offset=1.0),
    "gemma2": Architecture("gemma2", _gemma2, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", _gemma3, norm_offset=1.0),
    "phi3": Architecture("phi3", _phi3),
    "granite": Architecture("granite", _granite, has_permuted_heads=True),
    "olmo2": Architecture("olmo2", _biases),
    "starcoder2": Architecture("starcoder2", _starcoder2, epsilon=("norm_epsilon", _EPSILON)),
    "smollm3": Architecture("smollm3", _smollm3, has_permuted_heads=True),
    "command-r": Architecture("cohere", _cohere, epsilon=("layer_norm_eps", _EPSILON)),
    "cohere2": Architecture("cohere2", _cohere2, epsilon=("layer_norm_eps", _EPSILON)),
    "glm4": Architecture("glm4", _glm4),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss),
}
"""By the file's general.architecture."""
