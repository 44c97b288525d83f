"""Small random checkpoints of every supported architecture, with logits sharp enough for tests.

A new random model's logits are nearly flat, so that greedy text depends on rounding. `sharpen` scales its head until the best token
usually wins by a clear margin, and makes the layers matter, so that the text does not just repeat the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from foredraft.model.auto_class import auto_class_of
from foredraft.model.encoder_inputs import feature_shape_of

VOCAB_SIZE = 96
WINDOW = 12
CONTEXT = 256

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_MIXTURE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_ALTERNATING = ["sliding_attention", "full_attention"]


@dataclass(frozen=True, slots=True)
class Species:
    """An architecture: its model_type, settings beyond the common ones, and common settings that do not apply."""

    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=lambda: _SMALL)

    def config(self) -> Any:
        return CONFIG_MAPPING[self.model_type](**{**_COMMON, **self.base, **self.settings})


SPECIES: dict[str, Species] = {
    "llama": Species("llama"),
    "qwen2": Species("qwen2"),
    "qwen3": Species("qwen3", {"head_dim": 16}),
    "qwen3_moe": Species("qwen3_moe", {**_MIXTURE, "head_dim": 16, "norm_topk_prob": True}),
    "mistral": Species("mistral", {"sliding_window": WINDOW}),
    "mixtral": Species("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "gemma2": Species(
        "gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": Species(
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
            "num_hidden_layers": 4,
            "layer_types": [*_ALTERNATING[:1] * 3, "full_attention"],
        },
    ),
    "phi3": Species("phi3", {"sliding_window": WINDOW}),
    "gpt2": Species("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}, base={}),
    "gpt_neox": Species(
        "gpt_neox",
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
        base={},
    ),
    "opt": Species(
        "opt",
        {
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 48,
            "pad_token_id": 1,
        },
        base={},
    ),
    "deepseek_v3": Species(
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 48,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 24,
        },
    ),
    "gpt_oss": Species(
        "gpt_oss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
        },
    ),
    "olmo2": Species("olmo2"),
    "granite": Species(
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    "smollm3": Species("smollm3", {"no_rope_layers": [1, 0], "layer_types": ["full_attention"] * 2}),
    "starcoder2": Species("starcoder2", {"sliding_window": WINDOW}),
    "cohere": Species("cohere", {"use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": Species(
        "cohere2",
        {"head_dim": 16, "sliding_window": WINDOW, "layer_types": _ALTERNATING, "logit_scale": 0.5},
    ),
    "glm4": Species("glm4", {"head_dim": 16}),
}


_T5: dict[str, Any] = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_max_distance": 20,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
_BART: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 80,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 3,  # some families force their padding by default
}
_T5GEMMA_STACK: dict[str, Any] = {
    **_SMALL,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": CONTEXT,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW,
    "layer_types": _ALTERNATING,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 30.0,
}

ENCODER_DECODERS: dict[str, Species] = {
    "t5": Species("t5", {"feed_forward_proj": "gated-gelu"}, base=_T5),
    "mt5": Species("mt5", base=_T5),
    "umt5": Species("umt5", base=_T5),
    "bart": Species("bart", {"scale_embedding": True}, base=_BART),
    "mbart": Species("mbart", base=_BART),
    "plbart": Species("plbart", base=_BART),
    "marian": Species("marian", base=_BART),
    "pegasus": Species("pegasus", base=_BART),
    "blenderbot": Species("blenderbot", base=_BART),
    "blenderbot_small": Species("blenderbot-small", base=_BART),
    "m2m_100": Species("m2m_100", base=_BART),
    "t5gemma": Species(
        "t5gemma",
        {"encoder": dict(_T5GEMMA_STACK), "decoder": dict(_T5GEMMA_STACK), "decoder_start_token_id": 2},
        base={},
    ),
}


WHISPER = Species(
    "whisper", {"num_mel_bins": 16, "max_source_positions": 40, "max_target_positions": CONTEXT}, base=_BART
)
"""It reads input features; see `sound`."""


def sound(shape: Sequence[int], seed: int) -> Tensor:
    """Random input features."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **more}}


STACK_FORMS: dict[str, Species] = {
    "llama": SPECIES["llama"],
    "mistral": SPECIES["mistral"],
    "qwen2": SPECIES["qwen2"],
    "qwen3": SPECIES["qwen3"],
    "one key head": Species("llama", {"num_key_value_heads": 1}),
    "odd widths": Species("llama", {"hidden_size": 72, "intermediate_size": 83, "head_dim": 18, "vocab_size": 101}),
    "narrow heads": Species("qwen3", {"head_dim": 8}),
    "wide heads": Species("mistral", {"head_dim": 48, "sliding_window": WINDOW}),
    "a window that the library ignores": Species("llama", {"sliding_window": WINDOW}),
    "biases": Species("llama", {"attention_bias": True}),
    "a window in some layers": Species(
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "llama3 rope": Species(
        "llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    "linear rope": Species("llama", rope("linear", factor=4.0)),
    "yarn rope": Species("qwen2", rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "dynamic rope": Species("llama", rope("dynamic", factor=4.0)),
}
"""Variants of Llama's form. All run as one stack, on a CPU and on a GPU."""

COMPILED_FAMILIES = (
    *("gemma2", "gemma3", "phi3", "smollm3", "granite", "olmo2", "starcoder2"),
    *("mixtral", "qwen3_moe", "cohere", "cohere2", "glm4", "gpt_oss"),
)
"""A species of each family that the compiled kernels run, beyond Llama's form."""

_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW}

COMPILED_FORMS: dict[str, Species] = {
    **STACK_FORMS,
    "biases in the mlp": Species("llama", {"mlp_bias": True}),
    "biases in an mlp of odd width": Species("llama", {"mlp_bias": True, "intermediate_size": 83}),
    **{name: SPECIES[name] for name in COMPILED_FAMILIES},
    "heads of 64": Species("llama", {"head_dim": 64}),  # uses AMX tiles for attention if the processor has them
    "heads of 64 and a window": Species("mistral", {"head_dim": 64, "sliding_window": WINDOW}),
    "gemma2 without caps": Species(
        "gemma2", {**_GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    ),
    "gemma3 with a capped head": Species("gemma3_text", {**_GEMMA, "final_logit_softcapping": 8.0}),
    "gemma3 with two kinds of rope": Species(
        "gemma3_text",
        {
            **_GEMMA,
            "layer_types": _ALTERNATING,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0},
            },
        },
    ),
    "phi3 that rotates a part": Species("phi3", rope("default", partial_rotary_factor=0.5)),
    "granite with biases": Species("granite", {"attention_bias": True, "mlp_bias": True, "logits_scaling": 3.0}),
    "olmo2 with fewer keys": Species("olmo2", {"num_key_value_heads": 1, "attention_bias": True}),
    "starcoder2 without biases": Species("starcoder2", {"use_bias": False, "sliding_window": None}),
    "cohere without head norms": Species("cohere", {"use_qk_norm": False, "attention_bias": True}),
    "glm4 with biases": Species("glm4", {"head_dim": 24, "attention_bias": True}),
    "a dense layer among mixtures": Species(
        "qwen3_moe", {**_MIXTURE, "head_dim": 16, "norm_topk_prob": False, "mlp_only_layers": [1]}
    ),
}
"""The species that the compiled kernels run as one stack."""

_TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
DEVICE_FORMS: dict[str, Species] = {
    **STACK_FORMS,
    "two heads": Species("llama", _TWO_HEADS),
    "two heads, biases": Species("qwen2", _TWO_HEADS),
}
"""Species with few heads, with which Triton's interpreter takes half the time."""


def random_model(config: Any, seed: int = 0, sharpness: float = 6.0) -> PreTrainedModel:
    """A model of this configuration with random, sharpened weights in float32."""
    torch.manual_seed(seed)
    model: PreTrainedModel = auto_class_of(config).from_config(config, dtype=torch.float32)
    _randomise(model, torch.Generator().manual_seed(seed))
    _sharpen(model, sharpness)
    return model.eval()


def saved(config: Any, directory: Path, seed: int = 0, **changes: Any) -> Path:
    """Save such a model as a checkpoint without a tokenizer."""
    random_model(config, seed, **changes).save_pretrained(directory)
    return directory


def _randomise(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Draw weights: matrices large enough to matter (with transformers' 0.02 the layers nearly are the identity), norms near one, and
    biases that are not zero, so that a forgotten bias, sink or norm is noticed. A tied head would repeat its input, so it gets its own
    weights."""
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
    model.config.get_text_config().tie_word_embeddings = False
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.data += 0.1 * noise
        else:
            parameter.data = noise * _gain(name) / parameter.shape[-1] ** 0.5


def _gain(name: str) -> float:
    if name.endswith("Attention.q.weight"):
        return 0.4  # T5 does not scale attention scores, its weights do
    return 1.0 if "embed" in name or "wte" in name or "wpe" in name else 1.5


def _sharpen(model: PreTrainedModel, sharpness: float) -> None:
    """Scale the head until the standard deviation of a row's logits is `sharpness`."""
    head = model.get_output_embeddings()
    ids = torch.arange(2, 34)[None]
    shape = feature_shape_of(model.config)
    inputs = {"input_ids": ids} if shape is None else {"input_features": sound(shape, 0)[None]}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    with torch.inference_mode():
        spread = float(model(**inputs, use_cache=False).logits.std())
    head.weight.data *= sharpness / spread


Maker = Callable[[str], Path]
