"""A model without weights, and the places in it for a checkpoint's layers."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D

from foredraft.model.quantized.tensors import UnreadableError


class Destination(NamedTuple):
    """The place in the model for a layer of a checkpoint.

    parameter: its name in the model. If all experts of a mixture are one parameter: expert, and which of the num_parts weights that are
    joined along the outputs. expert is None for any other layer.
    """

    parameter: str
    expert: int | None = None
    part: int = 0
    num_parts: int = 1


class Skeleton:
    """The model that a configuration describes, on the meta device."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool) -> None:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=trust_remote_code
            )
        self.model = model
        self._parameters = dict(model.state_dict())
        mapping = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]

    def destination(self, weight: str) -> Destination:
        """weight: a parameter's name in the checkpoint. Raises UnreadableError if the model has no place for it."""
        if weight in self._parameters:
            return Destination(weight)
        parameter, pattern = rename_source_key(
            weight, self._renamings, self._converters, self.model.base_model_prefix, self._parameters
        )
        if parameter not in self._parameters:
            raise UnreadableError(f"{weight} is quantized, but the model that config.json describes has no such weight")
        return Destination(parameter) if pattern is None else self._expert(parameter, pattern, weight)

    def linear_shape(self, parameter: str) -> tuple[int, int]:
        """[out, in] of the linear layer that owns a weight. Raises UnreadableError for a weight of another kind."""
        layer = self.owner(parameter)
        if not parameter.endswith(".weight") or type(layer) not in (nn.Linear, Conv1D):
            raise UnreadableError(
                f"{parameter} is quantized but belongs to a {type(layer).__name__}; only linear layers and experts may be quantized"
            )
        sides = tuple(self._parameters[parameter].shape)
        return (sides[1], sides[0]) if type(layer) is Conv1D else (sides[0], sides[1])

    def experts_shape(self, parameter: str) -> tuple[int, int, int]:
        """[experts, out, in] of a mixture's parameter. Raises UnreadableError for a parameter of another kind."""
        sides = tuple(self._parameters[parameter].shape)
        if len(sides) != 3 or not hasattr(self.owner(parameter), "is_transposed"):
            raise UnreadableError(f"{parameter} is quantized as the experts of a mixture, but the model has none there")
        return (sides[0], sides[2], sides[1]) if self.is_transposed(parameter) else (sides[0], sides[1], sides[2])

    def is_transposed(self, parameter: str) -> bool:
        return bool(self.owner(parameter).is_transposed)

    def owner(self, parameter: str) -> Any:
        return self.model.get_submodule(parameter.rpartition(".")[0])

    def _expert(self, parameter: str, pattern: str, weight: str) -> Destination:
        converter = next(entry for entry in self._converters if pattern in entry.source_patterns)
        number = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), weight)
        steps = [(type(step), step.dim) for step in converter.operations if hasattr(step, "dim")]
        if number is None or steps not in ([_MERGE], [_MERGE, _JOIN]) or len(steps) != len(converter.operations):
            raise UnreadableError(f"{weight} is quantized, but a layer stored in such parts cannot be read")
        places = converter.source_patterns
        return Destination(parameter, int(number[1]), places.index(pattern), len(places))


_MERGE, _JOIN = (MergeModulelist, 0), (Concatenate, 1)
"""How a mixture's parameter is built from its experts' weights: stacked, then gates above values."""
