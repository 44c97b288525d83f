"""The seam: what a quantization format has to give."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from foredraft.model.quantized.plan import Plan, StoredMatrix
from foredraft.model.quantized.tensors import LayerTensors, UnreadableError

Settings = Mapping[str, Any]
"""The `quantization_config` of a config.json."""


class QuantizedFormat(Protocol):
    """One way to store quantized layers. Its constructor raises UnreadableError for settings that are not supported."""

    def layer_of(self, name: str, dtype: str) -> str | None:
        """The layer that a tensor of this name and dtype quantizes; None for any other tensor."""

    def is_excluded(self, layer: str) -> bool:
        """Whether the settings list this layer as one that is not quantized."""

    def place(self, tensors: LayerTensors, plan: Plan) -> None:
        """Put a layer's weights where the model has them. Raises UnreadableError for tensors that are missing, or of other
        shapes than model and settings imply."""


class LinearFormat(ABC):
    """A format whose layers are linear ones."""

    def place(self, tensors: LayerTensors, plan: Plan) -> None:
        plan.place_linear(tensors, lambda shape: self.matrix(tensors, shape))

    @abstractmethod
    def matrix(self, tensors: LayerTensors, shape: tuple[int, int]) -> StoredMatrix:
        """The weight of a layer. shape: [out, in] in the model."""


def layer_with(suffixes: Sequence[str], name: str) -> str | None:
    """The layer, for a name that is a layer's and one of these suffixes."""
    return next((name.removesuffix(suffix) for suffix in suffixes if name.endswith(suffix)), None)


def is_listed(layer: str, patterns: Sequence[str]) -> bool:
    """Whether a list such as modules_to_not_convert names a layer: by its first names or its last ones, or by a regular
    expression for the first ones, as transformers reads such lists."""
    return any(
        re.match(rf"(?:{pattern})(?:\.|$)", layer) or layer.endswith(f".{pattern}") or layer == pattern
        for pattern in patterns
    )


def check_setting(settings: Settings, key: str, supported: Sequence[Any], default: Any = None) -> Any:
    """The value of a setting, in lower case. Raises UnreadableError for one that is not supported."""
    value = settings.get(key, default)
    value = value.lower() if isinstance(value, str) else value
    if value not in supported:
        names = ", ".join(str(option) for option in supported)
        raise UnreadableError(f"quantization_config.{key} is {value!r}; supported: {names}")
    return value
