"""A ring buffer compared with a list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foredraft.server.live.ring_buffer import RingBuffer


@given(st.integers(1, 5), st.lists(st.integers(0, 3)), st.integers(0, 12))
def test_a_ring_buffer_has_the_end_of_the_list(max_items: int, items: list[int], position: int) -> None:
    buffer: RingBuffer[int] = RingBuffer(max_items)
    for item in items:
        buffer.append(item)
    position = min(position, len(items))
    assert buffer.num_all == len(items)
    assert buffer.last == (items[-1] if items else None)
    assert buffer.since(position) == items[max(position, len(items) - max_items) :]


def test_after_a_skip_positions_continue_from_there() -> None:
    buffer: RingBuffer[str] = RingBuffer(3)
    buffer.append("a")
    buffer.skip_to(5)
    assert (buffer.last, buffer.since(0)) == (None, [])
    buffer.append("b")
    assert (buffer.num_all, buffer.since(5), buffer.since(6)) == (6, ["b"], [])
