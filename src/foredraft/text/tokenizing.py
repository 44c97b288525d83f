"""Converts prompts and bad words to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from transformers import PreTrainedTokenizerBase

from foredraft.errors import ForedraftError
from foredraft.utils.unicode import check_unicode


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The ids of a prompt, with or without the special tokens that the tokenizer adds.

    Raises ForedraftError if text is not a string, is not valid Unicode, or has no tokens.
    """
    if not isinstance(text, str):
        raise ForedraftError(f"prompt must be a string or a list of token ids, not {type(text).__name__}")
    check_unicode("prompt", text)
    ids = _ids(tokenizer, text, add_special_tokens=add_special_tokens)
    if not ids:
        raise ForedraftError(
            "prompt is empty: it must have at least one token, and this tokenizer adds none of its own"
        )
    return ids


def bad_words_ids(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> list[tuple[int, ...]]:
    """The token sequences of the words, each as it is and with a leading space, which often gives other tokens.

    Raises ForedraftError for a word that is not valid Unicode, or has no tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in dict.fromkeys((word, word if word.startswith(" ") else f" {word}")):
            check_unicode("bad_words entry", text)
            ids = _ids(tokenizer, text, add_special_tokens=False)
            if not ids:
                raise ForedraftError(f"bad_words entry {word!r} has no tokens in this vocabulary: leave it out")
            sequences[tuple(ids)] = None
    return list(sequences)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool) -> list[int]:
    try:
        # verbose=False: the engine, which knows the model's context length, rejects prompts that are too long
        encoding = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise ForedraftError(f"the tokenizer cannot encode this text: {single_line(error)}") from error
    return list(cast("list[int]", encoding["input_ids"]))


def single_line(error: Exception) -> str:
    """The message of another library's error, with its line breaks removed."""
    return " ".join(str(error).split()) or type(error).__name__
