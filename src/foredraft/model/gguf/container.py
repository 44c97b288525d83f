"""A GGUF file's metadata and tensor table, read from a memory map.

Everything is bounded by the file: a count, a length or an offset that points past its end is refused before anything is allocated. The
`gguf` package's own reader makes an array of every string (40 seconds for a vocabulary of 262,144) and trusts the file, so only its
tables of types and names are used. Layout: the GGUF specification (ggml-org/ggml, docs).
"""

from __future__ import annotations

import itertools
import mmap
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foredraft.errors import ModelError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SMALLEST_ENTRY, _SMALLEST_TENSOR = 13, 32
"""Bytes of a metadata entry and of an entry of the tensor table with an empty name."""

_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_LENGTH = struct.Struct("<Q")
_PAGES_KEPT = 1 << 16


class TensorEntry(NamedTuple):
    """shape: rows first. kind: the name of its type, such as Q4_K. start: its offset in the file. start, num_bytes: in bytes."""

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    num_bytes: int


class Strings(Sequence[str]):
    """An array of strings of the file at `path`, decoded when it is read. Raises ModelError if one is not UTF-8."""

    def __init__(self, path: Path, buffer: mmap.mmap, start: int, count: int) -> None:
        self._path, self._buffer, self._start, self._count = path, buffer, start, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __iter__(self) -> Iterator[str]:
        position = self._start
        for _ in range(self._count):
            end = position + 8 + _LENGTH.unpack_from(self._buffer, position)[0]
            try:
                yield self._buffer[position + 8 : end].decode()
            except UnicodeDecodeError:
                raise ModelError(f"{self._path}: a GGUF file with text that is not UTF-8; download it again") from None
            position = end


class GGUFFile:
    """The file at `path`, which stays mapped. Raises a one-line ModelError for a malformed file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as stream:
                # a private map: dropped pages are read from the file again, and views of it may be parameters
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError:
            raise ModelError(f"{path}: an empty file; download it again") from None
        try:
            self.metadata, self.tensors = _Parser(path, self._map).parse()
        except (struct.error, OverflowError):
            raise ModelError(f"{path}: a GGUF file that is truncated or damaged; download it again") from None
        except UnicodeDecodeError:
            raise ModelError(f"{path}: a GGUF file with text that is not UTF-8; download it again") from None
        except ValueError as error:
            raise ModelError(f"{path}: {error}") from None
        self._forget(0, min((entry.start for entry in self.tensors.values()), default=0))

    def rows(self, entry: TensorEntry) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor as [rows, bytes of a row], a view of the file. Leading dimensions are flattened."""
        data = np.frombuffer(self._map, np.uint8, entry.num_bytes, entry.start)
        num_rows = int(np.prod(entry.shape[:-1]))
        return data.reshape(num_rows, entry.num_bytes // num_rows)

    def forget_pages(self, entry: TensorEntry, first: int, end: int) -> None:
        """Return the memory of bytes first .. end of a tensor to the system; they are read from the file again if needed. A short range
        is kept."""
        self._forget(entry.start + first, entry.start + end)

    def _forget(self, first: int, end: int) -> None:
        start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        length = end // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length >= _PAGES_KEPT and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, length)


class _Parser:
    """Raises ValueError for a malformed file, and struct.error or OverflowError if the file ends too early."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self._path, self._buffer, self._position = path, buffer, 0

    def parse(self) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
        num_tensors, num_entries = self._header()
        metadata = self._metadata(num_entries)
        table = [self._tensor() for _ in range(self._count(num_tensors, _SMALLEST_TENSOR))]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise ValueError(
                f"a GGUF file whose alignment is {alignment!r}, not a power of two that is at least 8; download it again"
            )
        first = -(-self._position // alignment) * alignment
        return metadata, _located(table, first, alignment, len(self._buffer))

    def _header(self) -> tuple[int, int]:
        if self._buffer[:4] != MAGIC:
            raise ValueError("not a GGUF file: it does not begin with GGUF; give a GGUF file or a directory")
        (version,) = self._take("4xI")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = "in big-endian order" if swapped in _VERSIONS else f"of version {version}"
            raise ValueError(f"a GGUF file {kind}; versions 2 and 3 in little-endian order can be read")
        num_tensors, num_entries = self._take("QQ")
        return num_tensors, num_entries

    def _metadata(self, num_entries: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(self._count(num_entries, _SMALLEST_ENTRY)):
            key = self._string()
            if key in metadata:
                raise ValueError(f"a GGUF file with two values for {key[:80]!r}; download it again")
            (kind,) = self._take("I")
            metadata[key] = self._value(kind, key)
        return metadata

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise ValueError(f"a GGUF file whose {key[:80]!r} has the unknown type {kind}; download it again")
        return self._take(_SCALARS[kind])[0]

    def _array(self, key: str) -> Sequence[Any]:
        kind, count = self._take("IQ")
        if kind == _STRING:
            return self._strings(count)
        if kind not in _SCALARS:
            raise ValueError(
                f"a GGUF file whose {key[:80]!r} is an array of the unknown type {kind}; download it again"
            )
        size = struct.calcsize(f"<{_SCALARS[kind]}")
        start = self._position
        self._move_to(start + self._count(count, size) * size)
        # a view: as Python numbers, a large vocabulary's scores would take as much memory as a layer
        view: Any = memoryview(self._buffer)[start : self._position]
        numbers: memoryview[Any] = view.cast(_SCALARS[kind])
        return numbers

    def _strings(self, count: int) -> Strings:
        start, position = self._position, self._position
        unpack = _LENGTH.unpack_from
        for _ in range(self._count(count, _LENGTH.size)):
            position += 8 + unpack(self._buffer, position)[0]
        self._move_to(position)
        return Strings(self._path, self._buffer, start, count)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """name, shape with rows first, number of its type, offset"""
        name = self._string()
        (num_dimensions,) = self._take("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(
                f"a GGUF file whose tensor {name[:80]!r} has {num_dimensions} dimensions; download it again"
            )
        dimensions = self._take(f"{num_dimensions}Q")
        kind, offset = self._take("IQ")
        return name, tuple(reversed(dimensions)), kind, offset

    def _string(self) -> str:
        (length,) = self._take("Q")
        start = self._position
        self._move_to(start + length)
        return self._buffer[start : start + length].decode()

    def _take(self, form: str) -> tuple[Any, ...]:
        form = f"<{form}"
        values = struct.unpack_from(form, self._buffer, self._position)
        self._position += struct.calcsize(form)
        return values

    def _count(self, count: int, smallest: int) -> int:
        """count, if the rest of the file has room for that many items of at least `smallest` bytes each."""
        if count * smallest > len(self._buffer) - self._position:
            raise struct.error
        return count

    def _move_to(self, position: int) -> None:
        if position > len(self._buffer):
            raise struct.error
        self._position = position


def _located(
    table: Sequence[tuple[str, tuple[int, ...], int, int]], first: int, alignment: int, file_size: int
) -> dict[str, TensorEntry]:
    """The tensors by name. Raises ValueError for one that extends past the file or overlaps another."""
    tensors: dict[str, TensorEntry] = {}
    for name, shape, number, offset in table:
        if name in tensors:
            raise ValueError(f"a GGUF file with two tensors named {name[:80]!r}; download it again")
        kind, num_bytes = _type_and_size(name, shape, number)
        if offset % alignment or first + offset + num_bytes > file_size:
            raise ValueError(f"a GGUF file that ends before its tensor {name[:80]!r}, or is damaged; download it again")
        tensors[name] = TensorEntry(name, shape, kind, first + offset, num_bytes)
    in_order = sorted(tensors.values(), key=lambda entry: entry.start)
    for entry, following in itertools.pairwise(in_order):
        if entry.start + entry.num_bytes > following.start:
            raise ValueError(
                f"a GGUF file whose tensors {entry.name!r} and {following.name!r} overlap; download it again"
            )
    return tensors


def _type_and_size(name: str, shape: tuple[int, ...], number: int) -> tuple[str, int]:
    """The name of a tensor's type, and its size in bytes. Raises ValueError for an unknown type and for rows of broken blocks."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise ValueError(
            f"its tensor {name[:80]!r} has the unknown type {number}; use a file in another type"
        ) from None
    block_len, block_size = GGML_QUANT_SIZES[kind]
    if 0 in shape or shape[-1] % block_len:
        raise ValueError(
            f"its tensor {name[:80]!r} of type {kind.name} cannot have the shape {list(shape)}; download it again"
        )
    num_bytes = block_size
    for size in (*shape[:-1], shape[-1] // block_len):
        num_bytes *= size
    return kind.name, num_bytes
