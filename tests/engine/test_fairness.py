"""The queue that is fair among clients, and fair shares: properties that hold whatever clients do."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from foredraft.engine.fairness import FairQueue, fair_shares


@dataclass(eq=False)
class Item:
    client: str
    priority: int = 0
    cost: int = 1


def serve(queue: FairQueue[Item]) -> Item:
    """Serve the next item from beginning to end."""
    item = next(iter(queue))
    queue.start(item)
    queue.charge(item.client, item.cost)
    queue.end(item)
    return item


clients = st.sampled_from(["a", "b", "c", "d"])


@given(st.lists(st.tuples(clients, st.integers(1, 50)), max_size=30), st.integers(1, 50), clients)
def test_no_item_starves_however_many_others_arrive(before: list[tuple[str, int]], cost: int, flooding: str) -> None:
    """Whichever client floods the queue, and whatever it held before, the service to others that an item waits for is bounded."""
    queue: FairQueue[Item] = FairQueue()
    for client, amount in before:
        queue.append(Item(client, cost=amount))
    queue.append(Item(flooding, cost=cost))
    patient = Item("patient")
    queue.append(patient)
    bound = sum(amount for _, amount in before) + 5 * cost
    served = 0
    while (item := serve(queue)) is not patient:
        served += item.cost
        assert served <= bound
        queue.append(Item(flooding, cost=cost))


@given(st.lists(st.tuples(clients, st.integers(1, 20)), min_size=1, max_size=200))
def test_clients_that_always_have_items_get_equal_service(items: list[tuple[str, int]]) -> None:
    """While all clients have items, the service to them differs by at most the most expensive item."""
    queue: FairQueue[Item] = FairQueue()
    left = Counter(client for client, _ in items)
    for client, cost in items:
        queue.append(Item(client, cost=cost))
    served = dict.fromkeys(left, 0)
    while all(left.values()):
        item = serve(queue)
        served[item.client] += item.cost
        left[item.client] -= 1
        assert max(served.values()) - min(served.values()) <= 20


@given(st.lists(st.sampled_from(["come", "start", "back", "end", "leave"]), max_size=60))
def test_one_client_is_served_in_order_of_arrival(acts: list[str]) -> None:
    queue: FairQueue[Item] = FairQueue()
    expected: deque[Item] = deque()
    started: list[Item] = []
    for act in acts:
        if act == "come":
            expected.append(Item("a"))
            queue.append(expected[-1])
        elif act == "start" and expected:
            started.append(expected.popleft())
            queue.start(started[-1])
            queue.charge("a", 3)
        elif act == "back" and started:
            expected.appendleft(started.pop())
            queue.put_back(expected[0])
        elif act == "end" and started:
            queue.end(started.pop(0))
        elif act == "leave" and expected:
            queue.remove(expected.pop())
        assert list(queue) == list(expected)
        assert len(queue) == len(expected)
        assert queue.num_started("a") == len(started)


def test_a_new_client_has_no_credit() -> None:
    queue: FairQueue[Item] = FairQueue()
    for _ in range(100):
        queue.append(Item("busy"))
    for _ in range(50):
        serve(queue)
    for _ in range(20):
        queue.append(Item("new"))
    order = [serve(queue).client for _ in range(20)]
    assert order.count("new") == 10


def test_a_client_that_left_keeps_its_debt_while_another_is_served() -> None:
    queue: FairQueue[Item] = FairQueue()
    queue.append(Item("waits"))
    held = next(iter(queue))
    queue.start(held)  # so that the queue is never idle
    queue.append(Item("dear", cost=1000))
    serve(queue)
    for _ in range(20):
        queue.append(Item("other"))
    queue.append(Item("dear"))
    assert [serve(queue).client for _ in range(20)] == ["other"] * 20


def test_clients_without_items_are_forgotten() -> None:
    queue: FairQueue[Item] = FairQueue()
    for i in range(100):
        queue.append(Item(f"client {i}", cost=i))
        serve(queue)
    assert not queue._served
    assert not queue._waiting
    assert not queue._num_started


@given(st.dictionaries(clients, st.integers(0, 100), min_size=1), st.integers(0, 200))
def test_shares_are_max_min_fair(demands: dict[str, int], total: int) -> None:
    shares = fair_shares(demands, total)
    assert shares.keys() == demands.keys()
    assert sum(shares.values()) <= total
    for client, demand in demands.items():
        if shares[client] < demand:  # no other share is larger, up to the remainder of the division
            assert all(share <= shares[client] + 1 for share in shares.values())
    assert total - sum(shares.values()) < len(demands)
