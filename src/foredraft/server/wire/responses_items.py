"""The input items of the Responses API: messages, tool calls and their outputs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from foredraft.server.wire.field_types import Unsupported
from foredraft.server.wire.models import RequestModel
from foredraft.server.wire.tool_use import call_for_template

_MAX_ITEMS = 4096
_MAX_PARTS = 256


class InputText(RequestModel):
    """annotations, logprobs: parts of an earlier response that is sent back; ignored."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None
    logprobs: Any = None


class RefusalPart(RequestModel):
    type: Literal["refusal"]
    refusal: str


Parts = Annotated[
    list[Annotated[InputText | RefusalPart, Field(discriminator="type")]],
    Field(fail_fast=True, max_length=_MAX_PARTS),
]


class MessageItem(RequestModel):
    """In the template a developer's message is a system message. id, status, phase: parts of an earlier response; ignored."""

    type: Literal["message"] | None = "message"
    role: Literal["developer", "system", "user", "assistant"]
    content: str | Parts
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    def for_template(self) -> dict[str, Any]:
        return {"role": "system" if self.role == "developer" else self.role, "content": text_of_parts(self.content)}


class CallItem(RequestModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    caller: Any = None
    namespace: str | None = None
    async_: bool | None = Field(None, alias="async")
    parsed_arguments: Any = None

    def for_template(self) -> dict[str, Any]:
        call = call_for_template(self.call_id, self.name, self.arguments)
        return {"role": "assistant", "content": None, "tool_calls": [call]}


class CallOutputItem(RequestModel):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts
    id: str | None = None
    status: str | None = None

    def for_template(self) -> dict[str, Any]:
        return {"role": "tool", "content": text_of_parts(self.output), "tool_call_id": self.call_id}


class ReasoningItem(RequestModel):
    """Part of an earlier response that is sent back; ignored."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Any = None
    content: Any = None
    encrypted_content: Any = None
    status: str | None = None


class ReferenceItem(RequestModel):
    type: Annotated[Any, Unsupported(reason="nothing is stored: send the item itself")] = "item_reference"


def _item_type(value: Any) -> str:
    """The type of an item; a message may leave it out."""
    item_type = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return item_type if isinstance(item_type, str) else "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ReferenceItem, Tag("item_reference")],
    Discriminator(_item_type),
]
Items = Annotated[list[Item], Field(fail_fast=True, max_length=_MAX_ITEMS)]


def message_of(item: Any) -> dict[str, Any] | None:
    """The message of an item for the chat template; None for reasoning, which templates do not take."""
    return None if isinstance(item, ReasoningItem) else item.for_template()


def text_of_parts(content: str | list[InputText | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)
