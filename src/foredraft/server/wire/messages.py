"""The messages of a chat, and their form for a chat template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema, model_validator

from foredraft.server.wire.field_types import Unsupported
from foredraft.server.wire.models import RequestModel
from foredraft.server.wire.tool_use import MAX_TOOLS, ToolCall

_MAX_PARTS = 256

_ECHOED = "Part of an earlier response that is sent back as history; ignored."
EchoedField = Annotated[Any, Field(description=_ECHOED)]


def _text_only(part_type: str) -> str:
    if part_type != "text":
        raise ValueError(f"{part_type[:40]!r} is not supported: the model reads text only, in parts of type 'text'")
    return part_type


class TextPart(RequestModel):
    type: Annotated[str, AfterValidator(_text_only), WithJsonSchema({"const": "text", "type": "string"})]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _reduce_other_types(cls, value: Any) -> Any:
        """Keeps only the type of other parts, so that an image is rejected for its type and not for its fields."""
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


class Message(RequestModel):
    """In the template a developer's message is a system message, and an assistant's refusal is its content if it has none."""

    model_config = ConfigDict(json_schema_extra=_CONTENT_CALLS_OR_REFUSAL)

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=_MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    audio: Annotated[Any, Unsupported(reason="text only")] = None
    function_call: Annotated[Any, Unsupported(reason="use tool_calls")] = None

    annotations: EchoedField = None
    parsed: EchoedField = None
    reasoning: EchoedField = None
    reasoning_content: EchoedField = None
    reasoning_details: EchoedField = None
    reasoning_items: EchoedField = None
    thinking_blocks: EchoedField = None
    provider_specific_fields: EchoedField = None
    images: EchoedField = None
    additional_kwargs: EchoedField = None
    response_metadata: EchoedField = None
    usage_metadata: EchoedField = None
    invalid_tool_calls: EchoedField = None
    id: EchoedField = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        is_assistant = self.role == "assistant"
        if self.content is None and not (is_assistant and (self.tool_calls or self.refusal is not None)):
            raise ValueError("content is missing")
        if self.tool_calls and not is_assistant:
            raise ValueError("tool_calls are allowed only in an assistant's message")
        return self

    def unknown_fields(self) -> Iterator[str]:
        yield from super().unknown_fields()
        if self.role != "assistant":
            yield from (name for name in _ASSISTANT_FIELDS if getattr(self, name) is not None)

    def for_template(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self._text}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    @property
    def _text(self) -> str | None:
        if self.content is None and self.role == "assistant":
            return self.refusal
        return "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content


_ASSISTANT_FIELDS = ("refusal", *(name for name, field in Message.model_fields.items() if field.description == _ECHOED))
"""Fields that only an assistant's message can have."""
