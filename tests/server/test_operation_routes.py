"""The routes for operating the server."""

from __future__ import annotations

import httpx2
import pytest

from tests.server.conftest import Running


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics"])
def test_they_answer_head_requests_without_a_body(server: Running, path: str) -> None:
    answer = httpx2.head(server.url + path, timeout=60)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"] == server.get(path).headers["content-type"]
