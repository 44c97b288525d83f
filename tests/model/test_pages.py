"""Releasing memory never changes numbers that are still in use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foredraft.model.pages import free, give_back

SMAPS = Path("/proc/self/smaps")
SIZE = 4 << 20


def resident(address: int) -> int:
    """The resident bytes of the mapping that contains an address."""
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
def test_a_mapped_file_is_released_and_can_be_read_again(tmp_path: Path) -> None:
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


def test_memory_without_a_file_keeps_its_numbers() -> None:
    weights = [torch.arange(size, dtype=torch.float32) for size in (3, 5000, SIZE)]
    give_back(weights)
    assert all(torch.equal(w, torch.arange(len(w), dtype=torch.float32)) for w in weights)


def test_neighbouring_data_in_the_file_is_not_released(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    torch.arange(SIZE, dtype=torch.int32).numpy().tofile(file)
    mapped = torch.from_file(str(file), shared=False, size=SIZE, dtype=torch.int32)
    mapped[: SIZE // 4] = -1  # after a write this part belongs to the process and no longer to the file
    give_back([mapped[SIZE // 2 :]])
    assert bool((mapped[: SIZE // 4] == -1).all())
    assert torch.equal(mapped[SIZE // 2 :], torch.arange(SIZE // 2, SIZE, dtype=torch.int32))


def test_freed_parameters_are_empty_and_views_of_them_stay_valid() -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3), requires_grad=False)
    kept = parameter.data[1]
    free([parameter])
    assert parameter.numel() == 0
    assert kept.tolist() == [3.0, 4.0, 5.0]
