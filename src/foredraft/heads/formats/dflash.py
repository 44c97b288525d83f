"""Block drafters: DFlash and DFlash-2 as z-lab publishes them (`dflash` 0.1.0), DSpark as SpecForge and DeepSpec write it, in z-lab's
format, and all of these and XPress as `speculators` (0.9) writes them."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from foredraft.errors import ModelError, shown
from foredraft.heads.config import (
    Ambiguity,
    Convolution,
    CorrectionForm,
    DFlashConfig,
    HeadCheckpoint,
    Markov,
    Refiner,
    Selector,
    TargetShape,
)
from foredraft.heads.files import HeadFiles
from foredraft.heads.formats.base import KIND_KEY, HeadFormat, architectures, renamed
from foredraft.heads.formats.eagle3 import Taps, taps_of
from foredraft.heads.formats.layers import count_layers, read_layers
from foredraft.heads.settings import Settings
from foredraft.heads.vocabulary import read_table

KINDS = ("dflash", "dflash2", "dspark", "xpress")
"""Values of KIND_KEY in speculators' format."""
ARCHITECTURES = MappingProxyType(
    {
        "DFlashDraftModel": "dflash",
        "DFlash2DraftModel": "dflash2",
        "DSparkDraftModel": "dspark",
        "Qwen3DSparkModel": "dspark",
        "DominoDraftModel": "domino",
        "Gemma4DSparkModel": "dspark",
    }
)
"""The kinds of the classes of z-lab, SpecForge and DeepSpec."""
_GEMMAS_LAYERS = "Gemma4DSparkModel"
_SPECFORGE_DSPARK = "DSparkDraftModel"
"""SpecForge's training drafts from the anchor, but its decoding does not."""
CORRECTION_PREFIXES = MappingProxyType(
    {"dspark": "markov_head.", "dflash2": "candidate_selector.", "xpress": "refiner_head."}
)
_CONFIDENCE = "confidence_head."
_NEUTRAL: dict[str, Any] = {
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "use_swa": False,
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "is_neox_style": True,
}
"""Settings for which only these values are supported."""
_TRAINING = (
    "num_anchors",
    "attention_mode",
    "num_jacobi_passes",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "confidence_head_alpha",
    "target_model_name_or_path",
)
"""Settings that matter only for training, or for parts that are not run here."""
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


def method_of_architectures(names: Any) -> str | None:
    """names: the class names in config.json"""
    return FORMAT.method if any(name in ARCHITECTURES for name in names or ()) else None


def matches_zlab(files: HeadFiles) -> bool:
    return method_of_architectures(architectures(files)) is not None


def matches_speculators(files: HeadFiles) -> bool:
    return files.config.get(KIND_KEY) in KINDS


def read_zlab(files: HeadFiles, target: TargetShape) -> HeadCheckpoint:
    """Read a head in z-lab's format. Layer ids number the outputs of layers."""
    settings = Settings(files.config)
    inner = settings.nested("dflash_config")
    either = _Either(settings, inner)
    kind = _zlab_kind(files, inner)
    ids = either.read("target_layer_ids").integers("target_layer_ids")
    if ids is None:
        raise ModelError("config.json: dflash_config.target_layer_ids must list the layers that it reads")
    for part in (settings, inner):
        part.expect(**_NEUTRAL)
    causal = settings.get("is_causal", inner.get("causal"))
    if causal not in (None, True, False):
        raise ModelError("config.json: is_causal must be true or false")
    fields: dict[str, Any] = {
        "taps": taps_of(ids, target, offset=1),
        "block_size": either.integer("block_size", 16),
        "mask_token": either.integer("mask_token_id"),
        "drafts_from_anchor": kind == "dspark",
        "layout_is_open": _SPECFORGE_DSPARK in architectures(files),
        **_parts(kind, either, default_rank=0),
    }
    settings.take((*_ABOUT, *_TRAINING))
    inner.take(("projector_type", *_TRAINING))
    layer = read_layers(settings, count_layers(files.tensors), "qwen3")
    settings.refuse_unread()
    inner.refuse_unread()
    is_causal = tuple(_is_sliding(layer, i) if causal is None else causal for i in range(layer.num_hidden_layers))
    return _checkpoint(
        files,
        target,
        layer,
        draft_vocab_size=layer.vocab_size,
        is_causal=is_causal,
        target_hidden_size=layer.hidden_size,
        kind=kind,
        **fields,
    )


def read_speculators(files: HeadFiles, target: TargetShape) -> HeadCheckpoint:
    """Read a head in speculators' format. Layer ids number the inputs of layers."""
    settings = Settings(files.config)
    kind = settings.get(KIND_KEY)
    inner = settings.nested("transformer_layer_config")
    layer = read_layers(inner, count_layers(files.tensors), "qwen3")
    inner.refuse_unread()
    ids = settings.integers("aux_hidden_state_layer_ids")
    if ids is None:
        raise ModelError("config.json: aux_hidden_state_layer_ids must list the layers that it reads")
    is_bidirectional = settings.flag("sliding_window_non_causal", kind == "dflash2")
    fields: dict[str, Any] = {
        "taps": taps_of(ids, target, offset=0),
        "draft_vocab_size": settings.integer("draft_vocab_size", 32000),
        "block_size": settings.integer("block_size", 8),
        "mask_token": settings.integer("mask_token_id"),
        "drafts_from_anchor": settings.flag("sample_from_anchor", kind == "dspark"),
        "target_hidden_size": settings.integer("target_hidden_size", layer.hidden_size),
        "layout_is_open": kind == "dspark" and "sample_from_anchor" not in settings,
        **_parts(kind, _Either(settings, settings), default_rank=256),
    }
    settings.take((*_ABOUT, *_TRAINING))
    settings.refuse_unread()
    is_causal = tuple(_is_sliding(layer, i) and not is_bidirectional for i in range(layer.num_hidden_layers))
    return _checkpoint(files, target, layer, is_causal=is_causal, window_from_block=True, kind=kind, **fields)


class _Either:
    """Settings that are in a nested object or, failing that, in the outer one."""

    def __init__(self, outer: Settings, inner: Settings) -> None:
        self._outer, self._inner = outer, inner

    def read(self, key: str) -> Settings:
        """The object that holds the key; it counts as read in both."""
        self._outer.get(key)
        return self._inner if key in self._inner else self._outer

    def integer(self, key: str, default: int | None = None) -> int:
        return self.read(key).integer(key, default)


def _zlab_kind(files: HeadFiles, inner: Settings) -> str:
    if _GEMMAS_LAYERS in architectures(files):
        raise ModelError(f"{_GEMMAS_LAYERS} has Gemma layers, which are not supported: only Qwen3 layers are")
    kind = next(ARCHITECTURES[name] for name in architectures(files) if name in ARCHITECTURES)
    kind = inner.get("projector_type", kind)
    if kind == "domino":
        raise ModelError("Domino heads, which correct a block with a recurrent network, are not supported")
    if kind not in KINDS:
        raise ModelError(
            f"config.json: dflash_config.projector_type is {shown(kind)}: only {', '.join(KINDS)} are supported"
        )
    return str(kind)


def _parts(kind: Any, settings: _Either, default_rank: int) -> dict[str, Any]:
    """The fields of DFlashConfig that plain DFlash does not use."""
    read: Callable[[_Either, int], CorrectionForm | None] | None = _CORRECTIONS.get(kind)
    convolution = None
    if kind == "dflash2":
        convolution = Convolution(settings.integer("conv_kernel_size", 2), settings.integer("conv_group_size", 16))
    return {"correction": None if read is None else read(settings, default_rank), "convolution": convolution}


def _markov(settings: _Either, default_rank: int) -> Markov | None:
    rank = settings.integer("markov_rank", default_rank)
    kind = settings.read("markov_head_type").get("markov_head_type", "vanilla")
    if kind not in ("vanilla", "gated", "rnn"):
        raise ModelError(f"config.json: markov_head_type is {shown(kind)}: only vanilla, gated and rnn are supported")
    return Markov(rank, kind) if rank else None


def _selector(settings: _Either, default_rank: int) -> Selector:
    return Selector(settings.integer("selector_rank", 256), settings.integer("selector_top_k", 16))


def _refiner(settings: _Either, default_rank: int) -> Refiner:
    rank = settings.integer("xpress_rank", default_rank)
    return Refiner(rank, rank * settings.integer("xpress_mlp_ratio", 2))


_CORRECTIONS = {"dspark": _markov, "dflash2": _selector, "xpress": _refiner}


def _checkpoint(
    files: HeadFiles,
    target: TargetShape,
    layer: PretrainedConfig,
    *,
    taps: Taps,
    draft_vocab_size: int,
    kind: Any,
    layout_is_open: bool,
    **fields: Any,
) -> HeadCheckpoint:
    """layout_is_open: whether programs disagree about such heads drafting from the anchor. fields: the other fields of DFlashConfig."""
    _check_sizes(layer, fields["block_size"], fields["convolution"], fields["correction"])
    tensors = _named(files, kind)
    table = read_table(tensors.get("d2t"), tensors.get("t2d"), draft_vocab_size, layer.vocab_size)
    unused = [name for name in tensors if kind == "dspark" and name.startswith(_CONFIDENCE)]
    weights = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d", *unused)}
    notes = ("its confidence head is not used: drafts are given the length that pays off on average",) if unused else ()
    first = fields["drafts_from_anchor"]
    config = DFlashConfig(
        layer=layer,
        kind=kind,
        taps=taps.taps,
        ambiguities=(
            Ambiguity("taps", taps.candidates),
            *([Ambiguity("drafts_from_anchor", (first, not first))] if layout_is_open else []),
        ),
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_ids=table.target_ids,
        owns_embeddings="embed_tokens.weight" in weights,
        owns_lm_head="lm_head.weight" in weights,
        **fields,
    )
    return HeadCheckpoint(config, weights, (*table.notes, *notes))


def _check_sizes(
    layer: PretrainedConfig, block_size: int, convolution: Convolution | None, correction: CorrectionForm | None
) -> None:
    if block_size < 2:
        raise ModelError(f"config.json: block_size is {block_size}: a block must have at least 2 rows")
    if convolution is not None and (convolution.num_taps < 1 or layer.hidden_size % max(1, convolution.group_size)):
        raise ModelError(
            f"config.json: conv_kernel_size must be at least 1, and conv_group_size must divide {layer.hidden_size}; they are "
            f"{convolution.num_taps} and {convolution.group_size}"
        )
    if isinstance(correction, Selector) and not 1 <= correction.top_k <= layer.vocab_size:
        raise ModelError(f"config.json: selector_top_k must be 1 to {layer.vocab_size}, not {correction.top_k}")


def _named(files: HeadFiles, kind: str) -> dict[str, Tensor]:
    """The tensors, named as in heads/dflash.py. In z-lab's files the names of a selector's tables may end in .weight."""
    tensors = renamed(files, (CORRECTION_PREFIXES.get(kind, "-"), "correction.")).tensors
    return {
        name.removesuffix(".weight") if name.endswith("_codebook.weight") else name: tensor
        for name, tensor in tensors.items()
    }


def _is_sliding(layer: PretrainedConfig, index: int) -> bool:
    types = getattr(layer, "layer_types", None)
    return types is not None and types[index] == "sliding_attention"


FORMAT = HeadFormat("DFlash", matches_zlab, read_zlab, method="dflash")
SPECULATORS = HeadFormat("speculators' DFlash", matches_speculators, read_speculators, method="dflash", kinds=KINDS)
