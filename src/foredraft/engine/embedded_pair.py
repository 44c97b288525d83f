"""What settings without a model stand for: the embedded target, and what drafts for it."""

from __future__ import annotations

from foredraft.engine.methods import names_of
from foredraft.model.checkpoint import EMBEDDED
from foredraft.settings import Settings

_DRAFTS = {"draft_model": EMBEDDED / "draft", "eagle": EMBEDDED / "head"}


def with_embedded_pair(settings: Settings) -> Settings:
    """The settings themselves where they name a model. A draft that they name stays; else the first method that needs one decides."""
    if settings.model is not None:
        return settings
    draft_model = settings.draft_model
    if draft_model is None:
        draft_model = next((_DRAFTS[method] for method in _methods(settings) if method in _DRAFTS), None)
    return settings.override(model=EMBEDDED / "target", draft_model=draft_model)


def _methods(settings: Settings) -> list[str]:
    if settings.method is not None:
        return names_of(settings.method)
    has_another = settings.exit_layer is not None or settings.draft_server is not None
    return [] if has_another else ["draft_model"]
