"""Fields that constrain the form of the text: OpenAI's response_format, vLLM's structured_outputs and guided_*."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from foredraft.sampling import StructuredOutputs
from foredraft.server.wire.field_types import Choices
from foredraft.server.wire.models import RequestModel


class TextFormat(RequestModel):
    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    type: Literal["json_object"]


class JsonSchema(RequestModel):
    """strict: ignored, since a schema is always enforced."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredFields(RequestModel):
    """vLLM's structured_outputs. Exactly one field must be given."""

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


def of_response_format(response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat) -> StructuredOutputs | None:
    if isinstance(response_format, JsonSchemaFormat):
        return of_json_schema(response_format.json_schema)
    return StructuredOutputs(json_object=True) if isinstance(response_format, JsonObjectFormat) else None


def of_json_schema(json_schema: JsonSchema) -> StructuredOutputs:
    """Any JSON object, if the schema itself is left out."""
    schema = json_schema.schema_
    return StructuredOutputs(json_object=True) if schema is None else StructuredOutputs(json=schema)
