"""Giving memory back never changes a number that is still held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foredraft.model.pages import free, give_back

SMAPS = Path("/proc/self/smaps")
SIZE = 4 << 20


def resident(address: int) -> int:
    """Bytes in memory of the mapping that begins at or before an address."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, _, high = head.partition("-")
            inside = int(low, 16) <= address < int(high, 16)
        elif inside and head == "Rss:":
            return int(line.split()[1]) * 1024
    raise AssertionError("no such mapping")


@pytest.mark.skipif(not SMAPS.exists(), reason="only Linux says what is resident")
def test_a_mapped_file_leaves_memory_and_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    expected = torch.arange(SIZE, dtype=torch.int32)
    expected.numpy().tofile(file)
    mapped = torch.from_file(str(file), shared=False, size=SIZE, dtype=torch.int32)
    assert torch.equal(mapped, expected)
    before = resident(mapped.data_ptr())
    assert before >= SIZE * 4
    give_back([mapped])
    assert resident(mapped.data_ptr()) < before // 10
    assert torch.equal(mapped, expected)


def test_memory_that_lies_in_no_file_keeps_its_numbers() -> None:
    weights = [torch.arange(size, dtype=torch.float32) for size in (3, 5000, SIZE)]
    give_back(weights)
    assert all(torch.equal(w, torch.arange(len(w), dtype=torch.float32)) for w in weights)


def test_neighbours_in_one_file_are_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    torch.arange(SIZE, dtype=torch.int32).numpy().tofile(file)
    mapped = torch.from_file(str(file), shared=False, size=SIZE, dtype=torch.int32)
    mapped[: SIZE // 4] = -1  # written to: this part is the process's own now, and no longer the file's
    give_back([mapped[SIZE // 2 :]])
    assert bool((mapped[: SIZE // 4] == -1).all())
    assert torch.equal(mapped[SIZE // 2 :], torch.arange(SIZE // 2, SIZE, dtype=torch.int32))


def test_freed_parameters_are_empty_and_what_was_taken_from_them_stays() -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3), requires_grad=False)
    kept = parameter.data[1]
    free([parameter])
    assert parameter.numel() == 0
    assert kept.tolist() == [3.0, 4.0, 5.0]
