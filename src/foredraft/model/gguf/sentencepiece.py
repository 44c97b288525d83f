"""The tokenizer of a SentencePiece vocabulary, whose file has scores but no merges.

It is the library's own (transformers.integrations.gguf), with merges that take a fraction of the time and memory: those of Gemma's
vocabulary of 262,144 take most of the time to load its file.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_SPACE = "\u2581"
_GEMMAS = ("gemma", "gemma2", "gemma3")
_PHI3 = "phi3"

Ids = npt.NDArray[np.int64]


def sentencepiece_backend(architecture: str, fields: dict[str, Any]) -> Any:
    """A `tokenizers.Tokenizer`. fields: the file's tokens, scores and token_type."""
    from transformers import GemmaTokenizer, LlamaTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import add_gguf_special_tokens

    tokens, scores = fields["tokens"], fields["scores"]
    if architecture in _GEMMAS:
        # the file has plain runs of spaces, and the order of the merges is that of the ids, not of the scores
        tokens = [_SPACE * len(token) if " " in token and not token.strip() else token for token in tokens]
        scores = range(0, -len(tokens), -1)
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer_class = GemmaTokenizer if architecture in _GEMMAS else LlamaTokenizer
    tokenizer = tokenizer_class(vocab=vocab, merges=merges_of(vocab, tokens, scores))
    if architecture == _PHI3:
        _prefix_by_normalizer(tokenizer.backend_tokenizer)
    return add_gguf_special_tokens(tokenizer, fields).backend_tokenizer


def merges_of(vocab: Mapping[str, int], tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a token from two others: the tokens with the highest scores first, and for each token the longest first part.

    vocab: the id of each token. tokens, scores: by id.
    """
    wholes, firsts, rests = _splits(vocab)
    ranks, lengths = np.asarray(scores, np.float64), np.array([len(token) for token in tokens])
    order = np.lexsort((-lengths[rests], -lengths[firsts], -ranks[wholes]))
    # the strings of the vocabulary itself: new ones would take four times the memory
    return [(tokens[a], tokens[b]) for a, b in zip(firsts[order].tolist(), rests[order].tolist(), strict=True)]


def _splits(vocab: Mapping[str, int]) -> tuple[Ids, Ids, Ids]:
    """For every way to make a token from two others: the token's id, and the ids of both parts."""
    ids = array("q")
    id_of, keep = vocab.get, ids.extend
    for token, whole in vocab.items():
        for end in range(1, len(token)):
            first = id_of(token[:end])
            if first is None:
                continue
            rest = id_of(token[end:])
            if rest is not None:
                keep((whole, first, rest))
    wholes, firsts, rests = np.array(ids, np.int64).reshape(-1, 3).T
    return wholes, firsts, rests


def _prefix_by_normalizer(backend: Any) -> None:
    """Phi-3's prefix: the space before a text is added even if the text begins with one."""
    from tokenizers import normalizers

    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    backend.pre_tokenizer = None
