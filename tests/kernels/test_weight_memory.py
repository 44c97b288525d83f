import sys
from pathlib import Path

import pytest
import torch

from foredraft.kernels import WeightMemory

CHUNK = 256 << 20


def test_taken_parts_do_not_overlap() -> None:
    memory = WeightMemory()
    parts = [memory.take(num_bytes) for num_bytes in (1, 64, 100, 3000)]
    for value, part in enumerate(parts):
        part.fill_(value)
    assert [part.unique().tolist() for part in parts] == [[0], [1], [2], [3]]
    assert [len(part) for part in parts] == [1, 64, 100, 3000]
    assert all(part.data_ptr() % 64 == 0 for part in parts)


def test_more_than_a_chunk_is_one_piece() -> None:
    memory = WeightMemory()
    before, large, after = memory.take(10), memory.take(CHUNK + 1), memory.take(10)
    assert len(large) == CHUNK + 1
    before.fill_(1), large[-1:].fill_(2), after.fill_(3)
    assert (int(before[0]), int(large[-1]), int(after[0])) == (1, 2, 3)


def test_returned_memory_is_reused() -> None:
    memory = WeightMemory()
    kept = memory.take(70)
    first = memory.take(1000)
    memory.give_back(first)
    again = memory.take(500)
    assert again.data_ptr() == first.data_ptr()
    assert kept.data_ptr() < again.data_ptr()


def test_memory_outlives_its_allocator() -> None:
    part = WeightMemory().take(1 << 20)
    part.fill_(7)
    assert torch.equal(part, torch.full((1 << 20,), 7, dtype=torch.uint8))


def flags_of(address: int) -> list[str]:
    """The flags of the mapping that contains an address, as Linux names them."""
    is_in = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first:
            start, end = (int(part, 16) for part in first.split("-"))
            is_in = start <= address < end
        elif is_in and first == "VmFlags:":
            return rest.split()
    return []


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of a process's memory")
def test_weights_are_not_counted_as_committed_memory() -> None:
    """Otherwise a process with many models would count as larger than the machine, and could not fork."""
    part = WeightMemory().take(1)
    flags = flags_of(part.data_ptr())
    assert "nr" in flags
    assert "ac" not in flags
