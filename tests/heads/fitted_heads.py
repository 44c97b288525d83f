"""Heads that draft fairly well without training: their weights are fitted to a text by least squares."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import foredraft
from foredraft import LLM, SamplingParams
from foredraft.heads import TargetEnds
from foredraft.model import EMBEDDED, LanguageModel
from foredraft.model.taps import FINAL_NORM
from tests.heads import mtp_targets
from tests.heads.checkpoints import Golden

TAPS = (3, 5, 7)
_EXIT_LAYER = 6
_NUM_MEDUSA_HEADS = 3
_BEGINNINGS = ("def read_lines(path):", "Once upon a time there was a", "import os\nimport sys\n")
_TEXT = Path(foredraft.__file__).with_name("llm.py")


@cache
def fitted_settings(method: str) -> dict[str, Any]:
    """The arguments of LLM for a method that drafts from hidden states, with a head for the embedded target that is often right."""
    if method == "early_exit":
        return {"exit_layer": _EXIT_LAYER}
    if method == "mtp":
        return {"model": fitted_mtp()}
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
    """An EAGLE-3 head over TAPS whose layer does nothing, in SafeAILab's form. Its state after token P is what the target's last layer
    gives for token P + 1, so its first distribution is the target's. ids: the vocabulary it drafts; None: all."""
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
    """Save Medusa heads that predict a few tokens ahead with linear maps from the last hidden state to the later ones."""
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


@cache
@torch.inference_mode()
def fitted_mtp(num_layers: int = 1) -> Path:
    """The embedded target with MTP layers whose decoder layer does nothing. The projection maps the embedding of a token and the hidden
    state before it to the output of the target's last layer for that token. It is fitted on texts that the target writes."""
    llm = LLM(EMBEDDED / "target", method="none", num_threads=1)
    config, own = llm.target.hf.config, load_file(EMBEDDED / "target" / "model.safetensors")
    wanted = SamplingParams(max_tokens=96, temperature=0.8, n=8, seed=0)
    prompts = [llm.text_tokenizer(prompt)["input_ids"] for prompt in _BEGINNINGS]
    outputs = zip(prompts, llm.generate(prompts, wanted), strict=True)
    texts = [[*prompt, *text.token_ids] for prompt, output in outputs for text in output.outputs]
    inputs, wanted_states = [], []
    for text, features in zip(
        texts, llm.target.read_features(texts, (FINAL_NORM, config.num_hidden_layers)), strict=True
    ):
        states, last_outputs = features.double().split(config.hidden_size, 1)
        embeds = own["model.embed_tokens.weight"].double()[torch.tensor(text[1:])]
        inputs.append(torch.cat([_rms(embeds), _rms(states[:-1])], dim=-1))
        wanted_states.append(last_outputs[1:])
    projection = torch.linalg.lstsq(torch.cat(inputs), torch.cat(wanted_states)).solution.T
    last, tensors = f"model.layers.{config.num_hidden_layers - 1}.", {}
    for index in range(num_layers):
        prefix = f"model.layers.{config.num_hidden_layers + index}."
        tensors |= {name.replace(last, prefix): tensor.clone() for name, tensor in own.items() if name.startswith(last)}
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"{prefix}{name}.weight"].zero_()
        tensors[f"{prefix}eh_proj.weight"] = projection.float().clone()
        tensors |= {f"{prefix}{name}.weight": torch.ones(config.hidden_size) for name in ("enorm", "hnorm")}
        tensors[f"{prefix}shared_head.norm.weight"] = own["model.norm.weight"].clone()
    return mtp_targets.add(Path(shutil.copytree(EMBEDDED / "target", Path(mkdtemp()) / "target")), tensors)


def _rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
