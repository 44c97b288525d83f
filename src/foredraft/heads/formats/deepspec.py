"""EAGLE-3 as DeepSpec writes it: Qwen3's layers, the whole vocabulary, five hidden states."""

from __future__ import annotations

from foredraft.errors import ModelError
from foredraft.heads.config import Ambiguity, HeadCheckpoint, TargetShape
from foredraft.heads.files import HeadFiles
from foredraft.heads.formats.base import HeadFormat, architectures
from foredraft.heads.formats.eagle3 import checkpoint_of, taps_of
from foredraft.heads.formats.layers import count_layers, read_layers
from foredraft.heads.settings import Settings

_TRAINING = ("ttt_length", "step_loss_decay", "draft_num_hidden_layers", "target_model_name_or_path")


def matches(files: HeadFiles) -> bool:
    return "Qwen3Eagle3Model" in architectures(files)


def read(files: HeadFiles, target: TargetShape) -> HeadCheckpoint:
    settings = Settings(files.config)
    ids = settings.integers("target_layer_ids")
    if ids is None:
        raise ModelError("config.json does not give target_layer_ids; add the ids that the head was trained with")
    _check_depth(settings, target)
    settings.take(_TRAINING)
    layer = read_layers(settings, count_layers(files.tensors), "qwen3")
    settings.refuse_unread()
    return checkpoint_of(
        layer,
        files.tensors,
        target,
        taps=taps_of(ids, target, offset=1),  # ids number the outputs of layers
        draft_vocab_size=layer.vocab_size,
        target_hidden_size=layer.hidden_size,
        ambiguities=[Ambiguity("norm_output", (False, True))],
    )


def _check_depth(settings: Settings, target: TargetShape) -> None:
    num_layers = settings.get("num_target_layers", target.num_layers)
    if num_layers != target.num_layers:
        raise ModelError(
            f"its target has {num_layers} layers, but this one has {target.num_layers}: it belongs to another target"
        )


FORMAT = HeadFormat("DeepSpec", matches, read)
