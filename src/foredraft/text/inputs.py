"""The arguments of LLM.generate and LLM.chat, as one list entry for each prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from foredraft.errors import ForedraftError
from foredraft.sampling import SamplingParams
from foredraft.text.request import Prompt

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A conversation: {"role": ..., "content": ...} for each message."""


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several. A list of integers is one prompt."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
        return [prompts]
    if prompts and all(isinstance(token, int) for token in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def as_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """One conversation or several. A list of dicts is one conversation. Raises ForedraftError for anything but lists."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise ForedraftError(
            f"messages must be a list of messages, or a list of conversations, not {type(messages).__name__}"
        )
    if messages and all(isinstance(m, Mapping) for m in messages):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]


def params_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams | None]:
    """Raises ForedraftError unless there is one for all prompts, or one for each."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or len(params) != num_prompts:
        actual = f"{len(params)} of them" if isinstance(params, Sequence) else type(params).__name__
        raise ForedraftError(
            f"sampling_params must be one SamplingParams, or one for each of the {num_prompts} prompts, not {actual}"
        )
    return list(params)


def priority_for_each(priority: Sequence[int] | None, num_prompts: int) -> Sequence[int]:
    """0 for all if none are given. Raises ForedraftError unless there is one for each prompt."""
    if priority is None:
        return [0] * num_prompts
    if not isinstance(priority, Sequence) or len(priority) != num_prompts:
        raise ForedraftError(f"priority must be a list of integers, one for each of the {num_prompts} prompts")
    return priority
