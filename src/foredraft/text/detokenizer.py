"""Decodes token ids to text, piece by piece."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import cast

from transformers import PreTrainedTokenizerBase

from foredraft.text.byte_fallback import ByteRun
from foredraft.text.token_kinds import IGNORED, REPLACEMENT, TEXT, token_kinds

_CONTEXT = (
    8  # tokens before the new one that are decoded with it: enough for any character and any effect of neighbours
)
_MAX_CONTEXT = 128  # the most tokens of a window that cannot be shortened (see _slide)
_MAX_PENDING = 3  # bytes of an unfinished UTF-8 character, each of which some decoders show as a U+FFFD
_CLEAN_UP_REACH = 8  # how far back clean_up_tokenization (" 've" -> "'ve", one rule after another) can change text


class IncrementalDecoder:
    """Decodes token ids, and releases text as soon as it can no longer change.

    The pieces returned by push, extend and flush, joined, equal `decode(prompt_ids + output)` from the first character
    at which it differs from `decode(prompt_ids)`. For a byte-level tokenizer and a prompt that ends with a whole
    character, that is `decode(output)`. There are two exceptions, both due to a limit: see `ByteRun` and `_slide`.

    Each token is decoded together with a few tokens before it (the window); the text after the cursor is new. The first
    _CONTEXT tokens of a window have been read before. They are kept because a token's text depends on its neighbours
    (leading spaces, word pieces, characters of several tokens). An unfinished character, a run of byte tokens and
    characters that clean_up_tokenization may still change are held back. O(1) per token.
    """

    __slots__ = (
        "_context",
        "_cursor",
        "_kinds",
        "_prompt_rest",
        "_run",
        "_text",
        "_tokenizer",
        "_unsettled",
        "_window",
    )

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._kinds = token_kinds(tokenizer, skip_special_tokens=skip_special_tokens)
        self._unsettled = _CLEAN_UP_REACH if self._kinds.cleans_up else 0  # characters at the end that may still change
        self._context = _CONTEXT + 2 * self._unsettled
        self._window: list[int] = []
        self._text = ""  # of the window
        self._cursor = 0  # characters of it that were released
        self._run: ByteRun | None = None
        self._extend(self._prompt_tail(prompt_ids, self._context))
        if not self._text.strip() and self._run is None:
            # Some decoders strip white space at both ends: take more of the prompt, to include other text.
            self._window, self._text, self._cursor = [], "", 0
            self._extend(self._prompt_tail(prompt_ids, _MAX_CONTEXT // 2))
        # The prompt may end with text that is held back: the output begins where the text differs from it.
        self._prompt_rest = self._rest()

    def push(self, token_id: int) -> str:
        """Read one token. -> the text that it made final: often the token's own, sometimes none"""
        return self._after_prompt(self._push(token_id))

    def extend(self, token_ids: Sequence[int]) -> str:
        """Like push for each token in turn, but decodes all of them at once where possible."""
        return self._after_prompt(self._extend(token_ids))

    def is_append_only(self, token_ids: Sequence[int]) -> bool:
        """Whether each of these tokens only adds to the text and the tail, so that they may be read together."""
        return not self._unsettled and all(self._kind(token_id) < 0 for token_id in token_ids)

    def flush(self) -> str:
        """The rest of the text when no token follows, as the tokenizer shows it; "" on a second call."""
        rest = self._after_prompt(self._rest())
        self._window, self._text, self._cursor, self._run = [], "", 0, None
        return rest

    @property
    def tail(self) -> str:
        """The whole characters that would follow the released text if the tokens ended here; they may still change."""
        return self._without_prompt(self._whole_characters())

    @property
    def unreleased(self) -> str:
        """The tail, and an unfinished character after it as U+FFFD."""
        if self._run is None or self._run.is_decided:
            return self._without_prompt(self._rest())
        return self.tail + (REPLACEMENT if self._run.pending else "")

    def clone(self) -> IncrementalDecoder:
        """An independent decoder in the same state."""
        twin = copy.copy(self)
        twin._window = self._window.copy()
        twin._run = copy.deepcopy(self._run)
        return twin

    def _push(self, token_id: int) -> str:
        kind = self._kind(token_id)
        if kind == TEXT:
            return self._read([token_id])
        return "" if kind == IGNORED else self._read_byte(token_id, kind)

    def _extend(self, token_ids: Sequence[int]) -> str:
        if not self.is_append_only(token_ids):
            return "".join([self._push(token_id) for token_id in token_ids])
        return self._read([token_id for token_id in token_ids if self._kind(token_id) != IGNORED])

    def _read(self, token_ids: list[int]) -> str:
        """Append tokens of kind TEXT."""
        piece = ""
        if not token_ids:
            return piece
        if self._run is not None:
            piece = self._run.end() if self._run.is_decided else ""
            self._run = None
        self._window += token_ids
        self._text = self._decode(self._window)
        piece += self._release(min(_without_pending(self._text), len(self._text) - self._unsettled))
        if len(self._window) > 2 * self._context:
            self._slide()
        return piece

    def _read_byte(self, token_id: int, byte: int) -> str:
        if self._run is None:
            self._run = ByteRun(len(self._window))
        if self._run.is_decided:
            return self._run.read(byte)
        self._window.append(token_id)
        if not self._run.append(byte):
            return self._blank(self._run)
        return self._release_run(self._run) if self._run.is_too_long else ""

    def _blank(self, run: ByteRun) -> str:
        run.decide(is_blank=True)
        self._text = self._decode(self._window)
        return self._release(len(self._text))

    def _release_run(self, run: ByteRun) -> str:
        """Release the characters of a run that is too long; its first byte stays in the window as context."""
        piece = self._whole_characters()
        del self._window[run.begin + 1 :]
        self._text = self._decode(self._window)
        self._cursor = len(self._text)
        run.decide(is_blank=False)
        return piece

    def _whole_characters(self) -> str:
        """The text after the cursor, without an unfinished character at its end."""
        if self._run is None:
            return self._text[self._cursor : _without_pending(self._text)]
        if self._run.is_decided:
            return ""
        whole = self._window[: len(self._window) - len(self._run.pending)]
        return self._decode(whole)[self._cursor :]

    def _release(self, end: int) -> str:
        """Move the cursor to `end`, never back. -> the text that it passed"""
        begin, self._cursor = self._cursor, max(self._cursor, end)
        return self._text[begin : self._cursor]

    def _slide(self) -> None:
        """Drop the old part of the window, provided that the rest still decodes to the same text at its end.

        It may not, for example if decode() strips white space and the rest contains nothing else. Such a window grows to at most
        _MAX_CONTEXT tokens. With such a decoder, part of a longer stretch of white space is lost.
        """
        window = self._window[-self._context :]
        text = self._decode(window)
        num_waiting = len(self._text) - self._cursor
        must_agree = num_waiting + 1
        agrees = len(text) >= must_agree and text[-must_agree:] == self._text[-must_agree:]
        if agrees or len(self._window) > _MAX_CONTEXT:
            self._window, self._text, self._cursor = window, text, max(0, len(text) - num_waiting)

    def _rest(self) -> str:
        if self._run is None:
            return self._text[self._cursor :]
        return self._run.end() if self._run.is_decided else self._decode(self._window)[self._cursor :]

    def _after_prompt(self, piece: str) -> str:
        if not self._prompt_rest or not piece:
            return piece
        num_same = common_prefix_len(piece, self._prompt_rest)
        self._prompt_rest = self._prompt_rest[num_same:] if num_same == len(piece) else ""
        return piece[num_same:]

    def _without_prompt(self, text: str) -> str:
        """Text after the cursor, without what the prompt ends with."""
        return text[common_prefix_len(text, self._prompt_rest) :] if self._prompt_rest else text

    def _prompt_tail(self, prompt_ids: Sequence[int], size: int) -> list[int]:
        """The last tokens of the prompt, at least `size` if it has as many. The tail does not begin inside a run of byte tokens,
        part of which may decode to different text, unless the tail would exceed _MAX_CONTEXT tokens."""
        tail: list[int] = []
        for token_id in reversed(prompt_ids):
            if self._kind(token_id) == IGNORED:
                continue
            if len(tail) >= size and (self._kind(tail[-1]) < 0 or len(tail) >= _MAX_CONTEXT):
                break
            tail.append(token_id)
        if len(tail) >= _MAX_CONTEXT:
            while tail and 0x80 <= self._kind(tail[-1]) < 0xC0:
                tail.pop()  # a continuation byte of a character that begins before the tail
        return tail[::-1]

    def _kind(self, token_id: int) -> int:
        return self._kinds.kind(self._tokenizer, token_id)

    def _decode(self, token_ids: list[int]) -> str:
        skip = self._kinds.skip_special_tokens
        return cast(str, self._tokenizer.decode(token_ids, skip_special_tokens=skip))


def _without_pending(text: str) -> int:
    """The length of text without the U+FFFD at its end that further bytes may turn into a character."""
    end, floor = len(text), max(0, len(text) - _MAX_PENDING)
    while end > floor and text[end - 1] == REPLACEMENT:
        end -= 1
    return end


def common_prefix_len(a: str, b: str) -> int:
    """The number of characters in the common prefix."""
    if a == b:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
