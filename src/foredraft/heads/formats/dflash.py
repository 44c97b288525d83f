"""DFlash as z-lab publishes it (`dflash` 0.1.0), and as `speculators` (0.9) writes it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from foredraft.errors import ModelError
from foredraft.heads.config import DFlashConfig, HeadCheckpoint, TargetShape
from foredraft.heads.files import HeadFiles
from foredraft.heads.formats.base import HeadFormat, architectures
from foredraft.heads.formats.eagle3 import taps_of
from foredraft.heads.formats.layers import count_layers, read_layers
from foredraft.heads.settings import Settings
from foredraft.heads.vocabulary import read_table

KIND = "dflash"
ARCHITECTURE = "DFlashDraftModel"
_KIND_KEY = "speculators_model_type"
_NEUTRAL: dict[str, Any] = {
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "use_swa": False,
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "is_neox_style": True,
}
"""Settings of which only these values are supported."""
_ABOUT = (
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "model_type",
    "num_target_layers",
    "tie_word_embeddings",
    "has_no_defaults_at_init",
    "speculators_version",
    "speculators_config",
    "_name_or_path",
)


def matches_zlab(files: HeadFiles) -> bool:
    return ARCHITECTURE in architectures(files)


def matches_speculators(files: HeadFiles) -> bool:
    return files.config.get(_KIND_KEY) == KIND


def read_zlab(files: HeadFiles, target: TargetShape) -> HeadCheckpoint:
    """Ids count the outputs of layers."""
    settings = Settings(files.config)
    inner = settings.nested("dflash_config")
    block_size = settings.integer("block_size", inner.integer("block_size", 16))
    ids, mask_token = inner.integers("target_layer_ids"), inner.integer("mask_token_id")
    if ids is None:
        raise ModelError("config.json: dflash_config.target_layer_ids must name the layers that it reads")
    for part in (settings, inner):
        part.expect(**_NEUTRAL)
    causal = settings.get("is_causal", inner.get("causal"))
    if causal not in (None, True, False):
        raise ModelError("config.json: is_causal must be true or false")
    settings.take(_ABOUT)
    layer = read_layers(settings, count_layers(files.tensors), "qwen3")
    settings.refuse_unread()
    inner.refuse_unread()
    is_causal = tuple(_is_sliding(layer, i) if causal is None else causal for i in range(layer.num_hidden_layers))
    return _checkpoint(
        files.tensors,
        target,
        layer,
        taps=taps_of(ids, target, offset=1).taps,
        draft_vocab_size=layer.vocab_size,
        block_size=block_size,
        mask_token=mask_token,
        is_causal=is_causal,
        target_hidden_size=layer.hidden_size,
    )


def read_speculators(files: HeadFiles, target: TargetShape) -> HeadCheckpoint:
    """Ids count what layers read."""
    settings = Settings(files.config)
    settings.take((_KIND_KEY,))
    inner = settings.nested("transformer_layer_config")
    layer = read_layers(inner, count_layers(files.tensors), "qwen3")
    inner.refuse_unread()
    ids = settings.integers("aux_hidden_state_layer_ids")
    if ids is None:
        raise ModelError("config.json: aux_hidden_state_layer_ids must name the layers that it reads")
    if any(_is_sliding(layer, index) for index in range(layer.num_hidden_layers)):
        raise ModelError("config.json: sliding attention of a block drafter in speculators' form is not supported")
    settings.flag("sliding_window_non_causal")
    fields: dict[str, Any] = {
        "taps": taps_of(ids, target, offset=0).taps,
        "draft_vocab_size": settings.integer("draft_vocab_size", 32000),
        "block_size": settings.integer("block_size", 8),
        "mask_token": settings.integer("mask_token_id"),
        "drafts_from_anchor": settings.flag("sample_from_anchor"),
        "target_hidden_size": settings.integer("target_hidden_size", layer.hidden_size),
    }
    settings.take(_ABOUT)
    settings.refuse_unread()
    return _checkpoint(files.tensors, target, layer, is_causal=(False,) * layer.num_hidden_layers, **fields)


def _checkpoint(
    tensors: dict[str, Tensor], target: TargetShape, layer: PretrainedConfig, *, draft_vocab_size: int, **fields: Any
) -> HeadCheckpoint:
    """fields: the others of DFlashConfig."""
    if fields["block_size"] < 2:
        raise ModelError(f"config.json: block_size is {fields['block_size']}: a block has at least 2 rows")
    table = read_table(tensors.get("d2t"), tensors.get("t2d"), draft_vocab_size, layer.vocab_size)
    weights = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    config = DFlashConfig(
        layer=layer,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_ids=table.target_ids,
        owns_embeddings="embed_tokens.weight" in weights,
        owns_lm_head="lm_head.weight" in weights,
        **fields,
    )
    return HeadCheckpoint(config, weights, table.notes)


def _is_sliding(layer: PretrainedConfig, index: int) -> bool:
    types = getattr(layer, "layer_types", None)
    return types is not None and types[index] == "sliding_attention"


FORMAT = HeadFormat("DFlash", matches_zlab, read_zlab, method="dflash")
SPECULATORS = HeadFormat("speculators, DFlash", matches_speculators, read_speculators, method="dflash")
