"""The interface that a quantization format implements."""

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
    """A format of quantized layers. Its constructor raises UnreadableError for settings that are not supported."""

    def layer_of(self, name: str, dtype: str) -> str | None:
        """The layer that a tensor with this name and dtype quantizes; None for any other tensor."""

    def is_excluded(self, layer: str) -> bool:
        """Whether the settings list this layer as not quantized."""

    def place(self, tensors: LayerTensors, plan: Plan) -> None:
        """Put a layer's weights into the plan, where the model has them. Raises UnreadableError for tensors that are missing, or have
        other shapes than the model and the settings imply."""


class LinearFormat(ABC):
    """A format whose layers are linear layers."""

    def place(self, tensors: LayerTensors, plan: Plan) -> None:
        plan.place_linear(tensors, lambda shape: self.matrix(tensors, shape))

    @abstractmethod
    def matrix(self, tensors: LayerTensors, shape: tuple[int, int]) -> StoredMatrix:
        """The weight of a layer. shape: [out, in], as in the model."""


def layer_with(suffixes: Sequence[str], name: str) -> str | None:
    """The layer, if the name is a layer's name followed by one of these suffixes."""
    return next((name.removesuffix(suffix) for suffix in suffixes if name.endswith(suffix)), None)


def is_listed(layer: str, patterns: Sequence[str]) -> bool:
    """Whether a list such as modules_to_not_convert names a layer: by the first or last parts of its name, or by a regular expression for
    the first ones, as in transformers."""
    return any(
        re.match(rf"(?:{pattern})(?:\.|$)", layer) or layer.endswith(f".{pattern}") or layer == pattern
        for pattern in patterns
    )


def check_setting(settings: Settings, key: str, supported: Sequence[Any], default: Any = None) -> Any:
    """The value of a setting, in lower case. Raises UnreadableError for a value that is not supported."""
    value = settings.get(key, default)
    value = value.lower() if isinstance(value, str) else value
    if value not in supported:
        names = ", ".join(str(option) for option in supported)
        raise UnreadableError(f"quantization_config.{key} is {value!r}; supported: {names}")
    return value
