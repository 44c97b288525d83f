"""The models in the package, used if the settings name none: a target, a draft model and a head for it, and heads for other targets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from foredraft.engine.methods import names_of
from foredraft.model.checkpoint import EMBEDDED, is_gguf, raw_config
from foredraft.settings import Settings

_EAGLE = "eagle"
_DRAFTS = {"draft_model": EMBEDDED / "draft", _EAGLE: EMBEDDED / "head"}


class _TargetHead(NamedTuple):
    """An EAGLE head and its target. config: the values that distinguish the target's configuration from others."""

    hub_id: str
    config: Mapping[str, Any]
    head: Path

    def is_for(self, config: Mapping[str, Any]) -> bool:
        return all(config.get(key) == value for key, value in self.config.items())


_HEADS = (
    _TargetHead(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152},
        EMBEDDED / "smollm2-head",
    ),
)


def with_embedded_models(settings: Settings) -> Settings:
    """Fill in the models that the settings leave out. Without a model: the embedded target, and the embedded draft for the first method
    that needs one. With a model and method "eagle": the packaged head for it, if there is one. A given draft_model is kept."""
    model, draft_model = settings.model, settings.draft_model
    if draft_model is None:
        draft_model = _draft_for(model, _methods(settings))
    return settings.override(model=EMBEDDED / "target" if model is None else model, draft_model=draft_model)


def _draft_for(model: object, methods: Sequence[str]) -> Path | None:
    """The packaged draft for a model. model: as in Settings; None: the embedded target."""
    if model is None:
        return next((_DRAFTS[method] for method in methods if method in _DRAFTS), None)
    return _head_for(model) if _EAGLE in methods else None


def _methods(settings: Settings) -> list[str]:
    if settings.method is not None:
        return names_of(settings.method)
    has_another = settings.exit_layer is not None or settings.draft_server is not None
    return [] if has_another else ["draft_model"]


def _head_for(model: object) -> Path | None:
    """The packaged head for a model, found by its hub id, else by its configuration. model: as in Settings."""
    named = next((head for head in _HEADS if head.hub_id == model), None)
    if named is None:
        config = _config_of(model)
        named = next((head for head in _HEADS if head.is_for(config)), None)
    return None if named is None else named.head


def _config_of(model: object) -> Mapping[str, Any]:
    """The configuration of a model in memory, a directory or a GGUF file; empty for a hub id."""
    if not isinstance(model, str | os.PathLike):
        return dict(model.config.to_dict())  # type: ignore[attr-defined]
    if not is_gguf(Path(model)):
        return raw_config(os.fspath(model))
    from foredraft.model import LoadOptions  # not at the top, since it imports PyTorch
    from foredraft.model.gguf import GGUFCheckpoint

    return dict(GGUFCheckpoint(os.fspath(model), LoadOptions()).config().to_dict())
