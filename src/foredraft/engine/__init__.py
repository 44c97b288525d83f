"""The engine, its scheduler and KV cache, and the types of a step: propose, score, verify, commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foredraft.utils.lazy import attributes

if TYPE_CHECKING:
    from foredraft.engine.engine import Engine

__all__ = ["Engine"]

__getattr__ = attributes(__name__, {"engine": ("Engine",)})
