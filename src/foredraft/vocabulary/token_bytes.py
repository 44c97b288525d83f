"""The bytes of single tokens, without reading the whole vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from transformers import PreTrainedTokenizerBase

from foredraft.errors import VocabularyError
from foredraft.vocabulary.surface import surface_of


class TokenBytes:
    """The bytes that the tokens of a tokenizer stand for, by id. None for a tokenizer whose tokens do not stand for bytes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._to_bytes: Callable[[str], bytes] | None = None
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            try:
                self._to_bytes = surface_of(backend)
            except VocabularyError:
                return

    def of(self, token_id: int) -> bytes | None:
        if self._to_bytes is None or not 0 <= token_id < len(self._tokenizer):
            return None
        return self._to_bytes(cast(str, self._tokenizer.convert_ids_to_tokens(token_id)))
