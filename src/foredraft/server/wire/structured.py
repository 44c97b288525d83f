"""The ways to say what form a text must have: OpenAI's response_format, vLLM's structured_outputs and guided_*."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from foredraft.sampling import StructuredOutputs
from foredraft.server.wire.base import Choices, Wire


class TextFormat(Wire):
    type: Literal["text"]


class JsonObjectFormat(Wire):
    type: Literal["json_object"]


class JsonSchema(Wire):
    """strict: a schema is kept to in any case."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Wire):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredFields(Wire):
    """vLLM's structured_outputs; exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None

    def as_params(self) -> StructuredOutputs:
        return StructuredOutputs(
            json=self.json_,
            json_object=bool(self.json_object),
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
        )


def of_response_format(wanted: TextFormat | JsonObjectFormat | JsonSchemaFormat) -> StructuredOutputs | None:
    if isinstance(wanted, JsonSchemaFormat):
        return of_json_schema(wanted.json_schema)
    return StructuredOutputs(json_object=True) if isinstance(wanted, JsonObjectFormat) else None


def of_json_schema(wanted: JsonSchema) -> StructuredOutputs:
    return StructuredOutputs(json_object=True) if wanted.schema_ is None else StructuredOutputs(json=wanted.schema_)
