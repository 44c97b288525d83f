"""What every request and answer of the wire shares."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function

UNKNOWN = "unknown_field"
"""The type of the error for it; its context has the name."""


class Wire(BaseModel):
    """A request. Types are not converted, and a field that is not known is refused by its name."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: Any) -> Any:
        """The first one only: of a hundred thousand, pydantic would report each."""
        known = cls._names()
        unknown = next((name for name in value if name not in known), None) if isinstance(value, dict) else None
        if unknown is not None:
            raise PydanticCustomError(UNKNOWN, "there is no such field", {"name": str(unknown)[:100]})
        return value

    @classmethod
    @cache
    def _names(cls) -> frozenset[str]:
        return frozenset(one.alias or name for name, one in cls.model_fields.items())


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
