"""The merges that scores imply, and the tokenizers of each architecture, are those of transformers."""

from __future__ import annotations

import pytest
from transformers.integrations.gguf import convert_gguf_tokenizer
from transformers.tokenization_utils_base import generate_merges

from foredraft.model.gguf.sentencepiece import merges_of, sentencepiece_backend
from tests.model.gguf.test_tokenizer import TEXTS, kinds_of, model_of, sentencepiece


@pytest.mark.parametrize("ties", [False, True])
def test_merges_are_those_that_transformers_derives(ties: bool) -> None:
    vocabulary, _ = model_of(sentencepiece("first"))
    scores = [float(-(index // 7)) if ties else -index for index in range(len(vocabulary))]
    vocab = {token: index for index, token in enumerate(vocabulary)}
    merges = merges_of(vocab, vocabulary, scores)
    assert len(merges) > 50
    assert merges == generate_merges(vocab, dict(zip(vocabulary, scores, strict=True)))


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi3"])
def test_sentencepiece_vocabularies_tokenize_as_in_transformers(architecture: str) -> None:
    vocabulary, _ = model_of(sentencepiece("first"))
    vocabulary = ["  " if token == "\u2581\u2581" else token for token in [*vocabulary, "<mask>"]]
    fields = {
        "tokenizer_type": "llama",
        "tokens": vocabulary,
        "token_type": kinds_of(vocabulary),
        "scores": [-float(index) for index in range(len(vocabulary))],
    }
    ours = sentencepiece_backend(architecture, fields)
    theirs, _ = convert_gguf_tokenizer(architecture, fields)
    for text in (*TEXTS, " <s>a  b<|im_end|>", "<think> a"):
        assert ours.encode(text).ids == theirs.encode(text).ids
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text).ids)
