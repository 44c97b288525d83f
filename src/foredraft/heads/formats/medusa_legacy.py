"""Medusa heads as FasterDecoding writes them (`medusa_lm_head.pt`), and likewise text-generation-inference (safetensors).

Tensors are `{head}.{block}.linear.weight`, `.bias`, and last `{head}.{number of blocks}.weight`, the lm_head. For a model that was
trained together with its heads (Medusa-2), they have the prefix `medusa_head.` in the model's own files.
"""

from __future__ import annotations

import re

from torch import Tensor

from foredraft.errors import ModelError
from foredraft.heads.config import HeadCheckpoint, MedusaConfig, TargetShape
from foredraft.heads.files import HeadFiles
from foredraft.heads.formats.base import HeadFormat
from foredraft.heads.settings import Settings

_JOINT = "medusa_head."
_TENSOR = re.compile(r"(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
_ABOUT = (
    "base_model_name_or_path",
    "version",
    "architectures",
    "model_type",
    "transformers_version",
    "torch_dtype",
    "dtype",
)
_COUNTS = ("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size")


def matches(files: HeadFiles) -> bool:
    return any(_TENSOR.fullmatch(name.removeprefix(_JOINT)) for name in files.tensors)


def read(files: HeadFiles, target: TargetShape) -> HeadCheckpoint:
    is_joint = any(name.startswith(_JOINT) for name in files.tensors)
    if not is_joint:
        settings = Settings(files.config)
        settings.take((*_ABOUT, *_COUNTS))  # counts are taken from the tensors: published files disagree with them
        settings.refuse_unread()
    tensors = {_renamed(name): tensor for name, tensor in _of_heads(files.tensors, is_joint=is_joint).items()}
    notes = ("its heads were trained together with the model in the same files: use that model as the target",)
    return medusa_checkpoint(tensors, target, notes=notes if is_joint else ())


def medusa_checkpoint(
    tensors: dict[str, Tensor],
    target: TargetShape,
    *,
    target_ids: Tensor | None = None,
    logit_scale: float = 1.0,
    notes: tuple[str, ...] = (),
) -> HeadCheckpoint:
    """tensors: named as in heads/medusa.py."""
    blocks = [name.split(".") for name in tensors if name.startswith("blocks.") and name.endswith(".weight")]
    if not blocks:
        raise ModelError("its weights have no blocks: a Medusa head must have at least one")
    lm_head = next((tensor for name, tensor in tensors.items() if name.startswith("lm_head")), None)
    columns = target.vocab_size if target_ids is None else len(target_ids)
    config = MedusaConfig(
        num_heads=1 + max(int(parts[1]) for parts in blocks),
        num_blocks=1 + max(int(parts[2]) for parts in blocks),
        block_bias=any(name.startswith("blocks.") and name.endswith(".bias") for name in tensors),
        shares_lm_head="lm_head.weight" in tensors,
        owns_lm_head=lm_head is not None,
        target_hidden_size=tensors[".".join(blocks[0])].shape[0],
        vocab_size=target.vocab_size,
        draft_vocab_size=columns if lm_head is None else lm_head.shape[0],
        target_ids=target_ids,
        logit_scale=logit_scale,
    )
    return HeadCheckpoint(config, tensors, notes)


def _of_heads(tensors: dict[str, Tensor], *, is_joint: bool) -> dict[str, Tensor]:
    if not is_joint:
        return tensors
    return {name.removeprefix(_JOINT): tensor for name, tensor in tensors.items() if name.startswith(_JOINT)}


def _renamed(name: str) -> str:
    match = _TENSOR.fullmatch(name)
    if match is None:
        return name
    head, place, is_block, kind = match.groups()
    return f"blocks.{head}.{place}.{kind}" if is_block else f"lm_heads.{head}.{kind}"


FORMAT = HeadFormat("Medusa", matches, read, "medusa")
