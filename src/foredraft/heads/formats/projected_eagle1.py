"""EAGLE-1 heads as `foredraft train head --kind eagle1` writes them: a configuration like that of speculators."""

from __future__ import annotations

from foredraft.errors import ModelError
from foredraft.heads.config import HeadCheckpoint, TargetShape, projected_eagle1
from foredraft.heads.files import HeadFiles
from foredraft.heads.formats.base import KIND_KEY, HeadFormat
from foredraft.heads.formats.layers import count_layers, read_layers
from foredraft.heads.settings import Settings

KIND = "eagle1"
_WITHOUT_EFFECT = ("architectures", "dtype", "speculators_config", "tie_word_embeddings")


def matches(files: HeadFiles) -> bool:
    return files.config.get(KIND_KEY) == KIND


def read(files: HeadFiles, target: TargetShape) -> HeadCheckpoint:
    settings = Settings(files.config)
    settings.expect(**{KIND_KEY: KIND})
    num_ids = settings.integer("draft_vocab_size")
    if num_ids != target.vocab_size:
        raise ModelError(
            f"it drafts {num_ids} ids, but the target has {target.vocab_size}: it belongs to another target"
        )
    taps = settings.integers("aux_hidden_state_layer_ids")
    if taps is None or min(taps) < 0 or max(taps) >= target.num_layers:
        raise ModelError(
            f"it reads the inputs of the layers {taps}, but the target has {target.num_layers}: it belongs to another target"
        )
    inner = settings.nested("transformer_layer_config")
    layer = read_layers(inner, count_layers(files.tensors))
    config = projected_eagle1(layer, taps, target._replace(hidden_size=settings.integer("target_hidden_size")))
    settings.take(_WITHOUT_EFFECT)
    settings.refuse_unread()
    inner.refuse_unread()
    return HeadCheckpoint(config, files.tensors)


FORMAT = HeadFormat("foredraft's EAGLE-1", matches, read, kinds=(KIND,))
