"""Servers on a socket, with the embedded pair."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from foredraft import LLM
from foredraft.server import ServerSettings, create_app
from foredraft.server.http_server import Server, listen, make_server
from foredraft.server.service import Service
from foredraft.server.tls import TlsFiles

TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool.function.name }}</tool>\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SETTINGS = ServerSettings(model_names=("pair", "other-name"), chat_template=TEMPLATE)

TRUST = ssl.create_default_context()
"""Made only once, since it takes 50 ms."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the Schemathesis file where slow tests are excluded: collecting it makes its cases, ten seconds in each process."""
    is_left_out = config.getoption("markexpr") == "not slow" and collection_path.name == "test_documented_answers.py"
    return True if is_left_out else None


@dataclass
class Running:
    """A running server, in a thread of its own."""

    url: str
    app: FastAPI
    server: Server
    thread: threading.Thread

    @property
    def service(self) -> Service:
        service: Service = self.app.state.service
        return service

    @property
    def llm(self) -> LLM:
        return self.service.engine.llm

    def post(self, path: str, body: Any, **settings: Any) -> httpx2.Response:
        return httpx2.post(self.url + path, json=body, timeout=60, verify=TRUST, **settings)

    def post_raw(self, path: str, content: Any, **settings: Any) -> httpx2.Response:
        """Send a body unchanged: bytes, or an iterator of them."""
        return httpx2.post(self.url + path, content=content, timeout=60, verify=TRUST, **settings)

    def get(self, path: str, **settings: Any) -> httpx2.Response:
        return httpx2.get(self.url + path, timeout=60, verify=TRUST, **settings)

    def wait_until_idle(self) -> None:
        """Wait until nothing runs, and assert that all memory is back."""
        wait_for(lambda: not self.llm.engine.has_work and self.service.num_texts == 0)
        assert self.llm.engine.pool.used == self.llm.engine.pool.bytes_retained


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120  # much longer than needed, since the machine may be busy
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


@contextmanager
def running(llm: LLM, settings: ServerSettings = SETTINGS, tls: TlsFiles | None = None) -> Iterator[Running]:
    """Run a server. An engine has only one server; a second server gets its own engine with the same models."""
    own = llm.with_drafter() if llm.engine.in_use.locked() else llm
    app = create_app(settings, lambda: own)
    listener = listen("127.0.0.1", 0)
    server = make_server(app, tls=tls)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    port = listener.getsockname()[1]
    scheme = "http" if tls is None else "https"
    try:
        yield Running(f"{scheme}://127.0.0.1:{port}", app, server, thread)
    finally:  # after a failed test too: the next one uses the same engine
        if not server.should_exit:
            server.end()
        thread.join(30)
    assert not thread.is_alive()


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM(seed=0)


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Running]:
    with running(llm) as found:
        yield found
