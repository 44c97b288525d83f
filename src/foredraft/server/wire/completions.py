"""/v1/completions: from a body to prompts and parameters, from deltas and outputs to answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from foredraft.errors import ForedraftError
from foredraft.sampling import SamplingParams
from foredraft.server.wire.answers import (
    Answers,
    Head,
    PromptLogprobs,
    Usage,
    logprob_of,
    own_and_top,
    prompt_logprobs_of,
    text_of,
    usage_of,
)
from foredraft.server.wire.base import MOST_TEXTS, Answer, Only, TopCount, if_any
from foredraft.server.wire.sampling import SamplingFields
from foredraft.text.outputs import CompletionOutput, Delta, Logprob, RequestOutput

DEFAULT_TOKENS = 16

_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT_SCHEMA = {"type": "string", "minLength": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        _TEXT_SCHEMA,
        {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1, "maxItems": MOST_TEXTS},
        _IDS_SCHEMA,
        {"type": "array", "items": _IDS_SCHEMA, "minItems": 1, "maxItems": MOST_TEXTS},
    ]
}


def _prompts(value: Any) -> list[str | list[int]]:
    if isinstance(value, str) or _is_ids(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text, a list of texts, a list of token ids, or a list of such lists")
    if len(value) > MOST_TEXTS:
        raise ValueError(f"holds {len(value)} prompts: at most {MOST_TEXTS} are taken at a time")
    kind = str if isinstance(value[0], str) else list
    for place, one in enumerate(value):
        if not one or not isinstance(one, kind) or (kind is list and not _is_ids(one)):
            raise ValueError(f"must hold texts or lists of token ids, none empty; number {place} is neither")
    return value


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int and one >= 0 for one in value)


class CompletionRequest(SamplingFields):
    """What OpenAI's documents list for it, and vLLM's and our extras."""

    prompt: Annotated[Any, AfterValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(
        None, description=f"Default: {DEFAULT_TOKENS}. 0 goes with echo or prompt_logprobs: then nothing is written."
    )
    logprobs: TopCount | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = Field(None, description="Only as many as n: none is thrown away.")
    suffix: Annotated[Any, Only("", reason="text is not written into gaps")] = None

    @model_validator(mode="after")
    def _check_own(self) -> Self:
        if self.best_of is not None and self.best_of != self.num_texts:
            raise ValueError("best_of is not supported beyond n: every text that is written is given back")
        if self.num_texts * len(self.prompt) > MOST_TEXTS:
            raise ValueError(f"n times the number of prompts is more than {MOST_TEXTS}")
        if self.stream and self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs cannot be streamed: leave one of the three out")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        found: list[str | list[int]] = self.prompt
        return found

    def params(self) -> SamplingParams:
        """Raises ForedraftError for what cannot be honoured."""
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ForedraftError(
                "max_tokens 0 writes nothing: it goes with echo or prompt_logprobs, else give at least 1"
            )
        params = self._params(
            max_tokens=DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens, logprobs=self.logprobs
        )
        if self.echo and self.logprobs is not None and params.prompt_logprobs is None:
            return replace(params, prompt_logprobs=self.logprobs)
        return params


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """stop_reason: the stop string or stop token that ended it. token_ids: where return_token_ids asked for them."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = if_any()
    token_ids: list[int] | None = if_any()
    prompt_token_ids: list[int] | None = if_any()


class CompletionResponse(Answer):
    """A chunk of a stream has the same form."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: dict[str, Any] | None = if_any()


class Completions(Answers):
    """The answer to one body, whole or in chunks. prompt_texts: what echo repeats."""

    def __init__(self, body: CompletionRequest, head: Head, prompt_texts: Sequence[str]) -> None:
        super().__init__(body, head)
        self._body = body
        self._prompt_texts = prompt_texts
        self._offsets: dict[int, int] = {}
        """Characters of each text that were sent."""

    def chunks(self, place: int, delta: Delta) -> list[Answer]:
        """place: which prompt the delta belongs to."""
        index = place * self._body.num_texts + delta.index
        is_first = index not in self._offsets
        text = self._prompt_texts[place] + delta.text if self._body.echo and is_first else delta.text
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(text)
        logprobs = None if delta.logprobs is None else self._logprobs(delta.logprobs, offset)
        shows_ids = bool(self._body.return_token_ids)
        if not (text or delta.finish_reason or logprobs or shows_ids):
            return []  # a part of a character
        choice = CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,  # type: ignore[arg-type]  # aborted and failed texts have no chunk
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if shows_ids else None,
        )
        return [self._response([choice])]

    def whole(self, outputs: Sequence[RequestOutput]) -> Answer:
        choices = [self._choice(place, output, text) for place, output in enumerate(outputs) for text in output.outputs]
        return self._response(choices, usage_of(outputs), self._metrics(outputs))

    def _tail(self, usage: Usage | None, metrics: dict[str, Any] | None) -> Answer:
        return self._response([], usage, metrics)

    def _response(
        self, choices: list[CompletionChoice], usage: Usage | None = None, metrics: dict[str, Any] | None = None
    ) -> CompletionResponse:
        head = self._head
        return CompletionResponse(
            id=head.id, created=head.created, model=head.model, choices=choices, usage=usage, metrics=metrics
        )

    def _choice(self, place: int, output: RequestOutput, text: CompletionOutput) -> CompletionChoice:
        echoed = self._prompt_texts[place] if self._body.echo else ""
        logprobs = None
        if text.logprobs is not None:
            entries: list[dict[int, Logprob] | None] = list(text.logprobs)
            if self._body.echo and output.prompt_logprobs is not None:
                logprobs = self._echoed_logprobs(output, echoed, entries)
            else:
                logprobs = self._logprobs(entries, len(echoed))
        wants_prompt = self._body.prompt_logprobs is not None
        shows_ids = bool(self._body.return_token_ids)
        return CompletionChoice(
            index=place * self._body.num_texts + text.index,
            text=echoed + text.text,
            logprobs=logprobs,
            finish_reason=text.finish_reason,  # type: ignore[arg-type]
            stop_reason=text.stop_reason,
            prompt_logprobs=prompt_logprobs_of(output) if wants_prompt else None,
            token_ids=text.token_ids if shows_ids else None,
            prompt_token_ids=output.prompt_token_ids if shows_ids else None,
        )

    def _logprobs(self, entries: Sequence[dict[int, Logprob] | None], offset: int) -> CompletionLogprobs:
        found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for one in entries:
            if one is None:
                continue
            own, _ = own_and_top(one, 0)
            found.tokens.append(text_of(own))
            found.token_logprobs.append(logprob_of(own))
            found.top_logprobs.append({text_of(entry): logprob_of(entry) for entry in one.values()})
            found.text_offset.append(offset)
            offset += len(text_of(own))
        return found

    def _echoed_logprobs(
        self, output: RequestOutput, echoed: str, entries: Sequence[dict[int, Logprob] | None]
    ) -> CompletionLogprobs:
        """The prompt's tokens in front; of the first, which nothing precedes, only that it is there."""
        assert output.prompt_logprobs is not None
        rest = self._logprobs(output.prompt_logprobs[1:], 0)
        first_text = echoed[: len(echoed) - sum(map(len, rest.tokens))]
        offset = len(first_text)
        rest = self._logprobs([*output.prompt_logprobs[1:], *entries], offset)
        return CompletionLogprobs(
            tokens=[first_text, *rest.tokens],
            token_logprobs=[None, *rest.token_logprobs],
            top_logprobs=[None, *rest.top_logprobs],
            text_offset=[0, *rest.text_offset],
        )
