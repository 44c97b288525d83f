"""The request of /v1/completions: prompts and sampling parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from foredraft.errors import ForedraftError
from foredraft.sampling import SamplingParams
from foredraft.server.wire.field_types import MAX_TEXTS, TopCount, Unsupported
from foredraft.server.wire.sampling_fields import SamplingFields

DEFAULT_TOKENS = 16

_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT_SCHEMA = {"type": "string", "minLength": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        _TEXT_SCHEMA,
        {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1, "maxItems": MAX_TEXTS},
        _IDS_SCHEMA,
        {"type": "array", "items": _IDS_SCHEMA, "minItems": 1, "maxItems": MAX_TEXTS},
    ]
}


def _prompts(value: Any) -> list[str | list[int]]:
    """A prompt in any of its four forms, as a list of prompts."""
    if isinstance(value, str) or _is_ids(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text, a list of texts, a list of token ids, or a list of such lists")
    if len(value) > MAX_TEXTS:
        raise ValueError(f"contains {len(value)} prompts: at most {MAX_TEXTS} are allowed")
    kind = str if isinstance(value[0], str) else list
    for index, prompt in enumerate(value):
        if not prompt or not isinstance(prompt, kind) or (kind is list and not _is_ids(prompt)):
            raise ValueError(
                f"must contain texts or lists of token ids of 0 or more, none of them empty: see number {index}"
            )
    return value


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int and token >= 0 for token in value)


class CompletionRequest(SamplingFields):
    """The fields that OpenAI documents, vLLM's extra ones and our own."""

    prompt: Annotated[Any, AfterValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(
        None, description=f"Default: {DEFAULT_TOKENS}. 0 scores the prompt only, with echo or prompt_logprobs."
    )
    logprobs: TopCount | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = Field(None, description="Must equal n.")
    suffix: Annotated[Any, Unsupported("", reason="infilling is not supported")] = None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if self.best_of is not None and self.best_of != self.num_texts:
            raise ValueError("best_of must equal n: every generated text is returned")
        if self.num_texts * len(self.prompt) > MAX_TEXTS:
            raise ValueError(f"n times the number of prompts is more than {MAX_TEXTS}")
        if self.stream and self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs cannot be streamed: leave one of the three out")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        prompts: list[str | list[int]] = self.prompt
        return prompts

    def params(self) -> SamplingParams:
        """Raises ForedraftError for values that cannot be honoured."""
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ForedraftError(
                "max_tokens 0 generates nothing: use it with echo or prompt_logprobs, or give at least 1"
            )
        params = self._params(
            max_tokens=DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens, logprobs=self.logprobs
        )
        if self.echo and self.logprobs is not None and params.prompt_logprobs is None:
            return replace(params, prompt_logprobs=self.logprobs)
        return params
