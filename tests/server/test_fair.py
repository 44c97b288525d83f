"""Fairness between clients: how clients are identified, and that a large request does not block small ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from foredraft import LLM
from foredraft.server.api_errors import ApiError
from tests.server.conftest import SETTINGS, Running, running, wait_for
from tests.server.test_request_log import lines_of, logged

KEYS = ("key of the first", "key of the second")


@pytest.fixture(scope="module")
def few() -> LLM:
    return LLM(seed=0, max_num_seqs=4, method="none")


@pytest.fixture(scope="module")
def shared(few: LLM) -> Iterator[Running]:
    limits = replace(SETTINGS.limits, max_queue=28)
    with running(few, replace(SETTINGS, api_key=KEYS, limits=limits)) as found:
        yield found


def client_of(server: Running, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def ask(server: Running, key: str, **settings: Any) -> Any:
    body = {"model": "pair", "prompt": "Once upon a time", "temperature": 0.0, "extra_body": {"ignore_eos": True}}
    return client_of(server, key).completions.create(**body | settings)


def test_many_requests_of_one_client_do_not_block_a_small_one_of_another(shared: Running) -> None:
    expected = ask(shared, KEYS[0], max_tokens=4).choices[0].text
    flood = threading.Thread(target=ask, args=(shared, KEYS[0]), kwargs={"n": 24, "max_tokens": 64})
    flood.start()
    wait_for(lambda: shared.llm.engine.num_waiting >= 16)
    for _ in range(3):
        assert ask(shared, KEYS[1], max_tokens=4).choices[0].text == expected
        assert flood.is_alive(), "the small requests waited for the flood"
    flood.join(60)
    shared.wait_until_idle()


def test_a_queue_filled_by_one_client_is_open_to_others(shared: Running) -> None:
    with shared.service.admitted(32, "one"):
        with pytest.raises(ApiError, match="at most 32"), shared.service.admitted(1, "one"):
            pass
        with shared.service.admitted(16, "two"):
            with pytest.raises(ApiError), shared.service.admitted(1, "two"):
                pass
            with shared.service.admitted(10, "three"):
                assert shared.service.num_texts == 58
    assert shared.service.num_texts == 0


def test_each_key_is_a_client_and_is_logged_by_number(few: LLM) -> None:
    with logged() as lines, running(few, replace(SETTINGS, api_key=KEYS)) as server:
        body = {"prompt": "a", "max_tokens": 1}
        headers = [{"authorization": f"Bearer {key}"} for key in (*KEYS, "neither")]
        answers = [server.post("/v1/completions", body, headers=each) for each in headers]
    assert [line.get("client") for line in lines_of(lines, answers)] == ["key-1", "key-2", None]
    assert not any(key in str(lines) for key in KEYS)


def test_without_keys_clients_are_identified_by_address(server: Running) -> None:
    seen: list[str] = []
    prepare = server.llm.frontend.prepare

    def watched(*args: Any, **settings: Any) -> Any:
        seen.append(settings["client"])
        return prepare(*args, **settings)

    server.llm.frontend.prepare = watched  # type: ignore[method-assign]
    try:
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
    finally:
        server.llm.frontend.prepare = prepare  # type: ignore[method-assign]
    assert seen == ["127.0.0.1"]


def test_priority_orders_the_requests_of_a_client(shared: Running) -> None:
    order: list[int] = []

    def one(priority: int) -> None:
        ask(shared, KEYS[0], max_tokens=16, extra_body={"ignore_eos": True, "priority": priority})
        order.append(priority)

    blocking = threading.Thread(target=ask, args=(shared, KEYS[0]), kwargs={"n": 4, "max_tokens": 1900})
    blocking.start()
    wait_for(lambda: shared.llm.engine.num_running == 4)
    threads = []
    for priority in (5, 3, -2):  # each is waiting before the next one is sent
        threads.append(threading.Thread(target=one, args=(priority,)))
        threads[-1].start()
        wait_for(lambda: shared.llm.engine.num_waiting == len(threads))
    waiting = [sequence.priority for sequence in shared.llm.engine._scheduler.waiting]
    for thread in (*threads, blocking):
        thread.join(60)
    assert waiting == [-2, 3, 5]
    assert sorted(order) == [-2, 3, 5]
    shared.wait_until_idle()
