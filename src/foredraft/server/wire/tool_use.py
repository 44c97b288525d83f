"""Tools in requests: their form for the chat template, the schema that a forced call must have, and the parser that finds calls
in the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field
from pydantic_core import from_json

from foredraft.errors import ForedraftError, shown
from foredraft.sampling import StructuredOutputs
from foredraft.server.tool_parsers import NAME, PARAMETERS, PARSERS, NamedParser, RequiredParser, ToolParser
from foredraft.server.wire.models import RequestModel

MAX_TOOLS = 128

_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords of JSON Schema whose values are data, not schemas."""
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values are schemas by name; a name may look like a keyword."""


class CalledFunction(RequestModel):
    """arguments: JSON text, as the model wrote it."""

    name: str
    arguments: str | None = None


class ToolCall(RequestModel):
    """index, provider_specific_fields: parts of an earlier response that is sent back as history; ignored."""

    id: str | None = None
    type: Literal["function"] | None = "function"
    index: int | None = None
    provider_specific_fields: Any = None
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        return call_for_template(self.id, self.function.name, self.function.arguments or "")


def call_for_template(call_id: str | None, name: str, arguments: str) -> dict[str, Any]:
    """A call with its arguments parsed, since templates serialise them. Arguments that are not JSON stay text."""
    parsed: Any
    try:
        parsed = from_json(arguments or "{}", allow_inf_nan=False)
    except ValueError:
        parsed = arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": parsed}}


class FunctionTool(RequestModel):
    """strict: ignored. The parameters of a call are always enforced if tool_choice requires the call, and never if the model
    makes it on its own."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_template(self) -> dict[str, Any]:
        fields = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


class Tool(RequestModel):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(RequestModel):
    name: str


class NamedChoice(RequestModel):
    type: Literal["function"]
    function: NamedFunction


Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request. choice: a mode, or the name of the function that must be called.

    Raises ForedraftError for a choice that the tools do not allow.
    """

    functions: Sequence[FunctionTool] = ()
    choice: str = "auto"
    is_named: bool = False
    parallel: bool = True

    def __post_init__(self) -> None:
        if self.is_named and self.choice not in self._names:
            raise ForedraftError(f"tool_choice names {self.choice[:64]!r}, which is not in tools")
        if self.choice == "required" and not self.functions:
            raise ForedraftError("tool_choice: required needs tools")

    @property
    def is_forced(self) -> bool:
        return self.is_named or self.choice == "required"

    def for_template(self) -> list[dict[str, Any]]:
        return [] if self._is_off else [function.for_template() for function in self.functions]

    def unenforced_fields(self, name: str) -> Iterator[str]:
        """Names of the strict fields that are not enforced. name: their form, with {} for the index of the tool."""
        if not self.is_forced and not self._is_off:
            yield from (name.format(index) for index, function in enumerate(self.functions) if function.strict)

    def structured_outputs(self) -> StructuredOutputs | None:
        """The form of a text that must be a call; None if no call is required. Raises ForedraftError for bad parameters."""
        if self.is_named:
            function = next(function for function in self.functions if function.name == self.choice)
            return StructuredOutputs(json=_object_schema(function))
        return StructuredOutputs(json=self._list_schema()) if self.is_forced else None

    def parser(self, name: str | None) -> ToolParser | None:
        """A new parser for one text. name: the parser for calls that the model makes on its own, from PARSERS, or None."""
        if self.is_named:
            return NamedParser(self.choice)
        if self.is_forced:
            return RequiredParser(self._names)
        if name is None or self._is_off:
            return None
        return PARSERS[name](self._names, parallel=self.parallel)

    @property
    def _names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)

    @property
    def _is_off(self) -> bool:
        return self.choice == "none" or not self.functions

    def _list_schema(self) -> dict[str, Any]:
        """The schema of a list of calls, with the references inside the parameters rebased."""
        calls = [
            {
                "type": "object",
                "properties": {
                    NAME: {"const": function.name},
                    PARAMETERS: _rebased(_object_schema(function), f"#/items/anyOf/{index}/properties/{PARAMETERS}"),
                },
                "required": [NAME, PARAMETERS],
                "additionalProperties": False,
            }
            for index, function in enumerate(self.functions)
        ]
        bounds = {} if self.parallel else {"maxItems": 1}
        return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **bounds}


def _object_schema(function: FunctionTool) -> dict[str, Any]:
    """The schema of a function's arguments, which are always an object. Raises ForedraftError for a schema of another type."""
    schema = {"type": "object", **(function.parameters or {})}
    if schema["type"] != "object":
        raise ForedraftError(
            f'tools: the parameters of {function.name!r} must have the type "object", or none, not {shown(schema["type"])}'
        )
    return schema


def _rebased(schema: dict[str, Any], base: str) -> dict[str, Any]:
    """A copy of a schema that can be placed at the JSON pointer `base` of another schema."""
    try:
        return {key: _rebased_value(key, value, base) for key, value in schema.items()}
    except RecursionError:
        raise ForedraftError("tools: the parameters of a function are nested too deeply") from None


def _rebased_value(key: str, value: Any, base: str) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return base + value[1:]
    if isinstance(value, dict) and key in _BY_NAME:
        return {name: _rebased_value("", member, base) for name, member in value.items()}
    if isinstance(value, dict) and key not in _DATA:
        return {name: _rebased_value(name, member, base) for name, member in value.items()}
    if isinstance(value, list) and key not in _DATA:
        return [_rebased_value("", item, base) for item in value]
    return value


def new_call_id() -> str:
    return f"call_{uuid4().hex}"
