"""Loading heads by name: the format is detected from the files, and everything in them must be accounted for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from foredraft.errors import ModelError, shown
from foredraft.heads.config import DFlashConfig, EagleConfig, ExitConfig, HeadCheckpoint, MtpConfig, TargetShape
from foredraft.heads.dflash import DFlashHead
from foredraft.heads.eagle import EagleHead
from foredraft.heads.early_exit import empty_exit
from foredraft.heads.files import CheckpointTensors, HeadFiles, folder_of, reading
from foredraft.heads.formats import FORMATS, mtp
from foredraft.heads.formats.base import KIND_KEY, HeadFormat
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.mtp import MtpHead
from foredraft.model.checkpoint import is_gguf
from foredraft.model.quantized.load import quantization_of
from foredraft.model.structure import DecoderParts


def load_head(name: str, target: TargetShape, revision: str | None = None) -> HeadCheckpoint:
    """The head in a directory or under a hub id, checked against the target's shape.

    Raises ModelError, one line that names the head, for files in no known format, unknown configuration keys, tensors that are
    missing, unknown or of another shape, an unusable vocabulary table, and a head that does not fit the target.
    """
    files = HeadFiles.of(name, revision)
    with reading(name):
        form = format_of(files)
        checkpoint = replace(form.read(files, target), form=form.name, is_quantized=files.is_quantized)
        _check_target(checkpoint, target)
        _check_tensors(checkpoint)
    return checkpoint


def load_mtp(name: str, hf: PreTrainedModel, revision: str | None = None) -> HeadCheckpoint:
    """The MTP layers in the checkpoint of this name, from which the target `hf` was loaded.

    Raises ModelError, one line that names the checkpoint, if it has no MTP layers or is quantised, and for layers in an unknown format,
    with tensors that are missing, unknown or of another shape, or that cannot be built from the target's configuration.
    """
    if is_gguf(Path(name)):
        raise ModelError(
            f"{name}: this is a GGUF file; MTP layers are read only from checkpoints in Hugging Face format"
        )
    if quantization_of(hf.config) is not None:
        raise ModelError(f"{name}: its weights are quantized, but MTP layers are read only from unquantized ones")
    folder = folder_of(name, revision)
    with reading(name):
        tensors = CheckpointTensors(folder)
        found = mtp.find_layers(tensors.names, hf.config.get_text_config().num_hidden_layers)
        if found is None:
            raise ModelError("it has no MTP layers to draft with; use another method")
        checkpoint = mtp.read(found, tensors.read(found.wanted), hf.config, DecoderParts.of(hf))
        _check_tensors(checkpoint)
    return checkpoint


def count_mtp_layers(name: str, config: PretrainedConfig) -> int:
    """How many usable MTP layers the checkpoint in a directory has; no weight is read. config: the target's."""
    if not Path(name).is_dir() or quantization_of(config) is not None:
        return 0
    try:
        found = mtp.find_layers(CheckpointTensors(Path(name)).names, config.get_text_config().num_hidden_layers)
    except Exception:  # loading it reports what is wrong
        return 0
    return 0 if found is None else len(found.layers)


def format_of(files: HeadFiles) -> HeadFormat:
    """The first format that matches. Raises ModelError for files in no known format, or with a kind of head that no format has."""
    kind, kinds = files.config.get(KIND_KEY), [kind for form in FORMATS for kind in form.kinds]
    if kind is not None and kind not in kinds:
        raise ModelError(f"config.json: {KIND_KEY} is {shown(kind)}: only {', '.join(kinds)} are supported")
    for form in FORMATS:
        if form.matches(files):
            return form
    known = ", ".join(form.name for form in FORMATS)
    raise ModelError(
        f"its files are not a head in a supported format ({known}); with a draft model, leave the method out"
    )


def module_of(checkpoint: HeadCheckpoint) -> nn.Module:
    """The head's module on the meta device, without weights."""
    if isinstance(checkpoint.config, EagleConfig):
        return EagleHead(checkpoint.config, _no_target, _no_target)
    if isinstance(checkpoint.config, DFlashConfig):
        return DFlashHead(checkpoint.config, _no_target, _no_target)
    if isinstance(checkpoint.config, ExitConfig):
        return empty_exit(checkpoint.config)
    if isinstance(checkpoint.config, MtpConfig):
        return MtpHead(checkpoint.config, _no_target, _no_target)
    return MedusaHead(checkpoint.config, _no_target)


def _check_target(checkpoint: HeadCheckpoint, target: TargetShape) -> None:
    config = checkpoint.config
    if config.target_hidden_size != target.hidden_size:
        raise ModelError(
            f"it reads hidden states of width {config.target_hidden_size}, but the target's have width "
            f"{target.hidden_size}: it belongs to another target"
        )
    if config.target_ids is not None and int(config.target_ids.max()) >= target.vocab_size:
        raise ModelError(
            f"its vocabulary table goes up to id {int(config.target_ids.max())}, but the target has only {target.vocab_size} ids"
        )
    if isinstance(config, EagleConfig | DFlashConfig):
        _check_widths(config, target)


def _check_widths(config: EagleConfig | DFlashConfig, target: TargetShape) -> None:
    borrowed = [
        name for name, owns in (("embeddings", config.owns_embeddings), ("lm_head", config.owns_lm_head)) if not owns
    ]
    if borrowed and config.hidden_size != target.hidden_size:
        raise ModelError(
            f"it has no {borrowed[0]}, and cannot use the target's: the width there is {target.hidden_size}, but the "
            f"head's is {config.hidden_size}"
        )
    if config.owns_embeddings and config.layer.vocab_size < target.vocab_size:
        raise ModelError(f"its embeddings cover {config.layer.vocab_size} ids, but the target has {target.vocab_size}")
    num_embeddings = config.layer.vocab_size if config.owns_embeddings else target.vocab_size
    if config.mask_token is not None and not 0 <= config.mask_token < num_embeddings:
        raise ModelError(
            f"its mask token is {config.mask_token}, but there are embeddings for only {num_embeddings} ids"
        )
    if config.target_ids is None and not config.owns_lm_head and config.draft_vocab_size != config.layer.vocab_size:
        raise ModelError("it drafts only part of the vocabulary, but has neither a vocabulary table nor an lm_head")


def _check_tensors(checkpoint: HeadCheckpoint) -> None:
    """Raise ModelError unless the file has every tensor of the module in the right shape, and no others."""
    expected, tensors = module_of(checkpoint).state_dict(), checkpoint.tensors
    unused, missing = sorted(tensors.keys() - expected.keys()), sorted(expected.keys() - tensors.keys())
    if unused:
        raise ModelError(
            f"tensors that the head does not use: {_listed(unused)}; its configuration and weights disagree"
        )
    if missing:
        raise ModelError(f"tensors are missing: {_listed(missing)}; its configuration and weights disagree")
    for name in sorted(tensors):
        _check_tensor(name, tensors[name], expected[name])


def _check_tensor(name: str, tensor: Tensor, expected: Tensor) -> None:
    if tensor.shape != expected.shape:
        raise ModelError(
            f"{name} has the shape {list(tensor.shape)} in the file, but should have {list(expected.shape)} according to "
            "its configuration"
        )
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ModelError(
            f"{name} holds {str(tensor.dtype).removeprefix('torch.')}: only unquantized weights are supported"
        )


def _listed(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _no_target(_: Tensor) -> Any:
    raise RuntimeError("this head was created without a target")
