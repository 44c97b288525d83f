"""Medusa heads in vLLM's format."""

from __future__ import annotations

import re

from foredraft.heads.config import HeadCheckpoint, TargetShape
from foredraft.heads.files import HeadFiles
from foredraft.heads.formats.base import HeadFormat, renamed
from foredraft.heads.formats.medusa_legacy import medusa_checkpoint
from foredraft.heads.settings import Settings
from foredraft.heads.vocabulary import TOKEN_MAP, mapped_ids, reduced

_PREFIX = "medusa_heads."
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_ABOUT = ("architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "version")
_COUNTS = (
    "hidden_size",
    "max_seq_len",
    "max_paths",
    "topk",
    "num_lookahead_tokens",
    "medusa_fc_bias",
    "base_model_name_or_path",
)


def matches(files: HeadFiles) -> bool:
    return any(_BLOCK.fullmatch(name.removeprefix(_PREFIX)) for name in files.tensors)


def read(files: HeadFiles, target: TargetShape) -> HeadCheckpoint:
    settings = Settings(files.config)
    vocab_size = settings.integer("vocab_size", target.vocab_size)
    draft_vocab_size = settings.integer("truncated_vocab_size", vocab_size)
    is_shared = settings.flag("original_lm_head")
    logit_scale = float(settings.get("logit_scale", 1.0))
    counts = [key for key in files.config if "num" in key and ("heads" in key or "layers" in key)]
    settings.take((*_ABOUT, *_COUNTS, *counts))  # counts are taken from the tensors
    settings.refuse_unread()
    tensors = {
        _BLOCK.sub(r"blocks.\1.\2.\3", name): tensor for name, tensor in renamed(files, (_PREFIX, "")).tensors.items()
    }
    target_ids = mapped_ids(tensors.pop(TOKEN_MAP, None), draft_vocab_size, vocab_size)
    if is_shared and "lm_heads.0.weight" in tensors:
        tensors["lm_head.weight"] = tensors.pop("lm_heads.0.weight")
    tensors |= {name: reduced(tensor, target_ids) for name, tensor in tensors.items() if name.startswith("lm_head")}
    return medusa_checkpoint(tensors, target, target_ids=target_ids, logit_scale=logit_scale)


FORMAT = HeadFormat("vLLM's Medusa", matches, read, "medusa")
