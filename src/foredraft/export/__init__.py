"""Writes the choice of target and drafter as other engines' configurations: one module per engine, and one entry in ENGINES."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from foredraft.export import bentoml, llamacpp, max, openvino, ray, sglang, tensorrt_llm, transformers, vllm
from foredraft.export.choice import Choice, choice_of
from foredraft.export.engine import Engine, Export

ENGINES: Mapping[str, Engine] = MappingProxyType(
    {
        module.ENGINE.name: module.ENGINE
        for module in (vllm, sglang, tensorrt_llm, max, bentoml, ray, llamacpp, openvino, transformers)
    }
)
"""Engines by their names on the command line."""

__all__ = ["ENGINES", "Choice", "Engine", "Export", "choice_of"]
