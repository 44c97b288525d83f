"""The sampling fields that all generation routes share, and their conversion to SamplingParams."""

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
from foredraft.server.wire.field_types import MAX_TEXTS, AllowedIds, Choices, Ids, Strings, TopCount, Unsupported
from foredraft.server.wire.models import RequestModel
from foredraft.server.wire.structured_fields import ResponseFormat, StructuredFields, of_response_format
from foredraft.server.wire.unsupported_fields import check_unsupported, describe_unsupported, is_unsupported

_MAX_BIASES = 1024
_FORMAT_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_json_object",
)


class StreamOptions(RequestModel):
    """include_usage: end with a chunk that has the usage. continuous_usage_stats: put the usage so far, of all texts together,
    into every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[Any, Unsupported(False, reason="chunks are not padded")] = None


def _bias(value: Any) -> dict[int, float] | None:
    """OpenAI's form of a bias: a JSON object whose keys are token ids in decimal."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("must be an object that maps token ids to numbers")
    if len(value) > _MAX_BIASES:
        raise ValueError(f"contains {len(value)} entries: at most {_MAX_BIASES} are allowed")
    return {_token_id(key): _bias_value(key, bias) for key, bias in value.items()}


def _token_id(key: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", key):
        raise ValueError(f'contains the key {key[:40]!r}: keys are token ids, such as "42"')
    return int(key)


def _bias_value(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
        raise ValueError(f"the value of token {key} must be a number from -100 to 100")
    return float(value)


_BIAS_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": _MAX_BIASES,
        },
        {"type": "null"},
    ]
}


class SamplingFields(RequestModel):
    """OpenAI's fields, then vLLM's, then our own. Every field is optional; null is its default."""

    model_config = ConfigDict(json_schema_extra=describe_unsupported)

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_TEXTS)] | None = None
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
        None, description="The user of the request; it is logged."
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
        None, description="Lower values run first among the requests of one client. Default: 0."
    )
    structured_outputs: StructuredFields | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    speculative_tokens: Annotated[int, Field(ge=0, le=MOST_INT)] | Literal["auto"] | None = None
    verification: Literal["block", "rejection", "coupled"] | None = None
    prefix_caching: bool | None = Field(None, description="False: neither use nor fill the prefix cache.")
    metrics: bool | None = Field(None, description="Add this request's metrics to the response.")

    @model_validator(mode="after")
    def _check_unsupported(self) -> Self:
        check_unsupported(self.model_extra or {})
        return self

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams: set stream to true, or leave it out")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs cannot be streamed: leave stream out")
        formats = self._formats
        if len(formats) > 1:
            raise ValueError(f"{formats[0]} and {formats[1]} both constrain the form of the text: give one of them")
        return self

    def unknown_fields(self) -> Iterator[str]:
        for name in super().unknown_fields():
            if not is_unsupported(name):  # an unsupported field that is accepted asks for nothing
                yield name

    @property
    def num_texts(self) -> int:
        """The number of texts for each prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def repeats_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def _formats(self) -> list[str]:
        """Names of the given fields that constrain the form of the text."""
        given = [name for name in _FORMAT_FIELDS if getattr(self, name) not in (None, False)]
        is_text = self.response_format is not None and self.response_format.type == "text"
        return [name for name in given if not (name == "response_format" and is_text)]

    def error_field(self, error: ForedraftError) -> str | None:
        """The request field that an error of the engine is about; None if it names none."""
        match = re.match(r"(?:the )?([a-z_]+)", str(error))
        name = match[1] if match else ""
        if name == "structured_outputs":
            return next(iter(self._formats), None)
        if name == "max_tokens" and getattr(self, "max_completion_tokens", None) is not None:
            return "max_completion_tokens"
        if name == "prompt" and "messages" in type(self).model_fields:
            return "messages"
        return name if name in type(self).model_fields else None

    def _structured_outputs(self) -> StructuredOutputs | None:
        if self.response_format is not None and self.response_format.type != "text":
            return of_response_format(self.response_format)
        if self.structured_outputs is not None:
            return self.structured_outputs.as_params()
        if not self._formats:
            return None
        return StructuredOutputs(
            json=self.guided_json,
            json_object=bool(self.guided_json_object),
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )

    def _params(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Raises ForedraftError for values that cannot be honoured."""
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
            structured_outputs=self._structured_outputs(),
            speculative_tokens=self.speculative_tokens,
            verification=self.verification,
        )
