"""Checks of a request before it runs. Every function raises ForedraftError for a request that cannot be run."""

from __future__ import annotations

from collections.abc import Sequence, Sized

from foredraft.engine.sources import Source
from foredraft.errors import ForedraftError, PromptLengthError, shown
from foredraft.sampling import SamplingParams
from foredraft.utils.units import bytes_text


def check_prompt(prompt: Sequence[int], params: SamplingParams, vocab_size: int, context_len: int) -> None:
    """Check that a prompt holds known ids and leaves room for one token, unless max_tokens is 0."""
    _check_not_empty(prompt)
    _check_known(prompt, vocab_size)
    most = context_len if params.max_tokens == 0 else context_len - 1
    if len(prompt) > most:
        raise PromptLengthError(
            f"the prompt has {len(prompt)} tokens, but the context holds {context_len}: give at most {most}"
            + (", so that one can be generated" if most < context_len else "")
        )


def check_source(source: Source, params: SamplingParams, vocab_size: int, longest: int) -> None:
    """Check that the source of an encoder-decoder is not too long, and that its ids are known. longest: the most tokens that the
    encoder can read; 0 for a model without one."""
    if longest == 0:
        return
    _check_not_empty(source)
    _check_known(source.ids, vocab_size)
    if len(source) > longest:
        raise PromptLengthError(f"the prompt has {len(source)} tokens, but the encoder reads at most {longest}")
    if params.prompt_logprobs is not None:
        raise ForedraftError(
            "prompt_logprobs is not supported: an encoder reads this model's prompts, and it gives no probabilities; leave it out"
        )


def check_params(params: SamplingParams, vocab_size: int, verifications: Sequence[str]) -> None:
    """Check that parameters name known ids and a known verification rule. verifications: the names of all rules."""
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        unknown = _first_outside(getattr(params, name) or (), vocab_size)
        if unknown is not None:
            raise ForedraftError(f"{name} contains token id {unknown}: valid ids are 0 to {vocab_size - 1}")
    if params.verification is not None and params.verification not in verifications:
        raise ForedraftError(
            f"verification must be one of {', '.join(verifications)}, not {shown(params.verification)}"
        )


def check_memory(num_tokens: int, num_bytes: int, budget: int) -> None:
    """Check that a text fits into the cache. num_bytes: the size of its num_tokens. budget: the size of the cache in bytes."""
    if num_bytes > budget:
        raise ForedraftError(
            f"{num_tokens} tokens take {bytes_text(num_bytes)} of cache, but the budget is {bytes_text(budget)}: "
            "raise cache_memory or lower max_tokens"
        )


def _check_not_empty(prompt: Sized) -> None:
    if not len(prompt):
        raise ForedraftError("the prompt is empty: give at least one token")


def _check_known(ids: Sequence[int], vocab_size: int) -> None:
    unknown = _first_outside(ids, vocab_size)
    if unknown is not None:
        raise ForedraftError(f"the prompt contains token id {shown(unknown)}: valid ids are 0 to {vocab_size - 1}")


def _first_outside(ids: Sequence[int], vocab_size: int) -> int | None:
    return next((token for token in ids if not 0 <= token < vocab_size), None)
