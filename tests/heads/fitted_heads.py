"""Heads that draft fairly well without training: least squares on a text gives their weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor

import foredraft
from foredraft import LLM
from foredraft.heads import TargetEnds
from foredraft.model import EMBEDDED, LanguageModel
from foredraft.model.taps import FINAL_NORM
from tests.heads.checkpoints import Golden

TAPS = (3, 5, 7)
_EXIT_LAYER = 6
_NUM_MEDUSA_HEADS = 3
_TEXT = Path(foredraft.__file__).with_name("llm.py")


@cache
def fitted_settings(method: str) -> dict[str, Any]:
    """Arguments of LLM beside method, with the embedded target, for drafts of hidden states that are often accepted."""
    if method == "early_exit":
        return {"exit_layer": _EXIT_LAYER}
    llm = LLM(EMBEDDED / "target", method="none", num_threads=1)
    text, folder = llm.text_tokenizer(_TEXT.read_text())["input_ids"][:4000], Path(mkdtemp())
    return {
        "draft_model": _save_medusa(llm.target, text, folder)
        if method == "medusa"
        else fitted_head(llm.target, text).save(folder)
    }


def fitted_head(
    target: LanguageModel, text: Sequence[int], *, ids: Tensor | None = None, norm_before_residual: bool = False
) -> Golden:
    """An EAGLE-3 head whose layer does nothing. In SafeAILab's form, over TAPS. Its state behind token P is what the target's last layer gives for token P + 1, so its first
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
    (features,) = target.read_features([text], (*TAPS, last))
    inputs, states = features.double().split(
        (len(TAPS) * target.hf.config.hidden_size, target.hf.config.hidden_size), 1
    )
    return (torch.linalg.pinv(inputs[:-1]) @ states[1:]).T.float()


@torch.inference_mode()
def _save_medusa(target: LanguageModel, text: Sequence[int], folder: Path) -> Path:
    """Heads that see a few tokens ahead: a linear map of the last hidden state to the later ones."""
    (features,) = target.read_features([text], (FINAL_NORM,))
    states, width = features.float(), features.shape[1]
    rows, tensors = TargetEnds(target.hf).lm_head_rows(None), {}
    for head in range(_NUM_MEDUSA_HEADS):
        ahead = torch.linalg.lstsq(states[: -1 - head], states[1 + head :]).solution
        tensors[f"{head}.0.linear.weight"] = torch.zeros(width, width)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(width)
        tensors[f"{head}.1.weight"] = rows @ ahead.T
    torch.save(tensors, folder / "medusa_lm_head.pt")
    settings = {"medusa_num_heads": _NUM_MEDUSA_HEADS, "medusa_num_layers": 1}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder
