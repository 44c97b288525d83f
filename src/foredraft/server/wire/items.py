"""The items of a Responses API conversation: messages, calls and what they gave."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from foredraft.server.wire.base import Only, Wire
from foredraft.server.wire.tools import call_for_template

_MOST_ITEMS = 4096
_MOST_PARTS = 256


class InputText(Wire):
    """annotations, logprobs: of an answer that comes back; not read."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None
    logprobs: Any = None


class RefusalPart(Wire):
    type: Literal["refusal"]
    refusal: str


Parts = Annotated[
    list[Annotated[InputText | RefusalPart, Field(discriminator="type")]],
    Field(fail_fast=True, max_length=_MOST_PARTS),
]


class MessageItem(Wire):
    """A developer's message is handed to the template as a system's. id, status, phase: of an answer that comes back; not read."""

    type: Literal["message"] | None = "message"
    role: Literal["developer", "system", "user", "assistant"]
    content: str | Parts
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    def for_template(self) -> dict[str, Any]:
        return {"role": "system" if self.role == "developer" else self.role, "content": text_of_parts(self.content)}


class CallItem(Wire):
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


class CallOutputItem(Wire):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts
    id: str | None = None
    status: str | None = None

    def for_template(self) -> dict[str, Any]:
        return {"role": "tool", "content": text_of_parts(self.output), "tool_call_id": self.call_id}


class ReasoningItem(Wire):
    """Of an answer that comes back; not read."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Any = None
    content: Any = None
    encrypted_content: Any = None
    status: str | None = None


class ReferenceItem(Wire):
    type: Annotated[Any, Only(reason="nothing is stored: send the item itself")] = "item_reference"


def _kind(value: Any) -> str:
    """By its type; a message may leave it out."""
    found = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return found if isinstance(found, str) else "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ReferenceItem, Tag("item_reference")],
    Discriminator(_kind),
]
Items = Annotated[list[Item], Field(fail_fast=True, max_length=_MOST_ITEMS)]


def message_of(item: Any) -> dict[str, Any] | None:
    """As a chat template wants it; None for what it has no place for."""
    return None if isinstance(item, ReasoningItem) else item.for_template()


def text_of_parts(content: str | list[InputText | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)
