"""Convert a tokenizer's ids to bytes and bytes to its ids, without decode(), which strips, cleans up and replaces text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import cast
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from foredraft.errors import VocabularyError
from foredraft.vocabulary.encoder import encoder_of
from foredraft.vocabulary.surface import byte_token, surface_of

_ROLES = ("bos_token_id", "eos_token_id")
_ESCAPED = re.compile("([\udc80-\udcff]+)")


class ByteVocabulary:
    """The bytes that the ids of a tokenizer stand for.

    bytes_of: by id; None for special tokens, which stand for no text. special: the text of each special token, by id. roles: ids of
    special tokens by role, such as "eos_token_id". prefix_ids: the ids that the tokenizer puts before a text. prefix_space: b" " if it
    puts a space before a text, else b"".

    Raises VocabularyError for a tokenizer whose tokens do not stand for bytes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise VocabularyError(
                f"{type(tokenizer).__name__} is written in Python, but only those based on `tokenizers` can be read as bytes"
            )
        self.num_tokens = len(tokenizer)
        to_bytes, added = surface_of(backend), backend.get_added_tokens_decoder()
        tokens = cast("dict[str, int]", backend.get_vocab(True))
        self.special = {index: token.content for index, token in added.items() if token.special}
        if tokenizer.unk_token_id is not None:
            self.special.setdefault(cast(int, tokenizer.unk_token_id), str(tokenizer.unk_token))
        self.bytes_of: list[bytes | None] = [None] * (max(tokens.values(), default=-1) + 1)
        for token, index in tokens.items():
            if index not in self.special:
                self.bytes_of[index] = to_bytes(token)
        self._encoder = encoder_of(backend)
        self.single_byte_ids = self._find_single_byte_ids(tokens)
        self.roles: dict[str, int] = {
            name: found for name in _ROLES if (found := getattr(tokenizer, name, None)) is not None
        }
        self.prefix_ids, self.prefix_space = self._prefixes(tokenizer)

    def __len__(self) -> int:
        return len(self.bytes_of)

    def encode(self, text: str) -> list[int]:
        """The ids of the text, without special tokens."""
        return self._encoder.encode(text, add_special_tokens=False).ids

    def write(self, data: bytes) -> list[int]:
        """Ids whose concatenated bytes are `data`, or the longest prefix of it that is found. The prefix ends before anything that this
        vocabulary has no ids for, and before bytes that are not a character."""
        rest = data.lstrip(_CONTINUATION)
        num_single = len(data) - len(rest)
        ids = [self.single_byte_ids.get(byte, -1) for byte in data[:num_single]]
        if -1 in ids:
            return ids[: ids.index(-1)]
        ids += self.encode(rest[: num_whole(rest)].decode())
        end = 0
        for count, index in enumerate(ids):
            part = self.bytes_of[index]
            if part is None or not data.startswith(part, end):
                return ids[:count]
            end += len(part)
        return ids

    def spell(self, data: bytes) -> tuple[list[int], list[int]]:
        """Ids for all of `data`, and the offset at which the bytes of each id end. Text that the vocabulary has no ids for is encoded as
        its tokenizer does, by an unknown token or none; then the ids of that run all have the end of the run."""
        ids, ends, start = list[int](), list[int](), 0
        for run in _ESCAPED.split(data.decode(errors="surrogateescape")):
            if not run:
                continue
            if _ESCAPED.fullmatch(run):
                size = len(run)
                found = [
                    self.single_byte_ids[byte]
                    for byte in run.encode(errors="surrogateescape")
                    if byte in self.single_byte_ids
                ]
            else:
                size, found = len(run.encode()), self.encode(run)
            ids += found
            ends += self._ends(found, start, start + size)
            start += size
        return ids, ends

    def joined(self, ids: Sequence[int]) -> bytes:
        """The bytes of these ids, without special tokens."""
        return b"".join(part for index in ids if index < len(self) and (part := self.bytes_of[index]) is not None)

    def _ends(self, ids: Sequence[int], start: int, end: int) -> list[int]:
        sizes = [len(self.bytes_of[index] or b"") for index in ids]
        return [*accumulate(sizes, initial=start)][1:] if start + sum(sizes) == end else [end] * len(ids)

    def _find_single_byte_ids(self, tokens: dict[str, int]) -> dict[int, int]:
        """The id of each byte: those of the byte tokens if all 256 exist."""
        by_token = {value: index for token, index in tokens.items() if (value := byte_token(token)) is not None}
        if len(by_token) == 256:
            return by_token
        return {part[0]: index for index, part in enumerate(self.bytes_of) if part is not None and len(part) == 1}

    def _prefixes(self, tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], bytes]:
        ids = cast("list[int]", tokenizer("a")["input_ids"])
        num_special = next((i for i, index in enumerate(ids) if index not in self.special), 0)
        bare = cast("list[int]", tokenizer("a", add_special_tokens=False)["input_ids"])
        return tuple(ids[:num_special]), b" " if self.joined(bare) == b" a" else b""


_CACHE: WeakKeyDictionary[PreTrainedTokenizerBase, ByteVocabulary] = WeakKeyDictionary()


def byte_vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> ByteVocabulary:
    """The ByteVocabulary of a tokenizer, made once, and again if tokens were added. It does not keep the tokenizer alive. Raises
    VocabularyError as ByteVocabulary does."""
    known = _CACHE.get(tokenizer)
    if known is None or known.num_tokens != len(tokenizer):
        known = _CACHE[tokenizer] = ByteVocabulary(tokenizer)
    return known


_CONTINUATION = bytes(range(0x80, 0xC0))
"""UTF-8 continuation bytes."""


def num_whole(data: bytes) -> int:
    """How many bytes at the beginning are whole characters."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(data)


def num_pending(data: bytes) -> int:
    """How many bytes at the end are the beginning of a character that may still be completed: 0 to 3."""
    for size in range(1, min(4, len(data) + 1)):
        try:
            data[len(data) - size :].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return size
    return 0
