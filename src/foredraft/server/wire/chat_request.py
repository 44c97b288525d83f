"""The request of /v1/chat/completions: messages for the chat template, and sampling parameters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from foredraft.errors import ForedraftError
from foredraft.sampling import SamplingParams, StructuredOutputs
from foredraft.server.wire.field_types import TopCount, Unsupported
from foredraft.server.wire.messages import Message
from foredraft.server.wire.models import RequestModel
from foredraft.server.wire.sampling_fields import SamplingFields
from foredraft.server.wire.tool_use import MAX_TOOLS, Mode, NamedChoice, Tool, ToolUse

_MAX_MESSAGES = 4096
MAX_TEMPLATE = 65536
"""Characters of a chat template in a request."""

_RESERVED = {
    "messages",
    "conversation",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
    "tokenizer",
    "return_assistant_tokens_mask",
    "self",
}
"""Arguments of the template's rendering, which chat_template_kwargs must not set."""

Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=_MAX_MESSAGES)]


class TemplateFields(RequestModel):
    """The fields that a chat template is rendered with."""

    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        None, description="Continue the last message, an assistant's, instead of starting a new one."
    )
    chat_template: Annotated[str, Field(min_length=1, max_length=MAX_TEMPLATE)] | None = Field(
        None,
        description="Jinja, used instead of the model's; only if the server was started with --trust-request-chat-template.",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the template itself.")

    @model_validator(mode="after")
    def _check_template_kwargs(self) -> Self:
        reserved = next((name for name in self.chat_template_kwargs or {} if name in _RESERVED), None)
        if reserved is not None:
            raise ValueError(f"chat_template_kwargs must not contain {reserved!r}")
        return self

    @model_validator(mode="after")
    def _check_continuation(self) -> Self:
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise ValueError(
                    "continue_final_message and add_generation_prompt are mutually exclusive: leave one out"
                )
            last = self.messages[-1] if self.messages else None
            if last is not None and (last.role != "assistant" or not last.content):
                raise ValueError("continue_final_message needs the last message to be the assistant's, with content")
        return self

    @property
    def num_characters(self) -> int:
        """The approximate number of characters that the template is rendered with."""
        contents = (message.content or "" for message in self.messages or ())
        return sum(len(c) if isinstance(c, str) else sum(len(part.text) for part in c) for c in contents)

    def template_messages(self) -> list[dict[str, Any]]:
        return [message.for_template() for message in self.messages or ()]

    def template_args(self) -> dict[str, Any]:
        args: dict[str, Any] = dict(self.chat_template_kwargs or {})
        if self.tools:
            args["tools"] = [tool.function.for_template() for tool in self.tools]
        if self.add_generation_prompt is not None:
            args["add_generation_prompt"] = self.add_generation_prompt
        if self.continue_final_message:
            args["continue_final_message"] = True
        return args


class ChatRequest(SamplingFields, TemplateFields):
    """The fields that OpenAI documents, vLLM's extra ones and our own."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    tool_choice: Mode | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    safety_identifier: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="The user of the request; it is logged."
    )
    prompt_cache_key: str | None = Field(None, description="Ignored: all requests share one prefix cache.")
    audio: Annotated[Any, Unsupported(reason="text only")] = None
    modalities: Annotated[Any, Unsupported(["text"], reason="text only")] = None
    function_call: Annotated[Any, Unsupported("none", reason="use tools")] = None
    functions: Annotated[Any, Unsupported(reason="use tools")] = None
    metadata: Annotated[Any, Unsupported({}, reason="completions are not stored")] = None
    moderation: Annotated[Any, Unsupported(reason="nothing is moderated")] = None
    prediction: Annotated[Any, Unsupported(reason="draft tokens come from the drafter")] = None
    prompt_cache_options: Annotated[Any, Unsupported(reason="the prefix cache keeps what fits")] = None
    prompt_cache_retention: Annotated[Any, Unsupported("in_memory", reason="the prefix cache is in memory")] = None
    reasoning_effort: Annotated[Any, Unsupported(reason="set it in chat_template_kwargs")] = None
    service_tier: Annotated[Any, Unsupported("auto", "default", reason="there is only one tier")] = None
    store: Annotated[Any, Unsupported(False, reason="completions are not stored")] = None
    verbosity: Annotated[Any, Unsupported(reason="ask for it in a message")] = None
    web_search_options: Annotated[Any, Unsupported(reason="there is no web search")] = None

    @cached_property
    def tool_use(self) -> ToolUse:
        functions = [tool.function for tool in self.tools or ()]
        parallel = self.parallel_tool_calls is not False
        if isinstance(self.tool_choice, NamedChoice):
            return ToolUse(functions, self.tool_choice.function.name, is_named=True, parallel=parallel)
        return ToolUse(functions, self.tool_choice or "auto", parallel=parallel)

    def unknown_fields(self) -> Iterator[str]:
        yield from super().unknown_fields()
        yield from self.tool_use.unenforced_fields("tools[{}].function.strict")

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if self.tool_use.is_forced and self._formats:
            raise ValueError(
                f"tool_choice and {self._formats[0]} both constrain the form of the text: give one of them"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError("max_tokens is the old name of max_completion_tokens: give one of them")
        return self

    def template_args(self) -> dict[str, Any]:
        args = super().template_args()
        if self.tool_choice == "none":
            args.pop("tools", None)
        return args

    def _structured_outputs(self) -> StructuredOutputs | None:
        return self.tool_use.structured_outputs() or super()._structured_outputs()

    def error_field(self, error: ForedraftError) -> str | None:
        is_about_tools = self.tool_use.is_forced and str(error).startswith("structured_outputs")
        return "tools" if is_about_tools else super().error_field(error)

    def params(self) -> SamplingParams:
        """Without max_tokens the text may fill the context. Raises ForedraftError for values that cannot be honoured."""
        max_tokens = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return self._params(max_tokens=max_tokens, logprobs=(self.top_logprobs or 0) if self.logprobs else None)
