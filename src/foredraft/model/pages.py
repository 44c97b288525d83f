"""Return memory to the system while a model's weights are laid out again, so that they are not in memory twice.

A checkpoint's tensors are views of its mapped file, which stays mapped as long as one of them lives (the embedding always does), so
dropping the others frees nothing. And the C library keeps memory that was freed in pieces.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

_DONT_NEED = 4
"""Linux's MADV_DONTNEED. Pages of a file that is mapped privately and was not written to are read from the file again if needed."""


AddressRanges = Sequence[tuple[int, int]]


def give_back(weights: Iterable[Tensor], files: AddressRanges | None = None) -> None:
    """Return the memory of weights that are no longer needed, including file mappings, to the system. Only on Linux.

    files: a recent result of mapped_files(), for many calls in a row after which nothing reads the weights; memory that has taken the
    place of a file since then is lost with them. None: the files that are mapped now.
    """
    library = _c_library()
    if library is None:
        return
    weights = list(weights)
    if files is None:
        files = mapped_files() if weights else []  # listing them takes milliseconds
    for weight in weights:
        start = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (weight.data_ptr() + weight.numel() * weight.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
        # memory outside of files belongs to the allocator, and would read as zeros afterwards
        if start < end and any(low <= start and end <= high for low, high in files):
            library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONT_NEED)
    library.malloc_trim(ctypes.c_size_t(0))


def free(parameters: Iterable[nn.Parameter], files: AddressRanges | None = None) -> None:
    """Return the memory of parameters that nothing reads any more, and leave them empty. files: see give_back."""
    parameters = list(parameters)
    give_back(parameters, files)
    for parameter in parameters:
        parameter.data = parameter.data.new_empty(0)


def mapped_files() -> list[tuple[int, int]]:
    """The address ranges of privately mapped files; none where the system does not list them. Files are not looked up by name, because
    the hub's cache names them by their hashes."""
    if _c_library() is None:
        return []
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, _, _, inode, *_ = line.split()
        if inode != "0" and permissions.endswith("p"):
            low, _, high = addresses.partition("-")
            ranges.append((int(low, 16), int(high, 16)))
    return ranges


@cache
def _c_library() -> Any:
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
    has_both = hasattr(library, "malloc_trim") and hasattr(library, "madvise")
    return library if has_both and Path("/proc/self/maps").exists() else None
