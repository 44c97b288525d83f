"""The request of /v1/responses. Nothing is stored: every request has the whole conversation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from foredraft.errors import ForedraftError
from foredraft.sampling import SamplingParams, StructuredOutputs
from foredraft.server.wire.field_types import Unsupported
from foredraft.server.wire.models import RequestModel
from foredraft.server.wire.responses_items import Items, message_of
from foredraft.server.wire.sampling_fields import SamplingFields
from foredraft.server.wire.structured_fields import JsonObjectFormat, JsonSchema, TextFormat, of_json_schema
from foredraft.server.wire.tool_use import MAX_TOOLS, FunctionTool, Mode, ToolUse

_STORED = "nothing is stored"


class _FunctionTyped(RequestModel):
    type: Literal["function"]


class ResponsesTool(FunctionTool, _FunctionTyped):
    """The type is validated before the name, which tools of other types lack."""


class ResponsesChoice(RequestModel):
    type: Literal["function"]
    name: str


class ResponsesSchema(JsonSchema):
    type: Literal["json_schema"]


class TextSettings(RequestModel):
    format: Annotated[TextFormat | JsonObjectFormat | ResponsesSchema, Field(discriminator="type")] | None = None
    verbosity: Annotated[Any, Unsupported("medium", reason="ask for it in a message")] = None


class ResponsesRequest(SamplingFields):
    """The fields that OpenAI documents, and the sampling fields of the other routes."""

    input: str | Items
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextSettings | None = None
    tools: Annotated[list[ResponsesTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Mode | ResponsesChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = Field(
        None, description="Returned in the response."
    )
    safety_identifier: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="The user of the request; it is logged."
    )
    prompt_cache_key: str | None = Field(None, description="Ignored: all requests share one prefix cache.")
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=1)] | None = Field(
        None, description="There is no reasoning to include."
    )
    store: Annotated[Any, Unsupported(False, reason=_STORED)] = None
    previous_response_id: Annotated[
        Any, Unsupported(reason=f"{_STORED}: send the items of the conversation as input")
    ] = None
    conversation: Annotated[Any, Unsupported(reason=f"{_STORED}: send the items of the conversation as input")] = None
    background: Annotated[Any, Unsupported(False, reason=_STORED)] = None
    n: Annotated[Any, Unsupported(1, reason="a response has only one text")] = None
    top_logprobs: Annotated[Any, Unsupported(0, reason="use /v1/chat/completions")] = None
    prompt_logprobs: Annotated[Any, Unsupported(reason="use /v1/chat/completions")] = None
    return_token_ids: Annotated[Any, Unsupported(False, reason="use /v1/chat/completions")] = None
    response_format: Annotated[Any, Unsupported(reason="use text.format")] = None
    max_tool_calls: Annotated[Any, Unsupported(reason="there are no tools on the server")] = None
    prompt: Annotated[Any, Unsupported(reason=_STORED)] = None
    reasoning: Annotated[Any, Unsupported({}, reason="use chat_template_kwargs of /v1/chat/completions")] = None
    truncation: Annotated[Any, Unsupported("disabled", reason="prompts are not truncated")] = None
    service_tier: Annotated[Any, Unsupported("auto", "default", reason="there is only one tier")] = None
    access_programs: Annotated[Any, Unsupported({}, reason="there are none")] = None
    background_options: Annotated[Any, Unsupported({}, reason=_STORED)] = None
    context_management: Annotated[Any, Unsupported([], reason="prompts are not truncated")] = None
    image: Annotated[Any, Unsupported(reason="text only")] = None
    moderation: Annotated[Any, Unsupported(reason="nothing is moderated")] = None
    prompt_cache_options: Annotated[Any, Unsupported(reason="the prefix cache keeps what fits")] = None
    prompt_cache_retention: Annotated[Any, Unsupported("in_memory", reason="the prefix cache is in memory")] = None

    @cached_property
    def tool_use(self) -> ToolUse:
        functions, parallel = self.tools or [], self.parallel_tool_calls is not False
        if isinstance(self.tool_choice, ResponsesChoice):
            return ToolUse(functions, self.tool_choice.name, is_named=True, parallel=parallel)
        return ToolUse(functions, self.tool_choice or "auto", parallel=parallel)

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        formats = self._formats
        if not self._input_messages:
            raise ValueError("input has no message: give a text, or at least one item besides reasoning")
        if self.tool_use.is_forced and formats:
            raise ValueError(f"tool_choice and {formats[0]} both constrain the form of the text: give one of them")
        if self._format is not None and formats[1:]:
            raise ValueError(f"text.format and {formats[1]} both constrain the form of the text: give one of them")
        return self

    def unknown_fields(self) -> Iterator[str]:
        yield from super().unknown_fields()
        for name in ("include_usage", "continuous_usage_stats"):  # the last event always has the usage
            if self.stream_options is not None and getattr(self.stream_options, name):
                yield f"stream_options.{name}"
        yield from self.tool_use.unenforced_fields("tools[{}].strict")

    @property
    def repeats_usage(self) -> bool:
        return False

    @property
    def num_characters(self) -> int:
        """The approximate number of characters that the template is rendered with."""
        return len(self.instructions or "") + sum(len(str(m.get("content") or "")) for m in self._input_messages)

    def template_messages(self) -> list[dict[str, Any]]:
        """The instructions come first. Consecutive calls are merged into the assistant's message before them."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return [*system, *self._input_messages]

    def template_args(self) -> dict[str, Any]:
        tools = self.tool_use.for_template()
        return {"tools": tools} if tools else {}

    def params(self) -> SamplingParams:
        """Without max_output_tokens the text may fill the context. Raises ForedraftError for values that cannot be honoured."""
        return self._params(max_tokens=self.max_output_tokens, logprobs=None)

    def error_field(self, error: ForedraftError) -> str | None:
        text = str(error)
        if text.startswith("structured_outputs") and self.tool_use.is_forced:
            return "tools"
        if text.startswith("max_tokens") and self.max_output_tokens is not None:
            return "max_output_tokens"
        return "input" if text.removeprefix("the ").startswith("prompt") else super().error_field(error)

    @property
    def _format(self) -> JsonObjectFormat | ResponsesSchema | None:
        text_format = None if self.text is None else self.text.format
        return None if isinstance(text_format, TextFormat) else text_format

    @property
    def _formats(self) -> list[str]:
        return [*(["text.format"] if self._format is not None else []), *super()._formats]

    def _structured_outputs(self) -> StructuredOutputs | None:
        if isinstance(self._format, ResponsesSchema):
            return of_json_schema(self._format)
        if self._format is not None:
            return StructuredOutputs(json_object=True)
        return self.tool_use.structured_outputs() or super()._structured_outputs()

    @cached_property
    def _input_messages(self) -> list[dict[str, Any]]:
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[dict[str, Any]] = []
        for item in self.input:
            message = message_of(item)
            if message is None:
                continue
            if "tool_calls" in message and messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
            else:
                messages.append(message)
        return messages
