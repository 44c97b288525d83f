"""Log probabilities in the forms of OpenAI and vLLM."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from foredraft.text.outputs import Logprob, RequestOutput

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


def chosen_and_top(entries: dict[int, Logprob], num_top: int) -> tuple[Logprob, list[Logprob]]:
    """The entry of the chosen token, which comes first in entries, and the num_top most likely entries."""
    by_rank = sorted(entries.values(), key=lambda entry: entry.rank or 0)
    return next(iter(entries.values())), by_rank[:num_top]


def logprob_of(entry: Logprob) -> float:
    return max(entry.logprob, _MIN_LOGPROB)


def text_of(entry: Logprob) -> str:
    return entry.decoded_token or ""


def bytes_of(text: str) -> list[int] | None:
    """UTF-8; None where the token is only a part of a character."""
    return None if "\ufffd" in text else list(text.encode())
