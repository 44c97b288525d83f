"""A client that uses little of the machine it shares with the server: plain sockets, and no parsing before the end."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Answer:
    """seconds: from the request to the last byte. first_seconds: to the first chunk of a stream. is_cut: the client disconnected."""

    status: int
    texts: list[str]
    num_tokens: int
    seconds: float
    first_seconds: float | None
    is_cut: bool
    is_complete: bool


async def ask(url: str, body: dict[str, Any], *, cut_after: int | None = None) -> Answer:
    """POST /v1/completions. cut_after: close the connection after so many chunks of the response."""
    place = urlsplit(url)
    raw = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {place.netloc}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    started, first, pieces = time.perf_counter(), None, []
    is_cut = False
    try:
        writer.write(head.encode() + raw)
        while piece := await reader.read(1 << 16):
            if first is None and b"data: " in piece:
                first = time.perf_counter() - started
            pieces.append(piece)
            if cut_after is not None and len(pieces) > cut_after:
                is_cut = True
                break
    finally:
        writer.close()
    seconds = time.perf_counter() - started
    return _read(b"".join(pieces), seconds, first, is_cut=is_cut)


def _read(raw: bytes, seconds: float, first: float | None, *, is_cut: bool) -> Answer:
    head, _, body = raw.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1]) if head else 0
    if b"transfer-encoding: chunked" in head.lower():
        body = _dechunked(body)
    if is_cut or status != 200:
        return Answer(status, [], 0, seconds, first, is_cut, False)
    if b"text/event-stream" not in head:
        result = json.loads(body)
        texts = [choice["text"] for choice in result["choices"]]
        return Answer(status, texts, result["usage"]["completion_tokens"], seconds, None, False, True)
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]
    is_complete = bool(events) and events[-1] == b"[DONE]"
    texts, num_tokens = [""], 0
    for event in events:
        if event == b"[DONE]":
            continue
        result = json.loads(event)
        is_complete &= "error" not in result
        for choice in result.get("choices", []):
            texts[0] += choice["text"]
        if result.get("usage"):
            num_tokens = result["usage"]["completion_tokens"]
    return Answer(status, texts, num_tokens, seconds, first, False, is_complete)


def _dechunked(body: bytes) -> bytes:
    result, place = [], 0
    while place < len(body):
        end = body.find(b"\r\n", place)
        size = int(body[place:end], 16) if end > place else 0
        if size == 0:
            break
        result.append(body[end + 2 : end + 2 + size])
        place = end + 2 + size + 2
    return b"".join(result)
