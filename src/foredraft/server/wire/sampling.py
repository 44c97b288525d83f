"""The fields that both ways of writing take, and the SamplingParams they come to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema, model_validator

from foredraft.errors import ForedraftError
from foredraft.sampling import SamplingParams, StructuredOutputs
from foredraft.sampling.params import (
    LEAST_REPETITION_PENALTY,
    LEAST_SEED,
    MOST_INT,
    MOST_REPETITION_PENALTY,
    MOST_SEED,
    MOST_TEMPERATURE,
)
from foredraft.server.wire.base import MOST_TEXTS, AllowedIds, Choices, Ids, Only, Strings, TopCount, Wire
from foredraft.server.wire.refused import check_extra, describe_refused, is_refused
from foredraft.server.wire.structured import ResponseFormat, StructuredFields, of_response_format

_MOST_BIASES = 1024
_FORMS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_json_object",
)


class StreamOptions(Wire):
    """include_usage: a last chunk with the numbers of tokens. continuous_usage_stats: those so far, of all texts together, in
    every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[Any, Only(False, reason="chunks are not padded")] = None


def _bias(value: Any) -> dict[int, float] | None:
    """OpenAI's: token ids, as the keys of a JSON object, to numbers."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    if len(value) > _MOST_BIASES:
        raise ValueError(f"holds {len(value)} entries: at most {_MOST_BIASES} are taken")
    return {_token_id(key): _bias_value(key, one) for key, one in value.items()}


def _token_id(key: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", key):
        raise ValueError(f'holds the key {key[:40]!r}: keys are token ids, such as "42"')
    return int(key)


def _bias_value(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
        raise ValueError(f"of token {key} must be a number from -100 to 100")
    return float(value)


_BIAS_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": _MOST_BIASES,
        },
        {"type": "null"},
    ]
}


class SamplingFields(Wire):
    """OpenAI's fields first, then vLLM's, then our own. None is the default everywhere."""

    model_config = ConfigDict(json_schema_extra=describe_refused)

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MOST_TEXTS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=MOST_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[Any, AfterValidator(_bias), WithJsonSchema(_BIAS_SCHEMA)] = None
    seed: Annotated[int, Field(ge=LEAST_SEED, le=MOST_SEED)] | None = None
    stop: Annotated[str, Field(min_length=1, max_length=1000)] | Strings | None = None
    user: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="Whose request it is; goes to the log."
    )
    response_format: ResponseFormat | None = None

    top_k: Annotated[int, Field(ge=-1, le=MOST_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=LEAST_REPETITION_PENALTY, le=MOST_REPETITION_PENALTY)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MOST_INT)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Strings | None = None
    allowed_token_ids: AllowedIds | None = None
    prompt_logprobs: TopCount | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(
        None, description="The lower, the earlier, among the requests of one client. Default: 0."
    )
    structured_outputs: StructuredFields | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    speculative_tokens: Annotated[int, Field(ge=0, le=MOST_INT)] | Literal["auto"] | None = None
    verification: Literal["block", "rejection", "coupled"] | None = None
    prefix_caching: bool | None = Field(None, description="False: use nothing that was read for others, leave nothing.")
    metrics: bool | None = Field(None, description="Add this request's metrics to the answer.")

    @model_validator(mode="after")
    def _check_extra(self) -> Self:
        check_extra(self.model_extra or {})
        return self

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams: set stream to true, or leave it out")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs cannot be streamed: leave stream out")
        given = self._forms
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} both say what form the text has: give one of them")
        return self

    def unread(self) -> Iterator[str]:
        for name in super().unread():
            if not is_refused(name):  # or its value asks for nothing
                yield name

    @property
    def num_texts(self) -> int:
        """For one prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def repeats_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def _forms(self) -> list[str]:
        """The fields by which a form is asked for."""
        found = [name for name in _FORMS if getattr(self, name) not in (None, False)]
        is_text = self.response_format is not None and self.response_format.type == "text"
        return [name for name in found if not (name == "response_format" and is_text)]

    def blamed(self, error: ForedraftError) -> str | None:
        """The field that an error of ours speaks of, if it does."""
        match = re.match(r"(?:the )?([a-z_]+)", str(error))
        name = match[1] if match else ""
        if name == "structured_outputs":
            return next(iter(self._forms), None)
        if name == "max_tokens" and getattr(self, "max_completion_tokens", None) is not None:
            return "max_completion_tokens"
        if name == "prompt" and "messages" in type(self).model_fields:
            return "messages"
        return name if name in type(self).model_fields else None

    def _structured(self) -> StructuredOutputs | None:
        if self.response_format is not None and self.response_format.type != "text":
            return of_response_format(self.response_format)
        if self.structured_outputs is not None:
            return self.structured_outputs.as_params()
        if not self._forms:
            return None
        return StructuredOutputs(
            json=self.guided_json,
            json_object=bool(self.guided_json_object),
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )

    def _params(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Raises ForedraftError for what cannot be honoured."""
        given: dict[str, Any] = {
            "n": self.n,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "bad_words": self.bad_words,
            "min_tokens": self.min_tokens,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "prefix_caching": self.prefix_caching,
        }
        return SamplingParams(
            **{name: value for name, value in given.items() if value is not None},
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            max_tokens=max_tokens,
            allowed_token_ids=self.allowed_token_ids,
            seed=self.seed,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            structured_outputs=self._structured(),
            speculative_tokens=self.speculative_tokens,
            verification=self.verification,
        )
