from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from foredraft.server.replicas.forwarded_request import PREFIX_CHARACTERS, ForwardedRequest, prefix_of
from foredraft.server.replicas.prefix_routing import rank_replicas

LOADS = st.dictionaries(st.text("abcdef", min_size=1, max_size=8), st.integers(0, 100), min_size=1, max_size=6)
PREFIX = st.text(min_size=1, max_size=20)


@given(PREFIX, LOADS, st.integers(0, 10))
def test_every_replica_is_ranked_once(prefix: str, loads: dict[str, int], slack: int) -> None:
    assert sorted(rank_replicas(prefix, loads, slack=slack)) == sorted(loads)


@given(PREFIX, LOADS)
def test_without_load_only_prefixes_of_a_removed_replica_move(prefix: str, loads: dict[str, int]) -> None:
    own, *others = rank_replicas(prefix, dict.fromkeys(loads, 0), slack=0)
    for gone in others:
        left = dict.fromkeys((name for name in loads if name != gone), 0)
        assert rank_replicas(prefix, left, slack=0)[0] == own


@given(PREFIX, LOADS, st.integers(0, 10))
def test_the_first_replica_has_at_most_slack_more_load_than_the_least(
    prefix: str, loads: dict[str, int], slack: int
) -> None:
    first, *others = rank_replicas(prefix, loads, slack=slack)
    assert loads[first] <= min(loads.values()) + slack
    assert [loads[name] for name in others] == sorted(loads[name] for name in others)


def test_prefixes_are_spread() -> None:
    counts = {"a": 0, "b": 0, "c": 0, "d": 0}
    for number in range(4000):
        counts[rank_replicas(f"prompt {number}", dict.fromkeys(counts, 0), slack=0)[0]] += 1
    assert min(counts.values()) > 850  # 1000 each, within five standard deviations


@given(LOADS)
def test_requests_without_a_prompt_go_to_the_least_loaded_replica(loads: dict[str, int]) -> None:
    assert loads[rank_replicas("", loads, slack=100)[0]] == min(loads.values())


SYSTEM = {"role": "system", "content": "Answer in verse. " * 40}


def test_a_conversation_keeps_its_prefix() -> None:
    turns = [SYSTEM, {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    first, later = ({"messages": turns[:2]}, {"messages": turns, "model": "m"})
    found = prefix_of(json.dumps(first).encode())
    assert found == prefix_of(json.dumps(later).encode())
    assert len(found) == PREFIX_CHARACTERS


@given(st.binary(max_size=50))
def test_any_body_has_a_prefix(body: bytes) -> None:
    assert len(prefix_of(body)) <= PREFIX_CHARACTERS


def test_prefixes_of_prompts_in_every_form() -> None:
    def of(prompt: object) -> str:
        return prefix_of(json.dumps({"prompt": prompt}).encode())

    assert of("x" * 999) == of("x" * 999 + "y")
    assert of([1] * 999) == of([1] * 999 + [2])
    assert of(["x" * 999, "y"]) == of(["x" * 999, "z"])
    assert of("short") != of("other")
    assert prefix_of(b"[" * 100_000) == prefix_of(b"\xff") == prefix_of(b"{}") == ""


def test_keys_are_not_forwarded() -> None:
    headers = [(b"authorization", b"Bearer secret"), (b"cookie", b"secret"), (b"content-type", b"application/json")]
    scope = {"method": "POST", "path": "/", "query_string": b"", "headers": headers}
    assert ForwardedRequest.of(scope, b"").scope()["headers"] == [(b"content-type", b"application/json")]
