"""Describes a head from its files: what it reads and drafts, how much memory it takes, and what a draft token costs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from foredraft.engine.models import head_format
from foredraft.heads import (
    AnyHead,
    AnyHeadConfig,
    CompiledEagle,
    DFlashConfig,
    EagleConfig,
    EarlyExit,
    ExitConfig,
    HeadCheckpoint,
    MedusaConfig,
    TargetShape,
)
from foredraft.heads.attaching import block_dtype
from foredraft.heads.head_format import FORMAT_NAMES, ROUNDED
from foredraft.heads.loading import load_head, module_of
from foredraft.model import LanguageModel, LoadOptions
from foredraft.model.loading import load_config
from foredraft.model.prepare import compiled_kernels
from foredraft.model.taps import FINAL_NORM
from foredraft.tools.inspection.report import Costs, HeadReport, ModelReport
from foredraft.tools.inspection.weights import PRECISIONS, matrix_bytes
from foredraft.utils.tensors import num_bytes

_FIRST_PASS = "fc."
"""The part of an EAGLE-3 head that runs once for each token that the target has read, not for each draft token."""


def predict_head(
    source: str | os.PathLike[str], target: ModelReport, options: LoadOptions, ids: Sequence[int] = ()
) -> HeadReport:
    """Describe a head from its files and the target's configuration. options: the target's. ids: of a text, see HeadReport.coverage.

    Raises ModelError for a head that cannot be read, or does not fit the target.
    """
    name = os.fspath(source)
    target_config = load_config(target.name, options)
    checkpoint = load_head(name, TargetShape.of(target_config), options.revision)
    borrowed, num_own = _borrowed(checkpoint.config), sum(tensor.numel() for tensor in checkpoint.tensors.values())
    checkpoint = _with_rows(checkpoint)
    config, module = checkpoint.config, module_of(checkpoint)
    dtype = getattr(torch, target.dtype)
    weights = _weights_by_precision(module)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    own_dtype = block_dtype(dtype, options.torch_device()) if isinstance(config, DFlashConfig) else dtype
    precision = _packed_precision(checkpoint, module, target, options)
    predicted = (
        num_parameters * own_dtype.itemsize if precision is None else _packed_bytes(module, precision, own_dtype)
    )
    feature_bytes = config.feature_size * dtype.itemsize
    own_bytes = config.bytes_per_token(own_dtype) if isinstance(config, EagleConfig | DFlashConfig) else 0
    return HeadReport(
        name=name,
        kind=config.kind,
        form=checkpoint.form,
        num_layers=_num_layers(config),
        num_parameters=num_own,
        taps=config.taps,
        reads=[tap_name(tap, TargetShape.of(target_config).num_layers) for tap in config.taps],
        draft_vocab_size=config.draft_vocab_size,
        vocab_size=config.vocab_size,
        borrows=borrowed,
        training_len=getattr(config, "training_len", None),
        open_settings=_open_settings(checkpoint),
        notes=list(checkpoint.notes),
        weight_bytes=weights,
        step_bytes=_step_bytes(config, module, target_config.get_text_config(), target.pass_bytes),
        target_pass_bytes=target.pass_bytes,
        feature_bytes_per_token=feature_bytes,
        own_cache_bytes_per_token=own_bytes,
        precision=precision,
        predicted=Costs(predicted, feature_bytes + own_bytes),
        load_bytes=predicted + num_bytes(checkpoint.tensors.values()),
        coverage=coverage_of(config, ids),
    )


def coverage_of(config: AnyHeadConfig, ids: Sequence[int]) -> float | None:
    """The share of a text's tokens that a head can draft; None for a text without tokens."""
    if not ids:
        return None
    if config.target_ids is None:
        return sum(token < config.draft_vocab_size for token in ids) / len(ids)
    known = set(config.target_ids.tolist())
    return sum(token in known for token in ids) / len(ids)


def measured_costs(head: AnyHead, target: LanguageModel) -> Costs:
    """The costs of a loaded head."""
    if isinstance(head, CompiledEagle | EarlyExit):
        weights = head.weight_bytes
    else:
        weights = num_bytes(head.state_dict().values())
    features = target.bytes_per_token(head.config.taps) - target.bytes_per_token()
    return Costs(weights, features + head.bytes_per_token)


def tap_name(tap: int, num_layers: int) -> str:
    """Describe the hidden state that a tap names, see model/taps.py."""
    if tap == FINAL_NORM:
        return "the last hidden state, after the final norm"
    if tap == num_layers:
        return f"output of layer {num_layers - 1}"
    return "embeddings" if tap == 0 else f"input of layer {tap}"


def _num_layers(config: AnyHeadConfig) -> int:
    if isinstance(config, ExitConfig):
        return config.layer
    return config.num_heads if isinstance(config, MedusaConfig) else config.num_layers


def _with_rows(checkpoint: HeadCheckpoint) -> HeadCheckpoint:
    """Complete the checkpoint as `TargetEnds.with_rows` does, with rows on the meta device."""
    config = checkpoint.config
    if not isinstance(config, EagleConfig | DFlashConfig) or not checkpoint.borrows_rows:
        return checkpoint
    return checkpoint.with_lm_head(torch.empty(config.draft_vocab_size, config.hidden_size, device="meta"))


def _borrowed(config: AnyHeadConfig) -> list[str]:
    owns = {"embeddings": getattr(config, "owns_embeddings", True), "lm_head": config.owns_lm_head}
    return [name for name, is_own in owns.items() if not is_own]


def _open_settings(checkpoint: HeadCheckpoint) -> dict[str, list[Any]]:
    """The possible values of each open setting, the format's default first. Tables of ids are too long to list."""
    return {
        each.field: [value if not isinstance(value, torch.Tensor) else "a table of ids" for value in each.candidates]
        for each in checkpoint.config.ambiguities
    }


def _packed_precision(
    checkpoint: HeadCheckpoint, module: nn.Module, target: ModelReport, options: LoadOptions
) -> str | None:
    """The precision of its matrices where the compiled kernels multiply by them; None where PyTorch does."""
    is_on_cpu = options.torch_device().type == "cpu"
    if isinstance(checkpoint.config, ExitConfig) or not is_on_cpu or compiled_kernels(options) is None:
        return None
    formats = head_format(target.name, options)
    if formats == ROUNDED:
        return FORMAT_NAMES[formats.of(checkpoint.config, module)]
    if target.dtype != "bfloat16":
        return None
    return "int8" if checkpoint.is_quantized else "bfloat16"


def _weights_by_precision(module: nn.Module) -> dict[str, int]:
    """Bytes with matrices packed in each precision, and everything else in bfloat16."""
    return {precision: _packed_bytes(module, precision, torch.bfloat16) for precision in PRECISIONS}


def _packed_bytes(module: nn.Module, precision: str, dtype: torch.dtype) -> int:
    """Bytes with matrices packed in this precision, and everything else in this dtype."""
    linears = [linear.weight for linear in module.modules() if isinstance(linear, nn.Linear)]
    rest = sum(parameter.numel() for parameter in module.parameters()) - sum(weight.numel() for weight in linears)
    return rest * dtype.itemsize + sum(matrix_bytes(weight, precision) for weight in linears)


def _step_bytes(
    config: AnyHeadConfig, module: nn.Module, target: PretrainedConfig, pass_bytes: Mapping[str, int] | None
) -> dict[str, int]:
    """Bytes of the matrices that are read for a draft token (for a whole draft, if the head drafts in one pass), including the target's
    lm_head if the head uses it. target: its configuration. pass_bytes: of one pass of the target, by precision; None: unknown, and an
    early exit's layers are left out."""
    num_uses = config.num_heads if isinstance(config, MedusaConfig) and config.shares_lm_head else 1
    once = isinstance(config, EagleConfig) and config.kind == "eagle3" and config.mask_token is None
    own = [
        (linear.weight, num_uses if name == "lm_head" else 1)
        for name, linear in module.named_modules()
        if isinstance(linear, nn.Linear) and not (once and f"{name}.".startswith(_FIRST_PASS))
    ]
    lm_head = torch.empty(config.vocab_size, target.hidden_size, device="meta")
    num_borrowed = 0 if config.owns_lm_head else config.num_heads if isinstance(config, MedusaConfig) else 1
    share = config.layer / target.num_hidden_layers if isinstance(config, ExitConfig) and pass_bytes else 0.0
    of_lm_head = {precision: matrix_bytes(lm_head, precision, is_head=True) for precision in PRECISIONS}
    rest = {precision: size - of_lm_head[precision] for precision, size in (pass_bytes or {}).items()}
    return {
        precision: sum(uses * matrix_bytes(weight, precision) for weight, uses in own)
        + num_borrowed * of_lm_head[precision]
        + round(share * rest.get(precision, 0))
        for precision in PRECISIONS
    }
