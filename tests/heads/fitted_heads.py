"""EAGLE-3 heads that draft well on one text, without training: least squares gives their fc, and their layer does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foredraft.heads import TargetEnds
from foredraft.model import LanguageModel, Read
from tests.heads.checkpoints import Golden

TAPS = (3, 5, 7)


def fitted_head(
    target: LanguageModel, text: Sequence[int], *, ids: Tensor | None = None, norm_before_residual: bool = False
) -> Golden:
    """In SafeAILab's form, over TAPS. Its state behind token P is what the target's last layer gives for token P + 1, so its first
    distribution is the target's. ids: the vocabulary it drafts; None: all."""
    config = target.hf.config
    width, generator = config.hidden_size, torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (width,), generator=generator) * 2.0 - 1 if norm_before_residual else torch.ones(width)
    hf: Any = target.hf
    names = {
        "self_attn.q_proj": (width, 2 * width),
        "self_attn.k_proj": (width, 2 * width),
        "self_attn.v_proj": (width, 2 * width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (width, width),
        "mlp.up_proj": (width, width),
        "mlp.down_proj": (width, width),
    }
    tensors = {f"midlayer.{name}.weight": torch.zeros(shape) for name, shape in names.items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    tensors |= {f"midlayer.{name}.weight": torch.ones(width) for name in norms}
    tensors["midlayer.hidden_norm.weight"] = signs
    tensors["norm.weight"] = hf.model.norm.weight.detach().float() * signs
    tensors["lm_head.weight"] = TargetEnds(target.hf).lm_head_rows(ids)
    tensors["fc.weight"] = _fitted_fc(target, text)
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_attention_heads,
        "head_dim": width // config.num_attention_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        "norm_before_residual": norm_before_residual,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS)},
    }
    return Golden(settings, tensors)


def _fitted_fc(target: LanguageModel, text: Sequence[int]) -> Tensor:
    """[H, 3 * H]"""
    last = target.hf.config.num_hidden_layers
    cache = target.scratch_cache([len(text)], (*TAPS, last))
    target.read([Read(0, text, 0)], cache)
    features = cache.features(0)
    assert features is not None
    inputs, states = features.double().split(
        (len(TAPS) * target.hf.config.hidden_size, target.hf.config.hidden_size), 1
    )
    return (torch.linalg.pinv(inputs[:-1]) @ states[1:]).T.float()
