"""EAGLE-3, 3.1 and P-EAGLE as `speculators` (0.2 to 0.9) writes them."""

from __future__ import annotations

from typing import Any

from foredraft.errors import ModelError
from foredraft.heads.config import Ambiguity, HeadCheckpoint, TargetShape
from foredraft.heads.files import HeadFiles
from foredraft.heads.formats.base import KIND_KEY, HeadFormat
from foredraft.heads.formats.eagle3 import checkpoint_of, taps_of
from foredraft.heads.formats.layers import count_layers, read_layers
from foredraft.heads.settings import Settings

_PARALLEL_KIND = "peagle"
_WITHOUT_EFFECT = (
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "model_type",
    "embed_requires_grad",
)
_ABOUT = (
    "speculators_version",
    "speculators_config",
    "tie_word_embeddings",
    "has_no_defaults_at_init",
    "_name_or_path",
)


def matches(files: HeadFiles) -> bool:
    return KIND_KEY in files.config


def matches_parallel(files: HeadFiles) -> bool:
    return files.config.get(KIND_KEY) == _PARALLEL_KIND


def read(files: HeadFiles, target: TargetShape) -> HeadCheckpoint:
    settings = Settings(files.config)
    kind = settings.get(KIND_KEY)
    fields = _fields(settings)
    if kind == _PARALLEL_KIND:
        fields["mask_token"] = settings.integer("mask_token_id")
    taps = taps_of(settings.integers("eagle_aux_hidden_state_layer_ids"), target, offset=0)
    draft_vocab_size = settings.integer("draft_vocab_size", 32000)
    inner = settings.nested("transformer_layer_config")
    layer = read_layers(inner, count_layers(files.tensors), inner.get("model_type", "qwen3"))
    width = settings.integer("target_hidden_size", layer.hidden_size)
    settings.take((*_WITHOUT_EFFECT, *_ABOUT))
    settings.refuse_unread()
    inner.refuse_unread()
    unclear = () if "norm_before_residual" in settings else (Ambiguity("norm_before_residual", (False, True)),)
    return checkpoint_of(
        layer,
        files.tensors,
        target,
        taps=taps,
        draft_vocab_size=draft_vocab_size,
        ambiguities=unclear,
        target_hidden_size=width,
        **fields,
    )


def _fields(settings: Settings) -> dict[str, Any]:
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    fields = {name: settings.flag(name) for name in names}
    if fields["norm_before_fc"] and fields["fc_norm"]:
        raise ModelError("config.json sets both norm_before_fc and fc_norm: a head has at most one of them")
    return fields


FORMAT = HeadFormat("speculators", matches, read, kinds=("eagle3",))
PARALLEL = HeadFormat("speculators' P-EAGLE", matches_parallel, read, method="peagle", kinds=(_PARALLEL_KIND,))
