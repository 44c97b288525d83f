"""Directories with small random targets whose checkpoints have MTP layers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)
from transformers.modeling_layers import MtpModel

from foredraft.model import EMBEDDED

VOCAB_SIZE = 64
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_WEIGHTS = "model.safetensors"


def glm(num_layers: int = 1) -> PretrainedConfig:
    """A small GLM-4.5."""
    return Glm4MoeConfig(
        **_SIZES, **_EXPERTS, num_key_value_heads=2, head_dim=8, use_qk_norm=True, num_mtp_layers=num_layers
    )


def deepseek(num_layers: int = 1) -> PretrainedConfig:
    """A small DeepSeek-V3. Its attention is latent: keys are 12 wide and values 8."""
    return DeepseekV3Config(
        **_SIZES,
        **_EXPERTS,
        num_key_value_heads=4,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_mtp_layers=num_layers,
    )


def mimo(num_layers: int = 1) -> PretrainedConfig:
    """A small MiMo-7B, whose layers are Qwen2's."""
    return Qwen2Config(**_SIZES, num_key_value_heads=2, num_nextn_predict_layers=num_layers)


def new_target(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A random target with weights large enough that a text does not repeat one token."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model)
    return model


@torch.no_grad()
def randomize(module: nn.Module) -> None:
    for name, tensor in module.named_parameters():
        if tensor.dim() > 1:
            tensor.normal_(0.0, 1.5 * tensor.shape[-1] ** -0.5)
        elif name.endswith("weight"):
            tensor.uniform_(0.6, 1.4)


def new_mtp(target: PreTrainedModel, seed: int = 1) -> MtpModel:
    """transformers' own MTP layers for this target, as many as its configuration says."""
    torch.manual_seed(seed)
    mtp = MtpModel(target, target.config.num_mtp_layers).float().eval()
    randomize(mtp.layers)
    return mtp


def stored(mtp: MtpModel) -> dict[str, Tensor]:
    """The tensors of MTP layers as in checkpoints of DeepSeek-V3 and GLM-4.5, with separate experts and copies of the target's
    embeddings and lm_head."""
    num_layers, tensors = mtp.rotary_emb.config.num_hidden_layers, {}
    for index, layer in enumerate(mtp.layers):
        prefix = f"model.layers.{num_layers + index}."
        tensors[f"{prefix}embed_tokens.weight"] = mtp.embed_tokens.weight
        tensors[f"{prefix}shared_head.head.weight"] = mtp.shared_head.weight
        for name, tensor in layer.state_dict().items():
            if name.startswith("mtp_block.mlp.experts."):
                tensors |= _one_by_one(f"{prefix}mlp.experts.", name.rpartition(".")[2], tensor)
            else:
                behind = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
                tensors[prefix + behind] = tensor
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def _one_by_one(prefix: str, name: str, tensor: Tensor) -> dict[str, Tensor]:
    if name == "down_proj":
        return {f"{prefix}{index}.down_proj.weight": each for index, each in enumerate(tensor)}
    halves = ("gate_proj", "up_proj")
    return {
        f"{prefix}{index}.{half}.weight": part
        for index, each in enumerate(tensor)
        for half, part in zip(halves, each.chunk(2), strict=True)
    }


def save(target: PreTrainedModel, tensors: Mapping[str, Tensor], folder: Path) -> Path:
    """Save the target's checkpoint with these additional tensors."""
    target.save_pretrained(folder)
    return add(folder, tensors)


def add(folder: Path, tensors: Mapping[str, Tensor | None]) -> Path:
    """Add these tensors to a checkpoint; None removes a tensor."""
    merged = {**load_file(folder / _WEIGHTS), **tensors}
    kept = {name: tensor.contiguous() for name, tensor in merged.items() if tensor is not None}
    save_file(kept, folder / _WEIGHTS, metadata={"format": "pt"})
    return folder


def mimo_tensors(target: PreTrainedModel, num_layers: int = 1, seed: int = 1) -> dict[str, Tensor]:
    """The tensors of MTP layers in MiMo's form, with random weights."""
    torch.manual_seed(seed)
    width, tensors = target.config.hidden_size, {}
    for index in range(num_layers):
        prefix, layer = f"model.mtp_layers.{index}.", type(target.model.layers[0])(target.config, 0)
        randomize(layer)
        tensors |= {prefix + name: tensor for name, tensor in layer.state_dict().items()}
        tensors[f"{prefix}input_proj.weight"] = torch.randn(width, 2 * width) * width**-0.5
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.empty(width).uniform_(0.6, 1.4)
    return tensors


@cache
def saved(family: str, num_layers: int = 1) -> Path:
    """A saved target with MTP layers that draft badly. family: "glm", "deepseek" or "mimo"."""
    folder = Path(mkdtemp())
    if family == "mimo":
        target = new_target(mimo(num_layers))
        return save(target, mimo_tensors(target, num_layers), folder)
    target = new_target({"glm": glm, "deepseek": deepseek}[family](num_layers))
    return save(target, stored(new_mtp(target)), folder)


@cache
def embedded_mtp(num_layers: int = 1) -> Path:
    """The embedded target with random MTP layers in DeepSeek's form, which draft badly."""
    folder = Path(shutil.copytree(EMBEDDED / "target", Path(mkdtemp()) / "target"))
    config = json.loads((folder / "config.json").read_text())
    width, generator = config["hidden_size"], torch.Generator().manual_seed(0)
    own = load_file(folder / _WEIGHTS)
    tensors: dict[str, Tensor] = {}
    for index in range(num_layers):
        prefix = f"model.layers.{config['num_hidden_layers'] + index}."
        last = f"model.layers.{config['num_hidden_layers'] - 1}."
        tensors |= {name.replace(last, prefix): tensor for name, tensor in own.items() if name.startswith(last)}
        projection = torch.randn(width, 2 * width, generator=generator) * width**-0.5
        tensors[f"{prefix}eh_proj.weight"] = projection.to(own["model.norm.weight"].dtype)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{prefix}{name}.weight"] = own["model.norm.weight"]
    return add(folder, {name: tensor.clone() for name, tensor in tensors.items()})
