"""The front without Ray: replicas are in this process, and some of them end."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from starlette.types import Message

from foredraft import LLM
from foredraft.errors import ForedraftError
from foredraft.server import RequestLimits, ServerSettings
from foredraft.server.http_server import listen, make_server
from foredraft.server.replicas.cluster import ClusterSettings, ReplicaLost, Replicas
from foredraft.server.replicas.forwarded_request import ForwardedRequest
from foredraft.server.replicas.front import ATTEMPTS, create_front
from foredraft.server.replicas.replica_worker import ReplicaReport, Worker
from tests.server.conftest import TEMPLATE

SETTINGS = ServerSettings(model_names=("pair",))
BODY = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}


class Local:
    """A single replica. lost_after: for each attempt, after how many batches of messages the replica ends; None: it does not."""

    def __init__(self, worker: Worker, *lost_after: int | None) -> None:
        self._worker = worker
        self._lost_after = list(lost_after)
        self.asked: list[ForwardedRequest] = []

    async def answer(self, request: ForwardedRequest) -> AsyncGenerator[list[dict[str, Any]], None]:
        self.asked.append(request)
        left = self._lost_after.pop(0) if self._lost_after else None
        async with aclosing(self._worker.answer(request)) as answer:  # type: ignore[type-var]
            async for messages in answer:
                for message in messages:
                    if left is not None and (left := left - 1) < 0:
                        raise ReplicaLost
                    yield [message]

    async def reports(self) -> list[ReplicaReport]:
        return [await self._worker.report()]


def run(
    llm: LLM,
    use: Callable[[httpx2.AsyncClient, Local], Any],
    *lost_after: int | None,
    settings: ServerSettings = SETTINGS,
) -> None:
    async def main() -> None:
        worker = Worker.__new__(Worker)
        await worker.__init__(lambda: "one", replace(settings, api_key=None), lambda: llm)  # type: ignore[misc]
        local = Local(worker, *lost_after)
        transport = httpx2.ASGITransport(create_front(settings, local))  # type: ignore[arg-type]
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await use(client, local)

    asyncio.run(main())


def text_of(stream: str) -> str:
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in map(json.loads, events) for choice in event.get("choices", ()))


def test_answers_are_those_of_the_replica(llm: LLM) -> None:
    async def use(client: httpx2.AsyncClient, _: Local) -> None:
        whole = (await client.post("/v1/completions", json=BODY)).json()["choices"][0]["text"]
        stream = (await client.post("/v1/completions", json={**BODY, "stream": True})).text
        assert text_of(stream) == whole
        assert stream.endswith("data: [DONE]\n\n")
        document = (await client.get("/openapi.json")).json()
        assert "/v1/chat/completions" in document["paths"]
        ignoring = await client.post("/v1/completions", json={**BODY, "nonsense": 1})
        assert (ignoring.status_code, ignoring.headers["X-Foredraft-Ignored"]) == (200, "nonsense")
        refused = await client.post("/v1/completions", json={**BODY, "mirostat": 1})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "mirostat")
        response = await client.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 2})
        assert response.json()["error"]["code"] == "no_chat_template"
        assert (await client.get("/nowhere")).status_code == 404

    run(llm, use)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_is_logged_with_the_fields_of_the_replica(
    llm: LLM, is_stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(client: httpx2.AsyncClient, _: Local) -> None:
        await client.post("/v1/completions", json={**BODY, "stream": is_stream, "user": "somebody"})

    caplog.set_level(logging.INFO, "foredraft.server")
    run(llm, use)
    _, fields = [
        vars(record)["fields"] for record in caplog.records if record.message == "request"
    ]  # the replica's is first
    assert (fields["completion_tokens"], fields["user"]) == (12, "somebody")
    assert "ended" not in fields


@pytest.mark.parametrize("is_stream", [False, True])
def test_requests_without_output_are_retried_on_another_replica(llm: LLM, is_stream: bool) -> None:
    async def use(client: httpx2.AsyncClient, local: Local) -> None:
        answer = await client.post("/v1/completions", json={**BODY, "stream": is_stream})
        assert answer.status_code == 200
        assert len(local.asked) == 2
        metrics = (await client.get("/metrics")).text
        assert 'foredraft:replica_lost_requests_total{outcome="retried",replica="front"} 1.0' in metrics
        assert 'foredraft:http_requests_total{replica="front",route="/v1/completions",status="200"} 1.0' in metrics

    run(llm, use, 1)  # the replica ends after the headers


def test_a_stream_that_has_begun_ends_with_an_error_if_its_replica_ends(llm: LLM) -> None:
    async def use(client: httpx2.AsyncClient, local: Local) -> None:
        answer = await client.post("/v1/completions", json={**BODY, "stream": True})
        *_, last = answer.text.strip().split("\n\n")
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "replica_lost"
        assert error["type"] == "server_error"
        assert "[DONE]" not in answer.text
        assert text_of(answer.text)
        assert len(local.asked) == 1

    run(llm, use, 2)


def test_a_stream_of_responses_has_the_events_of_its_route_if_its_replica_ends(llm: LLM) -> None:
    async def use(client: httpx2.AsyncClient, _: Local) -> None:
        answer = await client.post("/v1/responses", json={"input": "Hello", "stream": True})
        lines = answer.text.splitlines()
        names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
        assert [event["type"] for event in events] == names
        assert names[:2] == ["response.created", "response.in_progress"]
        assert names[-2:] == ["error", "response.failed"]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        created, failed = events[0]["response"], events[-1]["response"]
        assert events[-2]["code"] == failed["error"]["code"] == "replica_lost"
        assert failed == {**created, "status": "failed", "error": failed["error"]}

    run(llm, use, 3, settings=replace(SETTINGS, chat_template=TEMPLATE))


def test_a_replica_that_ends_after_its_response_is_not_missed(llm: LLM) -> None:
    async def use(client: httpx2.AsyncClient, local: Local) -> None:
        answer = await client.post("/v1/completions", json=BODY)
        assert answer.status_code == 200
        assert answer.json()["choices"]
        assert "foredraft:replica_lost_requests_total{" not in (await client.get("/metrics")).text

    run(llm, use, 2)


def test_a_request_that_ends_every_replica_is_retried_only_a_few_times(llm: LLM) -> None:
    async def use(client: httpx2.AsyncClient, local: Local) -> None:
        answer = await client.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
        assert len(local.asked) == ATTEMPTS

    run(llm, use, 0, 0, 0)


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_health_checks_are_counted_by_route_and_logged_at_debug_level(
    llm: LLM, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(client: httpx2.AsyncClient, _: Local) -> None:
        assert (await client.get(path)).status_code == 200
        metrics = (await client.get("/metrics")).text
        assert f'foredraft:http_requests_total{{replica="front",route="{path}",status="200"}} 1.0' in metrics

    caplog.set_level(logging.DEBUG, "foredraft.server")
    run(llm, use)
    assert {record.levelname for record in caplog.records if record.message == "request"} == {"DEBUG"}


def test_health_checks_may_be_head_requests(llm: LLM) -> None:
    async def use(client: httpx2.AsyncClient, _: Local) -> None:
        statuses = [(await client.head(path)).status_code for path in ("/health", "/ready", "/metrics", "/version")]
        assert statuses == [200, 200, 200, 200]

    run(llm, use)


def test_the_key_and_the_limits_are_checked_in_front(llm: LLM) -> None:
    settings = ServerSettings(model_names=("pair",), api_key="secret", limits=RequestLimits(max_body_bytes=200))

    async def use(client: httpx2.AsyncClient, local: Local) -> None:
        key = {"Authorization": "Bearer secret"}
        assert (await client.post("/v1/completions", json=BODY)).status_code == 401
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.post("/v1/completions", json={"prompt": "x" * 500}, headers=key)).status_code == 413
        packed = {**key, "content-encoding": "gzip"}  # a header that is not forwarded
        assert (await client.post("/v1/completions", json=BODY, headers=packed)).status_code == 415
        assert not local.asked
        assert (await client.post("/v1/completions", json=BODY, headers=key)).status_code == 200
        assert (await client.get("/health")).status_code == (await client.get("/ready")).status_code == 200
        document = (await client.get("/openapi.json", headers=key)).json()
        assert document["components"]["securitySchemes"]

    run(llm, use, settings=settings)


def test_a_connection_to_the_front_has_the_limits_of_any_other() -> None:
    """The requests do not reach a replica, so none is needed."""
    listener = listen("127.0.0.1", 0)
    server = make_server(create_front(SETTINGS, None))  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        for begin, more, status in (
            (b"GET /", b"x", b"414"),
            (b"GET /health HTTP/1.1\r\nhost: x\r\nx: ", b"y", b"431"),
        ):
            with socket.create_connection(listener.getsockname(), timeout=20) as connection:
                connection.sendall(begin + more * 100_000)
                assert connection.recv(1000).startswith(b"HTTP/1.1 " + status)
    finally:
        server.end()
        thread.join(30)
    assert not thread.is_alive()


def test_a_full_queue_is_answered_429() -> None:
    pytest.importorskip("ray")
    from ray.serve._private.common import RequestMetadata
    from ray.serve.exceptions import BackPressureError
    from ray.serve.handle import DeploymentResponseGenerator

    def remote(_: ForwardedRequest) -> DeploymentResponseGenerator[Any]:
        """What Serve returns when its queue is full."""
        failed: Future[Any] = Future()
        failed.set_exception(BackPressureError(num_queued_requests=1, max_queued_requests=1))
        return DeploymentResponseGenerator(failed, RequestMetadata("request", "internal"))

    async def main() -> None:
        handle = SimpleNamespace(answer=SimpleNamespace(remote=remote))
        handle.options = lambda stream: handle
        transport = httpx2.ASGITransport(create_front(SETTINGS, Replicas(handle)))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.post("/v1/completions", json=BODY)
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
            assert answer.headers["retry-after"] == "1"

    asyncio.run(main())


def test_an_incomplete_body_is_not_forwarded(llm: LLM) -> None:
    async def use(client: httpx2.AsyncClient, local: Local) -> None:
        app: Any = client._transport.app  # type: ignore[attr-defined]
        sent: list[Message] = []
        unread: list[Message] = [
            {"type": "http.disconnect"},
            {"type": "http.request", "body": b'{"prompt": ', "more_body": True},
        ]

        async def receive() -> Message:
            return unread.pop()

        async def send(message: Message) -> None:
            sent.append(message)

        scope = ForwardedRequest("POST", "/v1/completions", b"", (), b"", "").scope()
        await app(scope, receive, send)
        assert not local.asked
        assert not sent

    run(llm, use)


def test_requests_to_replicas_that_do_not_answer_time_out(llm: LLM) -> None:
    class Silent(Local):
        async def answer(self, request: ForwardedRequest) -> AsyncGenerator[list[dict[str, Any]], None]:
            await asyncio.sleep(60)
            yield []

        async def reports(self) -> list[ReplicaReport]:
            return []

    async def main() -> None:
        settings = ServerSettings(limits=RequestLimits(request_seconds=0.05))
        app = create_front(settings, Silent(None))  # type: ignore[arg-type]
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost") as client:
            late = await client.post("/v1/completions", json=BODY)
            assert (late.status_code, late.json()["error"]["code"]) == (408, "timeout")
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/health")).status_code == 200
            app.state.service.drain()
            refused = await client.post("/v1/completions", json=BODY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")

    asyncio.run(main())


def test_a_stop_ends_running_requests_with_an_error(llm: LLM) -> None:
    async def use(client: httpx2.AsyncClient, local: Local) -> None:
        app: Any = client._transport.app  # type: ignore[attr-defined]
        post = asyncio.create_task(
            client.post("/v1/completions", json={**BODY, "max_tokens": 1500, "ignore_eos": True})
        )
        while not local.asked:
            await asyncio.sleep(0.01)
        await app.state.service.stop()
        answer = await post
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")

    run(llm, use)


def test_watchers_do_not_delay_draining(llm: LLM) -> None:
    async def use(client: httpx2.AsyncClient, local: Local) -> None:
        app: Any = client._transport.app  # type: ignore[attr-defined]
        watching = asyncio.create_task(client.get("/live/events"))
        writing = asyncio.create_task(client.post("/v1/completions", json=BODY))
        while len(local.asked) < 2:
            await asyncio.sleep(0.01)
        app.state.service.drain()
        async with asyncio.timeout(30):
            assert (await writing).status_code == 200
            await asyncio.wait({watching})

    run(llm, use)


def test_impossible_numbers_of_replicas_are_refused() -> None:
    with pytest.raises(ForedraftError, match="at least 1"):
        ClusterSettings(num_replicas=0)
    with pytest.raises(ForedraftError, match="max_replicas must be at least num_replicas"):
        ClusterSettings(num_replicas=3, max_replicas=2)


def test_a_replica_gets_the_client_and_the_request_id(llm: LLM) -> None:
    """Keys are not forwarded, but a replica must be fair among their clients."""
    seen: list[tuple[str, str]] = []
    prepare = llm.frontend.prepare

    def watched(*args: Any, **settings: Any) -> Any:
        seen.append((settings["client"], settings["request_id"]))
        return prepare(*args, **settings)

    async def use(client: httpx2.AsyncClient, _: Local) -> None:
        for key in ("b", "a"):
            headers = {"authorization": f"Bearer {key}", "x-request-id": f"mine-{key}"}
            answer = await client.post("/v1/completions", json=BODY, headers=headers)
            assert answer.headers.get_list("x-request-id") == [f"mine-{key}"]
            assert answer.json()["id"] == f"cmpl-mine-{key}"

    llm.frontend.prepare = watched  # type: ignore[method-assign]
    try:
        run(llm, use, settings=replace(SETTINGS, api_key=("a", "b")))
    finally:
        llm.frontend.prepare = prepare  # type: ignore[method-assign]
    assert seen == [("key-2", "mine-b"), ("key-1", "mine-a")]
