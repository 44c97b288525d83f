"""The decoder layers of an EAGLE head, from a configuration of Llama's or Qwen3's form."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from foredraft.errors import ModelError, shown
from foredraft.heads.settings import Settings

_CLASSES: dict[str, type[Any]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
_OLD_KEYS = {
    "rope_theta",
    "rope_scaling",
    "torch_dtype",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
}
_WITHOUT_EFFECT = {
    "_name_or_path",
    "transformers_version",
    "auto_map",
    "pretraining_tp",
    "initializer_range",
    "use_cache",
}
ROTARY_TYPES = ("default", "linear", "llama3", "yarn")
_LAYER = re.compile(r"layers\.(\d+)\.")


def count_layers(names: Iterable[str]) -> int:
    """The number of layers in the weights: config.json often has the target's. Raises ModelError for no layers, or a gap."""
    indices = {int(match[1]) for name in names if (match := _LAYER.match(name))}
    if not indices or indices != set(range(len(indices))):
        raise ModelError(f"its weights should have layers 0, 1, ..., but have {sorted(indices) or 'none'}")
    return len(indices)


def read_layers(settings: Settings, num_layers: int, family: str | None = None) -> PretrainedConfig:
    """Read every key of a layer configuration. family: the model_type; None: the one in the settings.

    Raises ModelError for a family or a rotary embedding that is not supported.
    """
    family = family or settings.get("model_type", "llama")
    if family not in _CLASSES:
        raise ModelError(f"its layers belong to the family {shown(family)}: only {', '.join(_CLASSES)} are supported")
    known = set(_CLASSES[family]().to_dict()) | _OLD_KEYS | _WITHOUT_EFFECT
    values = settings.take(known - {"architectures", "model_type", "num_hidden_layers"})
    settings.take(("architectures", "model_type", "num_hidden_layers"))
    types = values.pop("layer_types", None)
    if types is not None:
        values["layer_types"] = _types(types, num_layers)
    layer: PretrainedConfig = _CLASSES[family](**values, num_hidden_layers=num_layers)
    _check_rotary(layer)
    return layer


def _types(types: Any, num_layers: int) -> list[str]:
    if not isinstance(types, list) or len(types) < num_layers:
        raise ModelError(
            f"config.json: layer_types is {shown(types)}, but there are {num_layers} layers in the weights"
        )
    return types[:num_layers]


def _check_rotary(layer: PretrainedConfig) -> None:
    """Refuse kinds of scaling that depend on the longest position of a pass: one request would change the rotation of another's rows."""
    parameters = layer.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in ROTARY_TYPES:
        raise ModelError(f"its rotary embedding is of type {shown(kind)}: only {', '.join(ROTARY_TYPES)} are supported")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("config.json: partial_rotary_factor must be 1: only whole attention heads can be rotated")
