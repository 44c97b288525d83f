"""The messages of a conversation, and what a chat template is given for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema, model_validator

from foredraft.server.wire.base import Only, Wire
from foredraft.server.wire.tools import MOST_TOOLS, ToolCall

_MOST_PARTS = 256

_NOT_READ = "Of an answer that comes back as history; not read."
OfAnAnswer = Annotated[Any, Field(description=_NOT_READ)]


def _text_only(kind: str) -> str:
    if kind != "text":
        raise ValueError(f"{kind[:40]!r} is not supported: the model reads text only, in parts of the type 'text'")
    return kind


class TextPart(Wire):
    type: Annotated[str, AfterValidator(_text_only), WithJsonSchema({"const": "text", "type": "string"})]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _name_other_kinds(cls, value: Any) -> Any:
        """An image is refused for being one, not for the fields that images have."""
        is_other = isinstance(value, dict) and isinstance(value.get("type"), str) and value["type"] != "text"
        return {"type": value["type"], "text": ""} if is_other else value


_OF_ASSISTANT: dict[str, Any] = {"const": "assistant"}
_CONTENT_CALLS_OR_REFUSAL: dict[str, Any] = {
    "anyOf": [
        {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}},
        {
            "required": ["tool_calls"],
            "properties": {"role": _OF_ASSISTANT, "tool_calls": {"type": "array", "minItems": 1}},
        },
        {"required": ["refusal"], "properties": {"role": _OF_ASSISTANT, "refusal": {"type": "string"}}},
    ]
}


class Message(Wire):
    """A developer's message is handed to the template as a system's. A refusal is what its assistant said, where there is no
    content."""

    model_config = ConfigDict(json_schema_extra=_CONTENT_CALLS_OR_REFUSAL)

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=_MOST_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    audio: Annotated[Any, Only(reason="text only")] = None
    function_call: Annotated[Any, Only(reason="use tool_calls")] = None

    annotations: OfAnAnswer = None
    parsed: OfAnAnswer = None
    reasoning: OfAnAnswer = None
    reasoning_content: OfAnAnswer = None
    reasoning_details: OfAnAnswer = None
    reasoning_items: OfAnAnswer = None
    thinking_blocks: OfAnAnswer = None
    provider_specific_fields: OfAnAnswer = None
    images: OfAnAnswer = None
    additional_kwargs: OfAnAnswer = None
    response_metadata: OfAnAnswer = None
    usage_metadata: OfAnAnswer = None
    invalid_tool_calls: OfAnAnswer = None
    id: OfAnAnswer = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        is_answer = self.role == "assistant"
        if self.content is None and not (is_answer and (self.tool_calls or self.refusal is not None)):
            raise ValueError("content is missing")
        if self.tool_calls and not is_answer:
            raise ValueError("tool_calls belong to an assistant's message")
        return self

    def unread(self) -> Iterator[str]:
        yield from super().unread()
        if self.role != "assistant":
            yield from (name for name in _ANSWERED if getattr(self, name) is not None)

    def for_template(self) -> dict[str, Any]:
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self._text}
        if self.name is not None:
            found["name"] = self.name
        if self.tool_calls:
            found["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            found["tool_call_id"] = self.tool_call_id
        return found

    @property
    def _text(self) -> str | None:
        if self.content is None and self.role == "assistant":
            return self.refusal
        return "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content


_ANSWERED = ("refusal", *(name for name, one in Message.model_fields.items() if one.description == _NOT_READ))
"""Fields that only an assistant's message has."""
