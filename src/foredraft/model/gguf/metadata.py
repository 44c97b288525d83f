"""A GGUF file's metadata, checked when it is read: a file may hold anything under any key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from foredraft.errors import ModelError
from foredraft.model.gguf.container import GGUFFile

_LARGEST = 1 << 31
_SHOWN = 20


class Metadata:
    """The metadata of one file. `{arch}.` in a key is replaced by the architecture. Raises ModelError for a value of another kind than
    requested, and for one that is missing and has no default."""

    def __init__(self, file: GGUFFile) -> None:
        self._path, self._values = file.path, file.metadata
        self.architecture = self.text("general.architecture")

    def __contains__(self, key: str) -> bool:
        return self._full(key) in self._values

    def integer(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        """One number, or an array (a number per layer) in which all are the same."""
        value = self._value(key, default)
        if isinstance(value, memoryview) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, memoryview):
            raise ModelError(f"{self._path}: its {self._full(key)} differs between layers, which is not supported")
        if type(value) is not int or not low <= value < _LARGEST:
            raise self._wrong(key, value, f"an integer of at least {low}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._wrong(key, value, "a number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise self._wrong(key, value, "a bool")
        return value

    def is_array(self, key: str) -> bool:
        value = self._values.get(self._full(key))
        return isinstance(value, Sequence) and not isinstance(value, str)

    def array(self, key: str, kind: type | None = None) -> Sequence[Any]:
        """kind: of its elements; None for strings. A missing array is empty."""
        value: Any = self._values.get(self._full(key), ())
        is_array = isinstance(value, Sequence) and not isinstance(value, str)
        if not is_array or (
            len(value) and isinstance(value, memoryview) is (kind is None)
        ):  # numbers are views of the file, strings are not
            raise self._wrong(key, value, "an array")
        if kind is not None and not all(type(element) is kind for element in value):
            raise self._wrong(key, value, f"an array of {kind.__name__}")
        array: Sequence[Any] = value
        return array

    def token_id(self, name: str, num_tokens: int) -> int | None:
        """tokenizer.ggml.<name>_token_id; None if there is none, or it is past the vocabulary."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self._values.get(key)
        return value if type(value) is int and 0 <= value < num_tokens else None

    def _value(self, key: str, default: Any) -> Any:
        value = self._values.get(self._full(key), default)
        if value is None:
            raise ModelError(
                f"{self._path}: its metadata has no {self._full(key)}; download it again, or convert it again"
            )
        return value

    def _full(self, key: str) -> str:
        return key.replace("{arch}", self.architecture) if "{arch}" in key else key

    def _wrong(self, key: str, value: object, wanted: str) -> ModelError:
        shown = repr(value[:_SHOWN].tolist() if isinstance(value, memoryview) else value)[:60]
        return ModelError(f"{self._path}: its {self._full(key)} is {shown}, not {wanted}; download it again")
