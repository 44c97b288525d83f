"""EAGLE-3 as SafeAILab, AngelSlim, SpecForge and SGLang write it: one layer, called `midlayer`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from foredraft.errors import ModelError
from foredraft.heads.config import Ambiguity, HeadCheckpoint, TargetShape
from foredraft.heads.files import HeadFiles
from foredraft.heads.formats.base import HeadFormat, renamed
from foredraft.heads.formats.eagle3 import Taps, checkpoint_of, taps_of
from foredraft.heads.formats.layers import count_layers, read_layers
from foredraft.heads.settings import Settings

_IDS = "eagle_aux_hidden_state_layer_ids"
_COUNT = "num_aux_hidden_states"


def matches(files: HeadFiles) -> bool:
    return "fc.weight" in files.tensors and any(
        name.startswith("midlayer.") or name.endswith(".hidden_norm.weight") for name in files.tensors
    )


def read(files: HeadFiles, target: TargetShape) -> HeadCheckpoint:
    tensors = renamed(files, ("midlayer.", "layers.0.")).tensors
    settings = Settings(files.config)
    nested = settings.nested("eagle_config")
    taps = _taps(settings, nested, target)
    norms = _norms(settings, nested)
    draft_vocab_size = settings.integer("draft_vocab_size", _num_columns(tensors, settings))
    logit_scale = float(settings.get("logit_scale", 1.0))
    settings.take(("bias", "target_model_type"))
    layer = read_layers(settings, count_layers(tensors))
    width = settings.integer("target_hidden_size", layer.hidden_size)
    settings.refuse_unread()
    nested.refuse_unread()
    # programs that use this format skip fc if the features are as wide as the head, even if the file has it
    applies_fc = len(taps.taps) * width != layer.hidden_size
    unclear = () if applies_fc else (Ambiguity("applies_fc", (False, True)),)
    return checkpoint_of(
        layer,
        tensors,
        target,
        taps=taps,
        draft_vocab_size=draft_vocab_size,
        ambiguities=(*_unclear_norms(settings, norms), *unclear),
        target_hidden_size=width,
        applies_fc=applies_fc,
        logit_scale=logit_scale,
        **norms,
    )


def _taps(settings: Settings, nested: Settings, target: TargetShape) -> Taps:
    """Ids that begin with 1 number the outputs of layers (SGLang, SpecForge), others the inputs (vLLM)."""
    inner, outer = nested.integers(_IDS), settings.integers(_IDS)
    ids = inner or outer
    count = settings.get(_COUNT)
    if count is not None and count != (3 if ids is None else len(ids)):
        raise ModelError(f"config.json: {_COUNT} is {count}; give {_IDS}, with one id for each")
    return taps_of(ids, target, offset=1 if ids is not None and ids[0] == 1 else 0)


def _norms(settings: Settings, nested: Settings) -> dict[str, Any]:
    nested.expect(
        use_aux_hidden_state=True,
        use_input_layernorm_in_first_layer=True,
        use_last_layernorm=True,
        use_mtp_layernorm=False,
        next_layer_regular=True,
    )
    before_fc = [settings.flag("norm_before_fc"), nested.flag("norm_before_fc")]
    each = [settings.flag("fc_norm"), settings.flag("use_aux_norm")]
    return {
        "norm_before_fc": any(before_fc),
        "fc_norm": any(each),
        "norm_output": settings.flag("norm_output"),
        "norm_before_residual": settings.flag("norm_before_residual"),
    }


def _unclear_norms(settings: Settings, norms: dict[str, Any]) -> list[Ambiguity]:
    """Norm settings that files leave open. For SpecForge norm_output means that a norm precedes the lm_head, for SGLang and vLLM that
    the normalised state is fed back."""
    unclear = [Ambiguity("norm_output", (norms["norm_output"], not norms["norm_output"]))]
    if "norm_before_residual" not in settings:
        unclear.append(Ambiguity("norm_before_residual", (False, True)))
    return unclear


def _num_columns(tensors: dict[str, Tensor], settings: Settings) -> int:
    lm_head = tensors.get("lm_head.weight")
    return settings.integer("vocab_size") if lm_head is None else lm_head.shape[0]


FORMAT = HeadFormat("SafeAILab EAGLE-3", matches, read)
