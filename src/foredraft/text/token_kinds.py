"""How a tokenizer decodes each of its tokens: as text, as one byte, or not at all."""

from __future__ import annotations

import re
from typing import Final, cast
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

TEXT, IGNORED = -1, -2
"""Kinds of token. A kind of 0 to 255 is a byte token of that value."""

REPLACEMENT: Final = "\ufffd"

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenKinds:
    """The kinds of one tokenizer's tokens. Each is determined by decoding the token once, and cached for all sequences.

    has_byte_fallback: one invalid byte in a run of byte tokens turns the whole run into U+FFFD, even valid characters.
    cleans_up: decode() removes spaces before punctuation from the whole text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool) -> None:
        self.skip_special_tokens = skip_special_tokens
        self.has_byte_fallback = _has_byte_fallback(tokenizer)
        self.cleans_up = _cleans_up(tokenizer)
        self._kinds: dict[int, int] = {}

    def kind(self, tokenizer: PreTrainedTokenizerBase, token_id: int) -> int:
        """TEXT, IGNORED, or the value of a byte token."""
        kind = self._kinds.get(token_id)
        if kind is None:
            kind = self._kinds[token_id] = self._find_kind(tokenizer, token_id)
        return kind

    def _find_kind(self, tokenizer: PreTrainedTokenizerBase, token_id: int) -> int:
        token = _token(tokenizer, token_id)
        if token is None:
            return IGNORED
        byte = _BYTE_TOKEN.fullmatch(token) if self.has_byte_fallback else None
        if byte:
            return int(byte[1], 16)
        shown, skipped = (tokenizer.decode([token_id], skip_special_tokens=skip) for skip in (False, True))
        return IGNORED if self.skip_special_tokens and shown and not skipped else TEXT


_CACHE: WeakKeyDictionary[PreTrainedTokenizerBase, dict[bool, TokenKinds]] = WeakKeyDictionary()


def token_kinds(tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool) -> TokenKinds:
    """The cached TokenKinds of this tokenizer. It holds no reference to the tokenizer, which can therefore be freed."""
    cached = _CACHE.setdefault(tokenizer, {})
    if skip_special_tokens not in cached:
        cached[skip_special_tokens] = TokenKinds(tokenizer, skip_special_tokens=skip_special_tokens)
    return cached[skip_special_tokens]


def _token(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str | None:
    """The token; None for an id beyond the vocabulary, since a model's logits are often padded."""
    try:
        return cast("str | None", tokenizer.convert_ids_to_tokens(token_id))
    except (IndexError, KeyError, OverflowError):
        return None


def _has_byte_fallback(tokenizer: PreTrainedTokenizerBase) -> bool:
    tokens = ["<0x41>", "<0xFF>"]
    ids = [cast("int | None", tokenizer.convert_tokens_to_ids(token)) for token in tokens]
    if any(i is None or _token(tokenizer, i) != token for i, token in zip(ids, tokens, strict=True)):
        return False
    return bool(tokenizer.decode(cast("list[int]", ids)) == 2 * REPLACEMENT)


def _cleans_up(tokenizer: PreTrainedTokenizerBase) -> bool:
    """transformers does not clean up the text of BPE tokenizers, unless they explicitly ask for it."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if type(getattr(backend, "model", None)).__name__ != "BPE":
        return True
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False))
