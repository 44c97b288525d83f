"""Saving trained heads in formats that other engines read: EAGLE-3 in the format of `speculators` and of SafeAILab, block drafters in that
of `speculators`, Medusa in vLLM's. The formats of early exits and EAGLE-1 resemble those of `speculators`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foredraft.heads.config import DFlashConfig, EagleConfig, Markov
from foredraft.heads.dflash import DFlashHead
from foredraft.heads.eagle import EagleHead
from foredraft.heads.formats import early_exit, projected_eagle1
from foredraft.heads.formats.dflash import CORRECTION_PREFIXES
from foredraft.heads.medusa import MedusaHead
from foredraft.model.checkpoint import CONFIG
from foredraft.model.exits import Exit

WEIGHTS = "model.safetensors"
_VLLM_BLOCK = re.compile(r"^blocks\.(\d+)\.(\d+)\.")
_FIRST_LAYER = re.compile(r"^layers\.0\.")
_NOT_SAFEAILAB = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "fc_bias")
_SPECULATORS = "0.9.0"
"""The version whose configuration format is written."""


def check_eagle3(config: EagleConfig) -> None:
    """Raises ValueError for a head that speculators' format of EAGLE-3 cannot hold: another kind, or one that reads a state after the
    final norm."""
    if config.kind != "eagle3" or min(config.taps) < 0 or config.mask_token is not None:
        kind = config.kind if config.mask_token is None else "P-EAGLE"
        raise ValueError(f"this format holds EAGLE-3 heads that read layer inputs, not {kind} over {config.taps}")


def save_eagle3(
    head: EagleHead,
    folder: Path,
    verifier: str,
    architectures: Sequence[str],
    dtype: torch.dtype = torch.bfloat16,
    without: Sequence[str] = (),
) -> None:
    """Save EAGLE-3 in the format of `speculators`.

    verifier, architectures: the target's name and its class names. without: tensors to leave out, such as an lm_head whose rows are the
    target's.

    Raises ValueError for a head that the format cannot hold.
    """
    config = head.config
    check_eagle3(config)
    weights = {name: weight for name, weight in head.state_dict().items() if name not in without}
    tensors = _stored(weights, dtype) | _tables(config)
    _write(folder, tensors, _fields(config, verifier, architectures, dtype))


def check_safeailab_eagle3(config: EagleConfig) -> None:
    """Raises ValueError for a head that SafeAILab's format of EAGLE-3 cannot hold, or that its readers would compute differently."""
    if config.kind != "eagle3" or min(config.taps) < 1:
        raise ValueError(
            f"this format holds EAGLE-3 heads that read layer outputs, not {config.kind} over the inputs of {config.taps}"
        )
    unknown = [name for name in _NOT_SAFEAILAB if getattr(config, name)]
    if unknown or config.num_layers != 1 or config.family != "llama":
        beyond = ", ".join(unknown) or f"{config.num_layers} layers of the {config.family} family"
        raise ValueError(
            f"programs that read this format support only EAGLE-3 with one Llama layer, but this head has {beyond}"
        )


def save_safeailab_eagle3(head: EagleHead, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Save EAGLE-3 in the format that SGLang and TensorRT-LLM load: one layer, called `midlayer`, and ids that count layer outputs.

    Raises ValueError for a head that the format cannot hold, or that its readers would compute differently.
    """
    config = head.config
    check_safeailab_eagle3(config)
    weights = {_FIRST_LAYER.sub("midlayer.", name): weight for name, weight in head.state_dict().items()}
    fields = {
        **config.layer.to_dict(),
        "architectures": ["LlamaForCausalLMEagle3"],
        "dtype": str(dtype).removeprefix("torch."),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in config.taps],
        },
    }
    _write(folder, _stored(weights, dtype) | _tables(config), fields)


def save_eagle1(
    head: EagleHead,
    folder: Path,
    verifier: str,
    architectures: Sequence[str],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Save EAGLE-1 that projects features. verifier, architectures: see save_eagle3.

    Raises ValueError for a head that the format cannot hold.
    """
    config = head.config
    if config.kind != "eagle1" or not config.projects_features or config.target_ids is not None:
        raise ValueError(f"this format holds EAGLE-1 heads that project features and draft all ids, not {config.kind}")
    fields = {
        "architectures": ["Eagle1DraftModel"],
        "speculators_model_type": projected_eagle1.KIND,
        "dtype": str(dtype).removeprefix("torch."),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "aux_hidden_state_layer_ids": list(config.taps),
        "tie_word_embeddings": False,
        "transformer_layer_config": config.layer.to_dict(),
        "speculators_config": _speculators_config(projected_eagle1.KIND, verifier, architectures),
    }
    _write(folder, _stored(head.state_dict(), dtype), fields)


def save_block_head(
    head: DFlashHead, folder: Path, verifier: str, architectures: Sequence[str], dtype: torch.dtype = torch.bfloat16
) -> None:
    """Save DFlash or DSpark. verifier, architectures: see save_eagle3. If the head drafts all ids, its lm_head is left out: the format
    assumes that it is the target's.

    Raises ValueError for a head that the format cannot hold, or of a kind that cannot be saved yet.
    """
    config = head.config
    correction = config.correction
    if config.kind not in ("dflash", "dspark") or min(config.taps) < 0 or config.owns_embeddings:
        raise ValueError(f"this format holds DFlash and DSpark heads that read layer inputs, not {config.kind}")
    prefix = CORRECTION_PREFIXES.get(config.kind, "")
    weights = {name.replace("correction.", prefix): weight for name, weight in head.state_dict().items()}
    if config.target_ids is None:
        weights.pop("lm_head.weight", None)
    fields = {
        "architectures": ["DFlashDraftModel" if correction is None else "DSparkDraftModel"],
        "speculators_model_type": config.kind,
        "speculators_version": _SPECULATORS,
        "dtype": str(dtype).removeprefix("torch."),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "aux_hidden_state_layer_ids": list(config.taps),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token,
        "sample_from_anchor": config.drafts_from_anchor,
        "sliding_window_non_causal": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": config.layer.to_dict(),
        "speculators_config": _speculators_config(config.kind, verifier, architectures, config.num_places),
    }
    if isinstance(correction, Markov):
        fields |= {"markov_rank": correction.rank, "markov_head_type": correction.kind, "enable_confidence_head": False}
        fields |= {"confidence_head_with_markov": False}
    _write(folder, _stored(weights, dtype) | _tables(config), fields)


def save_exit(
    exit: Exit,
    layer: int,
    folder: Path,
    verifier: str,
    architectures: Sequence[str],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Save an early exit. layer: how many layers precede it. verifier, architectures: see save_eagle3."""
    tensors = _stored(exit.state_dict(), dtype)
    fields = {
        "architectures": ["EarlyExitDraftModel"],
        "speculators_model_type": early_exit.KIND,
        "dtype": str(dtype).removeprefix("torch."),
        "early_exit_layer": layer,
        "adapter_size": 0 if exit.adapter is None else exit.adapter.gate_proj.out_features,
        "hidden_act": "silu",
        "norm_bias": "norm.bias" in tensors,
        "target_hidden_size": tensors["norm.weight"].shape[0],
        "speculators_config": _speculators_config(early_exit.KIND, verifier, architectures),
    }
    _write(folder, tensors, fields)


def save_medusa(head: MedusaHead, folder: Path, target: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Save Medusa heads in vLLM's format. target: its name."""
    config = head.config
    weights = {_VLLM_BLOCK.sub(r"blocks.\1.layers.\2.", name): weight for name, weight in head.state_dict().items()}
    tensors = _stored(weights, dtype)
    if config.target_ids is not None:
        tensors["token_map"] = config.target_ids
    fields = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "dtype": str(dtype).removeprefix("torch."),
        "base_model_name_or_path": target,
        "hidden_size": config.target_hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_blocks,
        "medusa_fc_bias": config.block_bias,
        "original_lm_head": config.shares_lm_head,
        "logit_scale": config.logit_scale,
    }
    _write(folder, tensors, fields)


def _stored(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in weights.items()}


def _write(folder: Path, tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _tables(config: EagleConfig | DFlashConfig) -> dict[str, Tensor]:
    """The tables of a reduced vocabulary: the ids of the columns, as offsets, and which ids have a column."""
    if config.target_ids is None:
        return {}
    marks = torch.zeros(config.layer.vocab_size, dtype=torch.bool)
    marks[config.target_ids] = True
    return {"d2t": config.target_ids - torch.arange(len(config.target_ids)), "t2d": marks}


def _fields(config: EagleConfig, verifier: str, architectures: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": _SPECULATORS,
        "dtype": str(dtype).removeprefix("torch."),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": config.owns_embeddings,
        "tie_word_embeddings": False,
        "transformer_layer_config": config.layer.to_dict(),
        "speculators_config": _speculators_config("eagle3", verifier, architectures),
    }


def _speculators_config(
    algorithm: str, verifier: str, architectures: Sequence[str], speculative_tokens: int = 5
) -> dict[str, Any]:
    """speculative_tokens: how many other engines draft by default."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": algorithm,
        "proposal_methods": [proposal],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
    }
