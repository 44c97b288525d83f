"""The bytes that a token of a vocabulary stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from foredraft.errors import VocabularyError

Component = dict[str, Any] | None
"""A normalizer, pre-tokenizer or decoder of `tokenizers`, as in its file."""

SPACE = "\u2581"
"""SentencePiece's symbol for a space."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ADDS_SPACES = frozenset(("WordPiece", "BPEDecoder", "CTC"))


def component_of(part: Any) -> Component:
    """part: a part of a `tokenizers.Tokenizer`, or None"""
    return None if part is None else json.loads(part.__getstate__())


def kinds_in(component: Component) -> Iterator[str]:
    """The types of a component and of its parts, if it is a sequence."""
    if component is not None:
        yield component["type"]
        for name in ("normalizers", "pretokenizers", "decoders"):
            for part in component.get(name, ()):
                yield from kinds_in(part)


def byte_token(token: str) -> int | None:
    """The value of a byte token of a byte-fallback vocabulary, such as <0x0A>; None for any other token."""
    found = _BYTE_TOKEN.fullmatch(token)
    return int(found[1], 16) if found else None


def surface_of(backend: Any) -> Callable[[str], bytes]:
    """A function from a token, as the vocabulary spells it, to its bytes: for byte-level BPE, SentencePiece with or without byte tokens,
    and plain text. backend: a `tokenizers.Tokenizer`.

    Raises VocabularyError for a vocabulary whose texts are not the concatenated bytes of their tokens.
    """
    parts = [component_of(part) for part in (backend.normalizer, backend.pre_tokenizer, backend.decoder)]
    kinds = {kind for part in parts for kind in kinds_in(part)}
    if "ByteLevel" in kinds:
        return byte_level_bytes
    model = backend.model
    affixes = (getattr(model, "continuing_subword_prefix", None), getattr(model, "end_of_word_suffix", None))
    if kinds & _ADDS_SPACES or any(affixes):
        raise VocabularyError("its decoder puts spaces between words, so tokens do not stand for bytes")
    marks_spaces = "Metaspace" in kinds or any(SPACE in json.dumps(part, ensure_ascii=False) for part in parts if part)
    has_byte_tokens = "ByteFallback" in kinds or bool(getattr(model, "byte_fallback", False))

    def bytes_of(token: str) -> bytes:
        value = byte_token(token) if has_byte_tokens else None
        if value is not None:
            return bytes([value])
        return (token.replace(SPACE, " ") if marks_spaces else token).encode()

    return bytes_of


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a token in GPT-2's spelling, which has one character per byte; any other token is plain text."""
    table = _byte_level_table()
    try:
        return bytes(table[char] for char in token)
    except KeyError:
        return token.encode()


@cache
def _byte_level_table() -> dict[str, int]:
    """GPT-2's characters for bytes: printable bytes stand for themselves, the others follow from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
