"""A parser's buffers are bounded, and what RFC 9112 calls an error is refused."""

from __future__ import annotations

import h11
import pytest

from foredraft.server import RequestLimits
from foredraft.server.http.parser import Parser

PIECE = 4096
LIMITS = RequestLimits(max_body_bytes=10_000)
HEAD = b"POST /tokenize HTTP/1.1\r\nhost: x\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


def read(data: bytes, parser: Parser | None = None) -> tuple[Parser, list[object]]:
    """The parser and all its events; asserts after every piece that its buffer is bounded."""
    parser = parser or Parser(LIMITS)
    events: list[object] = []
    for start in range(0, len(data), PIECE):
        parser.receive_data(data[start : start + PIECE])
        while (event := parser.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            events.append(event)
        if parser.error is not None:
            break
        assert len(parser.trailing_data[0]) <= LIMITS.max_header_bytes + PIECE
    return parser, events


def refused(data: bytes) -> tuple[int, str]:
    parser, _ = read(data)
    assert parser.error is not None
    assert parser.next_event() is h11.NEED_DATA
    return parser.error.status_code, parser.error.detail


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /" + b"x" * 10_000_000, 414),
        (b"GET /" + b"x" * 9_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414),
        (b"X" * 9_000, 414),
        (HEAD + b"x: " + b"y" * 10_000_000, 431),
        (HEAD + b"x: y\r\n" * 1_000_000, 431),
        (HEAD + b"x: y\r\n" * 100 + b"\r\n", 431),
        (HEAD + b"x: " + b"y" * 32_760 + b"\r\n\r\n", 431),
        (CHUNKED + b"1;" + b"e" * 1_000_000, 431),
        (CHUNKED + (b"1;" + b"e" * 1000 + b"\r\nx\r\n") * 1000, 413),
        (CHUNKED + b"1\r\nx\r\n" * 5000, 413),
        (CHUNKED + b"0\r\n" + b"x: y\r\n" * 101 + b"\r\n", 431),
        (CHUNKED + b"0\r\nx: " + b"y" * 1_000_000, 431),
    ],
    ids=lambda value: str(value)[:50],
)
def test_everything_buffered_is_bounded(data: bytes, status: int) -> None:
    assert refused(data)[0] == status


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", "multiple Host"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nHost: a\r\n\r\n", "multiple Host"),
        (b"GET / HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n", "multiple Host"),
        (b"GET / HTTP/1.1\r\n\r\n", "mandatory Host"),
        (HEAD + b"content-length: 3\r\ncontent-length: 4\r\n\r\n", "conflicting Content-Length"),
        (HEAD + b"content-length: 3, 4\r\n\r\n", "conflicting Content-Length"),
        (HEAD + b"content-length: -3\r\n\r\n", "bad Content-Length"),
        (HEAD + b"content-length: +3\r\n\r\n", "bad Content-Length"),
        (HEAD + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n", "contradict"),
        (HEAD + b"content-length : 3\r\n\r\n", "illegal header line"),
        (HEAD + b"x: a\x00b\r\n\r\n", "illegal header line"),
        (HEAD + b"no colon\r\n\r\n", "illegal header line"),
        (b"GET /a b HTTP/1.1\r\nhost: x\r\n\r\n", "request line"),
        (b"GET ftp://x/ HTTP/1.1\r\nhost: x\r\n\r\n", "target"),
        (b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", "target"),
        (CHUNKED + b"zz\r\n", "chunk header"),
        (CHUNKED + b"1\r\nxxxx\r\n", "chunk"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_ambiguous_requests_are_refused(head: bytes, words: str) -> None:
    status, message = refused(head)
    assert status == 400
    assert words in message


def test_unsupported_codings_and_versions_are_refused() -> None:
    assert refused(HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n")[0] == 501
    assert refused(b"GET / HTTP/2.0\r\nhost: x\r\n\r\n")[0] == 505
    assert refused(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")[0] == 505


def test_empty_lines_between_requests_are_ignored() -> None:
    parser, events = read(b"\r\n" * 20_000)
    assert events == []
    assert not parser.has_partial
    _, events = read(b"\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\n\r\n", parser)
    assert isinstance(events[0], h11.Request)
    assert not parser.has_partial
    assert parser.error is None


def test_a_folded_header_is_one_value_with_a_space() -> None:
    """RFC 9112, 5.2: refuse it, or do this."""
    _, events = read(b"GET / HTTP/1.1\r\nhost: x\r\nx: a\r\n  b\r\n\r\n")
    assert isinstance(events[0], h11.Request)
    assert (b"x", b"a b") in list(events[0].headers)


def test_requests_within_the_limits_are_read() -> None:
    target = b"/" + b"x" * 8000
    fields = b"".join(b"x-%d: %s\r\n" % (i, b"y" * 200) for i in range(98))
    body = b"".join(b"%x;name=value\r\n%s\r\n" % (n, b"z" * n) for n in (1, 5000, 4000))
    trailers = b"0\r\nchecksum: 1\r\n\r\n"
    data = (
        b"POST "
        + target
        + b" HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
        + fields
        + b"\r\n"
        + body
        + trailers
    )
    parser, events = read(data)
    assert parser.error is None
    assert isinstance(events[0], h11.Request)
    assert events[0].target == target
    assert sum(len(event.data) for event in events if isinstance(event, h11.Data)) == 9001
    assert isinstance(events[-1], h11.EndOfMessage)


@pytest.mark.parametrize(
    ("target", "path"),
    [(b"http://there:1/a?b=c", b"/a?b=c"), (b"http://there:1", b"/"), (b"HTTPS://there:1/a", b"/a")],
)
def test_the_host_of_an_absolute_target_overrides_the_header(target: bytes, path: bytes) -> None:
    _, events = read(b"GET " + target + b" HTTP/1.1\r\nhost: elsewhere\r\n\r\n")
    assert isinstance(events[0], h11.Request)
    assert events[0].target == path
    assert [value for name, value in events[0].headers if name == b"host"] == [b"there:1"]


def test_limits_apply_to_each_request_separately() -> None:
    parser = Parser(LIMITS)
    for _ in range(5):
        _, events = read(HEAD + b"content-length: 9000\r\n\r\n" + b"x" * 9000, parser)
        assert isinstance(events[-1], h11.EndOfMessage)
        parser.send(h11.Response(status_code=204, headers=[]))
        parser.send(h11.EndOfMessage())
        parser.start_next_cycle()
    assert parser.error is None
