"""Draft servers for tests, in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from foredraft.draft_server import DraftServer
from foredraft.drafters import RemoteDrafter, SuffixDrafter
from foredraft.engine.proposal import Drafter
from foredraft.remote import Connection, DraftServerAccess, Listener, Patience, VocabularyIdentity
from foredraft.remote.sockets import Caller

KEY = b"0123456789abcdef0123456789abcdef"
PATIENT = 30.0


@contextmanager
def serving(
    drafter: Drafter,
    vocabulary: VocabularyIdentity | None = None,
    *,
    key: bytes = KEY,
    address: str = "tcp://127.0.0.1:0",
) -> Iterator[DraftServer]:
    server = DraftServer(drafter, Listener(address, key), vocabulary)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(10)


def start(drafter: Drafter) -> str:
    """Start a server that runs as long as this process, and return its address."""
    server = DraftServer(drafter, Listener("tcp://127.0.0.1:0", KEY))
    threading.Thread(target=server.run, daemon=True).start()
    return server.address


@cache
def suffix_server() -> str:
    return start(SuffixDrafter())


@cache
def key_file() -> Path:
    file = Path(mkdtemp()) / "key"
    file.write_bytes(KEY)
    return file


def connect(address: str, vocab_size: int, key: bytes = KEY) -> Connection:
    connection = Connection(Caller(address, key), address, VocabularyIdentity(vocab_size))
    connection.greet(PATIENT)
    return connection


def remote(address: str, vocab_size: int, patience: Patience | None = None) -> RemoteDrafter:
    """A remote drafter that waits for its drafts however long a pass takes, unless it is given another patience."""
    return RemoteDrafter(connect(address, vocab_size), patience or Patience(PATIENT, PATIENT), vocab_size)


def remote_settings(method: str) -> dict[str, Any]:
    """The arguments of LLM that the method needs."""
    if method != "remote":
        return {}
    return {"draft_server": {"address": suffix_server(), "key_file": str(key_file())}}


def remote_context(method: str, vocab_size: int) -> dict[str, Any]:
    """The arguments of DrafterContext that the method needs."""
    if method != "remote":
        return {}
    access = DraftServerAccess(suffix_server(), key_file())
    return {"draft_server": access, "vocabulary": VocabularyIdentity(vocab_size)}
