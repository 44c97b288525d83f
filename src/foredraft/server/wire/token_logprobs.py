"""Log probabilities in the forms of OpenAI and vLLM."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from foredraft.text.outputs import Logprob, RequestOutput
from foredraft.vocabulary import TokenBytes

_MIN_LOGPROB = -9999.0
"""OpenAI's value for a token of probability 0, since JSON has no infinity."""

PromptLogprobs = list[dict[int, dict[str, Any]] | None]


def prompt_logprobs_of(output: RequestOutput) -> PromptLogprobs | None:
    """vLLM's form: for each prompt token a dict by token id. The first token has None, since nothing precedes it."""
    if output.prompt_logprobs is None:
        return None
    return [
        None
        if entries is None
        else {token: asdict(entry) | {"logprob": logprob_of(entry)} for token, entry in entries.items()}
        for entries in output.prompt_logprobs
    ]


def chosen_of(entries: dict[int, Logprob]) -> int:
    """The id of the chosen token, which comes first."""
    return next(iter(entries))


def most_likely(entries: dict[int, Logprob], count: int) -> list[int]:
    """The ids of the most likely tokens, best first."""
    return sorted(entries, key=lambda token: entries[token].rank or 0)[:count]


def logprob_of(entry: Logprob) -> float:
    return max(entry.logprob, _MIN_LOGPROB)


def text_of(entry: Logprob) -> str:
    return entry.decoded_token or ""


def bytes_of(token: int, text: str, token_bytes: TokenBytes | None) -> list[int] | None:
    """The token's text in UTF-8, or the token's own bytes if they are only a part of a character; None if these are not known."""
    if "\ufffd" not in text:
        return list(text.encode())
    own = token_bytes.of(token) if token_bytes is not None else None
    return None if own is None else list(own)
