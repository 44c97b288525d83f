"""API keys, Host headers and origins."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import openai
import pytest

from foredraft import LLM, ForedraftError
from foredraft.server import ServerSettings
from foredraft.server.auth import LOOPBACK_HOSTS, host_name
from tests.server.conftest import Running, running

KEY = "a key with ümlauts"
GUARDED = ("/v1/models", "/v1/models/foredraft", "/metrics", "/version", "/openapi.json", "/nothing")


@pytest.fixture(scope="module")
def guarded(llm: LLM) -> Iterator[Running]:
    with running(llm, ServerSettings(api_key=KEY)) as found:
        yield found


@pytest.fixture(scope="module")
def local(llm: LLM, guarded: Running) -> Iterator[Running]:
    """A server without a key, for this machine only."""
    guarded.server.end()
    guarded.thread.join(30)
    with running(llm, ServerSettings(allowed_hosts=LOOPBACK_HOSTS)) as found:
        yield found


@pytest.mark.parametrize("path", GUARDED)
def test_requests_without_a_valid_key_are_refused(guarded: Running, path: str) -> None:
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {KEY}".encode()},
        {"authorization": KEY.encode()},
        {"authorization": "Bearer"},
        {"authorization": b"Bearer \xff\xfe"},
    ):
        answer = guarded.get(path, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"


def test_the_body_of_an_unauthorized_request_is_not_read(guarded: Running) -> None:
    assert guarded.post("/v1/completions", {"prompt": "x" * 10_000_000}).status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_health_checks_need_no_key(guarded: Running, path: str) -> None:
    assert guarded.get(path).status_code == 200


def test_requests_with_the_key_are_accepted(guarded: Running) -> None:
    headers = {"authorization": f"Bearer {KEY}".encode()}
    assert guarded.get("/v1/models", headers=headers).status_code == 200
    assert guarded.get("/metrics", headers=headers).status_code == 200


def test_the_openai_client_reports_a_wrong_key(guarded: Running) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_requests_with_other_host_names_are_refused(local: Running) -> None:
    """A page of another site may let its own name resolve to this machine, but it cannot change the Host header."""
    assert local.get("/v1/models").status_code == 200
    assert local.get("/v1/models", headers={"host": "localhost:9"}).status_code == 200
    for host in ("evil.example", "evil.example:8000", "", "127.0.0.1.evil.example"):
        answer = local.get("/v1/models", headers={"host": host})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "wrong_host"


def test_each_of_several_keys_is_accepted(llm: LLM) -> None:
    keys = ("first", "second", "first")
    settings = ServerSettings(api_key=keys)
    assert settings.api_keys == ("first", "second")
    assert "first" not in repr(settings)
    with running(llm, settings) as server:
        for key, status in (("first", 200), ("second", 200), ("firs", 401), ("firstsecond", 401)):
            assert server.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == status


@pytest.mark.parametrize("keys", ["", (), ("good", "")])
def test_an_empty_key_is_refused(keys: str | tuple[str, ...]) -> None:
    with pytest.raises(ForedraftError, match="the API key is empty"):
        ServerSettings(api_key=keys)


def test_only_allowed_origins_may_read_answers(llm: LLM, server: Running) -> None:
    origin = "https://app.example:8443"
    preflight = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    assert "access-control-allow-origin" not in server.get("/health", headers={"origin": origin}).headers
    with running(llm, ServerSettings(api_key=KEY, allowed_origins=(origin,))) as open_to_one:
        asked = httpx2.options(open_to_one.url + "/v1/completions", headers=preflight)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == origin
        assert "x-a" in asked.headers["access-control-allow-headers"]
        for headers, status in (({"authorization": f"Bearer {KEY}".encode()}, 200), ({}, 401)):
            answer = open_to_one.get("/v1/models", headers={"origin": origin, **headers})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == origin
            assert "access-control-allow-credentials" not in answer.headers
            exposed = set(answer.headers["access-control-expose-headers"].split(", "))
            assert exposed == {"X-Request-Id", "X-Foredraft-Ignored", "Retry-After"}
        other = httpx2.options(
            open_to_one.url + "/v1/completions", headers={**preflight, "origin": "https://evil.example"}
        )
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("origin", ["example.com", "https://example.com/", "https://Example.com", "", "https://"])
def test_invalid_origins_are_refused(origin: str) -> None:
    with pytest.raises(ForedraftError, match="is not an origin"):
        ServerSettings(allowed_origins=(origin,))


def test_host_names_are_normalised() -> None:
    assert host_name("[::1]:80") == "::1"
    assert host_name("LOCALHOST:80") == "localhost"
    assert host_name("") == ""
