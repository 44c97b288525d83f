"""Tools and their calls, as both ways of chatting use them: what the template is told, what form a call is held to, and how it
is found in the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field
from pydantic_core import from_json

from foredraft.errors import ForedraftError
from foredraft.sampling import StructuredOutputs
from foredraft.server.tool_parsers import NAME, PARAMETERS, PARSERS, NamedParser, RequiredParser, ToolParser
from foredraft.server.wire.base import Wire

MOST_TOOLS = 128

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords of a schema whose values are no schemas."""


class CalledFunction(Wire):
    """arguments: JSON text, as a model wrote it."""

    name: str
    arguments: str | None = None


class ToolCall(Wire):
    """index, provider_specific_fields: of an answer that comes back as history; not read."""

    id: str | None = None
    type: Literal["function"] | None = "function"
    index: int | None = None
    provider_specific_fields: Any = None
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Templates print the arguments themselves, so they are handed over as what they stand for."""
        return call_for_template(self.id, self.function.name, self.function.arguments or "")


def call_for_template(call_id: str | None, name: str, arguments: str) -> dict[str, Any]:
    found: Any
    try:
        found = from_json(arguments or "{}", allow_inf_nan=False)
    except ValueError:
        found = arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": found}}


class FunctionTool(Wire):
    """strict: a call that is required, or of a named function, is held to the parameters in any case; one that the model makes
    of its own accord is not."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_template(self) -> dict[str, Any]:
        found = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {name: value for name, value in found.items() if value is not None}}


class Tool(Wire):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Wire):
    name: str


class NamedChoice(Wire):
    type: Literal["function"]
    function: NamedFunction


Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says about tools. choice: a mode, or the name of the one function that must be called.

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
        return [] if self._is_off else [one.for_template() for one in self.functions]

    def unread(self, form: str) -> Iterator[str]:
        """Fields that are known and not honoured. form: of their names."""
        if not self.is_forced and not self._is_off:
            yield from (form.format(index) for index, one in enumerate(self.functions) if one.strict)

    def form(self) -> StructuredOutputs | None:
        """What the text is held to. Raises ForedraftError for parameters that cannot be read."""
        if self.is_named:
            called = next(one for one in self.functions if one.name == self.choice)
            return StructuredOutputs(json=_ANY_OBJECT if called.parameters is None else called.parameters)
        return StructuredOutputs(json=self._list_schema()) if self.is_forced else None

    def parser(self, name: str | None) -> ToolParser | None:
        """For one text. name: of the form in which the model calls of its own accord, one of PARSERS; None: it is not known."""
        if self.is_named:
            return NamedParser(self.choice)
        if self.is_forced:
            return RequiredParser(self._names)
        if name is None or self._is_off:
            return None
        return PARSERS[name](self._names, parallel=self.parallel)

    @property
    def _names(self) -> frozenset[str]:
        return frozenset(one.name for one in self.functions)

    @property
    def _is_off(self) -> bool:
        return self.choice == "none" or not self.functions

    def _list_schema(self) -> dict[str, Any]:
        """Of a list of calls; references inside the parameters lead to where they now stand."""
        calls = [
            {
                "type": "object",
                "properties": {
                    NAME: {"const": one.name},
                    PARAMETERS: _rebased(
                        _ANY_OBJECT if one.parameters is None else one.parameters,
                        f"#/items/anyOf/{index}/properties/{PARAMETERS}",
                    ),
                },
                "required": [NAME, PARAMETERS],
                "additionalProperties": False,
            }
            for index, one in enumerate(self.functions)
        ]
        most = {} if self.parallel else {"maxItems": 1}
        return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most}


def _rebased(schema: dict[str, Any], base: str) -> dict[str, Any]:
    """The schema, to stand at `base` of another one."""
    try:
        return {key: _rebased_value(key, value, base) for key, value in schema.items()}
    except RecursionError:
        raise ForedraftError("tools: the parameters of a function are too deep") from None


def _rebased_value(key: str, value: Any, base: str) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return base + value[1:]
    if isinstance(value, dict) and key not in _DATA:
        return {name: _rebased_value(name, one, base) for name, one in value.items()}
    if isinstance(value, list) and key not in _DATA:
        return [_rebased_value("", one, base) for one in value]
    return value


def new_call_id() -> str:
    return f"call_{uuid4().hex}"
