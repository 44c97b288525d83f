"""/v1/responses: a body of OpenAI's Responses API as messages and parameters. Nothing is stored: a conversation is sent whole."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from foredraft.errors import ForedraftError
from foredraft.sampling import SamplingParams, StructuredOutputs
from foredraft.server.wire.base import Only, Wire
from foredraft.server.wire.items import Items, message_of
from foredraft.server.wire.sampling import SamplingFields
from foredraft.server.wire.structured import JsonObjectFormat, JsonSchema, TextFormat, of_json_schema
from foredraft.server.wire.tools import MOST_TOOLS, FunctionTool, Mode, ToolUse

_STORED = "nothing is stored"


class _Typed(Wire):
    type: Literal["function"]


class ResponsesTool(FunctionTool, _Typed):
    """Its type is looked at first: others have no name."""


class ResponsesChoice(Wire):
    type: Literal["function"]
    name: str


class ResponsesSchema(JsonSchema):
    type: Literal["json_schema"]


class TextSettings(Wire):
    format: Annotated[TextFormat | JsonObjectFormat | ResponsesSchema, Field(discriminator="type")] | None = None
    verbosity: Annotated[Any, Only("medium", reason="say it in a message")] = None


class ResponsesRequest(SamplingFields):
    """What OpenAI's documents list for it, and the sampling fields of the other routes."""

    input: str | Items
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextSettings | None = None
    tools: Annotated[list[ResponsesTool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: Mode | ResponsesChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = Field(
        None, description="Comes back in the answer."
    )
    safety_identifier: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="Whose request it is; goes to the log."
    )
    prompt_cache_key: str | None = Field(
        None, description="Every request shares one prefix cache: any key leads to it."
    )
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=1)] | None = Field(
        None, description="There is no reasoning to include."
    )
    store: Annotated[Any, Only(False, reason=_STORED)] = None
    previous_response_id: Annotated[Any, Only(reason=f"{_STORED}: send the items of the conversation as input")] = None
    conversation: Annotated[Any, Only(reason=f"{_STORED}: send the items of the conversation as input")] = None
    background: Annotated[Any, Only(False, reason=_STORED)] = None
    n: Annotated[Any, Only(1, reason="a response is one text")] = None
    top_logprobs: Annotated[Any, Only(0, reason="ask /v1/chat/completions")] = None
    prompt_logprobs: Annotated[Any, Only(reason="ask /v1/chat/completions")] = None
    return_token_ids: Annotated[Any, Only(False, reason="ask /v1/chat/completions")] = None
    response_format: Annotated[Any, Only(reason="say it in text.format")] = None
    max_tool_calls: Annotated[Any, Only(reason="there are no tools on the server")] = None
    prompt: Annotated[Any, Only(reason=_STORED)] = None
    reasoning: Annotated[Any, Only({}, reason="say it to the template of /v1/chat/completions")] = None
    truncation: Annotated[Any, Only("disabled", reason="prompts are not cut")] = None
    service_tier: Annotated[Any, Only("auto", "default", reason="there is one tier")] = None
    access_programs: Annotated[Any, Only({}, reason="there are none")] = None
    background_options: Annotated[Any, Only({}, reason=_STORED)] = None
    context_management: Annotated[Any, Only([], reason="prompts are not cut")] = None
    image: Annotated[Any, Only(reason="text only")] = None
    moderation: Annotated[Any, Only(reason="nothing is moderated")] = None
    prompt_cache_options: Annotated[Any, Only(reason="the prefix cache keeps what fits")] = None
    prompt_cache_retention: Annotated[Any, Only("in_memory", reason="the prefix cache is in memory")] = None

    @cached_property
    def tool_use(self) -> ToolUse:
        functions, parallel = self.tools or [], self.parallel_tool_calls is not False
        if isinstance(self.tool_choice, ResponsesChoice):
            return ToolUse(functions, self.tool_choice.name, is_named=True, parallel=parallel)
        return ToolUse(functions, self.tool_choice or "auto", parallel=parallel)

    @model_validator(mode="after")
    def _check_own(self) -> Self:
        forms = self._forms
        if self.input == []:
            raise ValueError("input is empty: give a text, or at least one item")
        if self.tool_use.is_forced and forms:
            raise ValueError(f"tool_choice and {forms[0]} both say what form the text has: give one of them")
        if self._format is not None and forms[1:]:
            raise ValueError(f"text.format and {forms[1]} both say what form the text has: give one of them")
        return self

    def unread(self) -> Iterator[str]:
        yield from super().unread()
        yield from self.tool_use.unread("tools[{}].strict")

    @property
    def num_characters(self) -> int:
        """About so many go through the template."""
        return len(self.instructions or "") + sum(len(str(one.get("content") or "")) for one in self._input_messages)

    def template_messages(self) -> list[dict[str, Any]]:
        """Instructions first; calls of one turn in one message."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return [*system, *self._input_messages]

    def template_args(self) -> dict[str, Any]:
        tools = self.tool_use.for_template()
        return {"tools": tools} if tools else {}

    def params(self) -> SamplingParams:
        """Raises ForedraftError for what cannot be honoured. Without a limit the answer may go to the context's end."""
        return self._params(max_tokens=self.max_output_tokens, logprobs=None)

    def blamed(self, error: ForedraftError) -> str | None:
        text = str(error)
        if text.startswith("structured_outputs") and self.tool_use.is_forced:
            return "tools"
        if text.startswith("max_tokens") and self.max_output_tokens is not None:
            return "max_output_tokens"
        return "input" if text.removeprefix("the ").startswith("prompt") else super().blamed(error)

    @property
    def _format(self) -> JsonObjectFormat | ResponsesSchema | None:
        found = None if self.text is None else self.text.format
        return None if isinstance(found, TextFormat) else found

    @property
    def _forms(self) -> list[str]:
        return [*(["text.format"] if self._format is not None else []), *super()._forms]

    def _structured(self) -> StructuredOutputs | None:
        wanted = self._format
        if isinstance(wanted, ResponsesSchema):
            return of_json_schema(wanted)
        if wanted is not None:
            return StructuredOutputs(json_object=True)
        return self.tool_use.form() or super()._structured()

    @cached_property
    def _input_messages(self) -> list[dict[str, Any]]:
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        found: list[dict[str, Any]] = []
        for item in self.input:
            message = message_of(item)
            if message is None:
                continue
            if "tool_calls" in message and found and found[-1]["role"] == "assistant":
                found[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
            else:
                found.append(message)
        return found
