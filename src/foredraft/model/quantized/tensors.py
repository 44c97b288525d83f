"""The tensors of a checkpoint's safetensors files, by name, memory mapped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATING = ("F64", "F32", "F16", "BF16")


class UnreadableError(ValueError):
    """A quantized checkpoint that cannot be read; the message is the reason, one line."""


class TensorFiles:
    """The tensors of `model.safetensors` in a folder, or of the shards that its index names.

    A file is mapped when a tensor is read, and unmapped when no tensor read from it is left.

    Raises UnreadableError if a file is missing or corrupt, or lacks a tensor that the index promises.
    """

    def __init__(self, folder: Path) -> None:
        self._entries: dict[str, _Entry] = {}
        index = _index_of(folder)
        for file in sorted(set(index.values())) or [_SINGLE]:
            self._entries |= _entries_of(folder / file)
        for name, file in index.items():
            if name not in self._entries:
                raise UnreadableError(f"{file} lacks {name}, which {_INDEX} lists; download the checkpoint again")

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """In safetensors' terms: F16, I32, U8 ..."""
        return self._entries[name].dtype

    def is_floating(self, name: str) -> bool:
        return self.dtype(name) in _FLOATING

    def read(self, name: str) -> Tensor:
        """A view of the mapped file."""
        with safe_open(self._entries[name].file, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    shape: tuple[int, ...]
    dtype: str


def _index_of(folder: Path) -> dict[str, str]:
    """The file of each tensor; empty for a checkpoint in one file."""
    path = folder / _INDEX
    if not path.exists():
        return {}
    try:
        files = json.loads(path.read_bytes())["weight_map"]
        return {str(name): str(file) for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableError(f"{_INDEX} is not an index of tensors; download the checkpoint again") from error


def _entries_of(path: Path) -> dict[str, _Entry]:
    if not path.is_file():
        raise UnreadableError(f"{path.name} is missing: quantized weights are read from safetensors files")
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return {name: _Entry(path, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise UnreadableError(f"{path.name} cannot be read ({error}); download the checkpoint again") from error


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The tensors of one layer: `part` is a name below the layer's, such as qweight."""

    files: TensorFiles
    layer: str

    def has(self, part: str) -> bool:
        return f"{self.layer}.{part}" in self.files

    def read(self, part: str) -> Tensor:
        return self.files.read(f"{self.layer}.{part}")

    def shape(self, part: str) -> tuple[int, ...]:
        """Raises UnreadableError if there is no such tensor."""
        self._require(part)
        return self.files.shape(f"{self.layer}.{part}")

    def dtype(self, part: str) -> str:
        self._require(part)
        return self.files.dtype(f"{self.layer}.{part}")

    def check(self, part: str, shape: tuple[int, ...], *dtypes: str) -> None:
        """Raise UnreadableError unless the tensor exists, with this shape and one of these dtypes (none given: any float)."""
        actual, dtype = self.shape(part), self.dtype(part)
        if actual != shape or dtype not in (dtypes or _FLOATING):
            wanted = " or ".join(dtypes) or "floating point"
            raise UnreadableError(
                f"{self.layer}.{part} is {list(actual)} {dtype} in the file but should be {list(shape)} {wanted}; "
                "download the checkpoint again"
            )

    def _require(self, part: str) -> None:
        if not self.has(part):
            raise UnreadableError(f"{self.layer}.{part} is missing; download the checkpoint again")


def read_values(tensor: Tensor) -> list[int]:
    """A small tensor of integers as a list."""
    values: list[int] = tensor.to(torch.int64).flatten().tolist()
    return values
