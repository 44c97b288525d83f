"""What every request and answer of the wire shares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function

REFUSED = "refused_field"
"""The type of the error for a field of `Refusing`; its context has the name."""


class Wire(BaseModel):
    """A request. Types are not converted. Fields that are not known are kept apart: `unread` names them."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    def unread(self) -> Iterator[str]:
        """The given fields that nothing reads, as messages[2].mood, in the order of the fields. A null asks for nothing."""
        for name, one in type(self).model_fields.items():
            yield from _unread_in(getattr(self, name), one.alias or name)
        yield from (name for name, value in (self.model_extra or {}).items() if value is not None)


def _unread_in(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, Wire):
        yield from (f"{place}.{name}" for name in value.unread())
    elif isinstance(value, list):
        for index, one in enumerate(value):
            if isinstance(one, Wire):
                yield from (f"{place}[{index}].{name}" for name in one.unread())


class Answer(BaseModel):
    """What is sent back."""

    model_config = ConfigDict(protected_namespaces=())


def if_any() -> Any:
    """The default of a field that is left out where there is nothing to say."""
    return Field(None, exclude_if=lambda value: value is None)


MOST_TEXTS = 128
"""Texts that one request may ask for, all prompts together; OpenAI's own bound for n."""
MOST_STRINGS = 64
MOST_IDS = 1024
MOST_ALLOWED = 16384
MOST_TOP = 20

Strings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1000)]], Field(fail_fast=True, max_length=MOST_STRINGS)
]
Choices = Annotated[
    list[Annotated[str, Field(json_schema_extra={"minLength": 1})]],
    Field(fail_fast=True, json_schema_extra={"minItems": 1}),
]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True, max_length=MOST_IDS)]
AllowedIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True, min_length=1, max_length=MOST_ALLOWED)]
TopCount = Annotated[int, Field(ge=0, le=MOST_TOP)]


class Only:
    """Marks a field that is known and not honoured: it takes the values that ask for nothing, and refuses others with the
    reason."""

    def __init__(self, *neutral: Any, reason: str) -> None:
        self._neutral = (None, *neutral)
        self._reason = f"not supported: {reason}"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, _: CoreSchema, __: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(self._neutral), "description": self._reason}

    def _check(self, value: Any) -> Any:
        if not any(type(value) is type(one) and value == one for one in self._neutral):
            raise ValueError(self._reason)
        return value
