"""The key that a target's process and a draft server share, and the CurveZMQ key pairs that both derive from it."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from foredraft.errors import ForedraftError

VARIABLE = "FOREDRAFT_DRAFT_KEY"
_SHORTEST = 16


class KeyPair(NamedTuple):
    """The keys of one end, in Z85 as zmq takes them."""

    public: bytes
    secret: bytes


class KeyPairs(NamedTuple):
    server: KeyPair
    client: KeyPair

    @classmethod
    def of(cls, key: bytes) -> KeyPairs:
        """Without the shared key, neither end's public key is known: a server accepts only clients that have the key, and vice versa."""
        return cls(_derived(key, b"foredraft-server"), _derived(key, b"foredraft-client"))


def read_key(file: str | os.PathLike[str] | None) -> bytes:
    """The key in the file, or in the environment if file is None. Raises ForedraftError if there is none, or it is too short."""
    key = os.environ.get(VARIABLE, "").strip().encode() if file is None else _read(Path(file))
    where = VARIABLE if file is None else os.fspath(file)
    if not key:
        raise ForedraftError(
            f"{where} holds no key: remote drafts need the same key on both sides; generate one with `openssl rand -hex 32`"
        )
    if len(key) < _SHORTEST:
        raise ForedraftError(
            f"the key in {where} has {len(key)} characters: give at least {_SHORTEST}; generate a key with `openssl rand -hex 32`"
        )
    return key


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes().strip()
    except OSError as error:
        raise ForedraftError(f"{file}: cannot be read: {error.strerror}") from None


def _derived(key: bytes, end: bytes) -> KeyPair:
    """end: the name of the end whose pair this is, at most 16 bytes"""
    import zmq
    from zmq.utils import z85

    secret = z85.encode(blake2b(key, digest_size=32, person=end).digest())
    return KeyPair(zmq.curve_public(secret), secret)
