"""Early exits as `foredraft train head --kind exit` writes them: a norm, an adapter, and a configuration like that of speculators."""

from __future__ import annotations

from foredraft.errors import ModelError
from foredraft.heads.config import ExitConfig, HeadCheckpoint, TargetShape
from foredraft.heads.files import HeadFiles
from foredraft.heads.formats.base import KIND_KEY, HeadFormat
from foredraft.heads.settings import Settings

KIND = "early_exit"
_WITHOUT_EFFECT = ("architectures", "dtype", "speculators_version", "speculators_config", "transformers_version")


def matches(files: HeadFiles) -> bool:
    return files.config.get(KIND_KEY) == KIND


def read(files: HeadFiles, target: TargetShape) -> HeadCheckpoint:
    settings = Settings(files.config)
    settings.expect(**{KIND_KEY: KIND}, hidden_act="silu")
    config = ExitConfig(
        layer=settings.integer("early_exit_layer"),
        adapter_size=settings.integer("adapter_size", 0),
        norm_bias=settings.flag("norm_bias"),
        target_hidden_size=settings.integer("target_hidden_size"),
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
    )
    settings.take(_WITHOUT_EFFECT)
    settings.refuse_unread()
    if not 1 <= config.layer < target.num_layers:
        raise ModelError(
            f"it exits after layer {config.layer}, but the target has {target.num_layers}: it belongs to another target"
        )
    return HeadCheckpoint(config, files.tensors)


FORMAT = HeadFormat("early exit", matches, read, "early_exit", (KIND,))
