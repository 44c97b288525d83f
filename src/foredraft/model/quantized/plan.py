"""The layers of a model that are stored ones, with their weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foredraft.kernels import Joined, WeightSource
from foredraft.model.quantized.skeleton import Destination, Skeleton
from foredraft.model.quantized.tensors import LayerTensors, UnreadableError
from foredraft.model.stored import PermutedLinear, StoredExperts, StoredLinear


class StoredMatrix(NamedTuple):
    """A quantized weight [out, in]. order: the input that each column belongs to; None: column i belongs to input i."""

    source: WeightSource
    order: Tensor | None = None


ReadMatrix = Callable[[tuple[int, int]], StoredMatrix]
"""A shape [out, in] -> the weight with that shape, from a file. Raises UnreadableError if the file has no such weight."""

ReadExperts = Callable[[tuple[int, int, int]], list[WeightSource]]
"""The same for all experts of a mixture: a shape [experts, out, in] -> the weight [out, in] of each."""


class Plan:
    """The stored parts of a model, filled layer by layer. Methods raise UnreadableError if a layer does not fit."""

    def __init__(self, skeleton: Skeleton) -> None:
        self._skeleton = skeleton
        self._linears: dict[str, StoredMatrix] = {}
        self._experts: dict[str, list[WeightSource]] = {}
        self._parts: dict[str, dict[Destination, WeightSource]] = defaultdict(dict)
        self.biases: dict[str, str] = {}
        """The biases of stored layers: name in the model with stored layers -> name in the checkpoint."""

    def place_linear(self, tensors: LayerTensors, read: ReadMatrix) -> None:
        destination = self._skeleton.destination(f"{tensors.layer}.weight")
        if destination.expert is not None:
            self._place_part(tensors, destination, read)
            return
        name = destination.parameter.removesuffix(".weight")
        matrix = self._linears[name] = read(self._skeleton.linear_shape(destination.parameter))
        needs_bias = self._skeleton.owner(destination.parameter).bias is not None
        if tensors.has("bias") and (needs_bias or bool(tensors.read("bias").any())):
            self.biases[f"{name}.bias" if matrix.order is None else f"{name}.linear.bias"] = f"{tensors.layer}.bias"

    def has_head(self) -> bool:
        """Whether the model's head is stored, and therefore no longer tied to the embedding."""
        head = self._skeleton.model.get_output_embeddings()
        return any(self._skeleton.owner(f"{name}.weight") is head for name in self._linears)

    def place_experts(self, name: str, read: ReadExperts) -> None:
        parameter = self._skeleton.destination(name).parameter
        self._experts[parameter] = read(self._skeleton.experts_shape(parameter))

    def _place_part(self, tensors: LayerTensors, destination: Destination, read: ReadMatrix) -> None:
        """Place one weight of one expert. All experts are one parameter in the model."""
        _, num_outputs, num_inputs = self._skeleton.experts_shape(destination.parameter)
        matrix = read((num_outputs // destination.num_parts, num_inputs))
        if matrix.order is not None or (tensors.has("bias") and bool(tensors.read("bias").any())):
            raise UnreadableError(
                f"{tensors.layer} is an expert with act-order (g_idx) or a bias, which is not supported"
            )
        self._parts[destination.parameter][destination] = matrix.source

    def apply(self, model: Any, dtype: torch.dtype) -> None:
        """Replace a model's own layers with stored ones. Experts are read in this dtype."""
        for name, matrix in self._linears.items():
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, self._stored(name, matrix, dtype))
        for parameter, sources in [*self._experts.items(), *self._joined_parts()]:
            path, _, name = parameter.rpartition(".")
            owner = model.get_submodule(path)
            delattr(owner, name)
            setattr(owner, name, StoredExperts(sources, dtype, is_transposed=self._skeleton.is_transposed(parameter)))

    def _stored(self, name: str, matrix: StoredMatrix, dtype: torch.dtype) -> nn.Module:
        has_bias = self._skeleton.owner(f"{name}.weight").bias is not None or not self.biases.keys().isdisjoint(
            (f"{name}.bias", f"{name}.linear.bias")
        )
        linear = StoredLinear(matrix.source, torch.empty(matrix.source.shape[0], dtype=dtype) if has_bias else None)
        return linear if matrix.order is None else PermutedLinear(linear, matrix.order)

    def _joined_parts(self) -> Iterator[tuple[str, list[WeightSource]]]:
        for parameter, parts in self._parts.items():
            num_parts = next(iter(parts)).num_parts
            experts = []
            for expert in range(self._skeleton.experts_shape(parameter)[0]):
                places = [Destination(parameter, expert, part, num_parts) for part in range(num_parts)]
                if not parts.keys() >= set(places):
                    raise UnreadableError(
                        f"{parameter} lacks weights for expert {expert}; download the checkpoint again"
                    )
                experts.append(_joined([parts[place] for place in places]))
            yield parameter, experts


def _joined(sources: Sequence[WeightSource]) -> WeightSource:
    return sources[0] if len(sources) == 1 else Joined(sources)
