"""Identifies the vocabulary that the ids of a message belong to."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_PADDING = 512


class VocabularyIdentity(NamedTuple):
    """size: the width of the model's logits, padding included. digest: of the tokenizer's tokens, 16 bytes; empty without a tokenizer."""

    size: int
    digest: bytes = b""

    @classmethod
    def of(cls, size: int, tokenizer: PreTrainedTokenizerBase | None) -> VocabularyIdentity:
        if tokenizer is None:
            return cls(size)
        digest = blake2b(digest_size=16)
        for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
            digest.update(f"{token_id} {len(token)} {token}\n".encode(errors="surrogatepass"))
        return cls(size, digest.digest())

    def agrees_with(self, other: VocabularyIdentity) -> bool:
        """Compare the digests if both have one; otherwise the sizes, which may differ by the padding of logits."""
        if self.digest and other.digest:
            return self.digest == other.digest
        return abs(self.size - other.size) <= _MOST_PADDING
