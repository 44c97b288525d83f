"""Types of request fields: their bounds, and fields that are known but not supported."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function

MAX_TEXTS = 128
"""Texts that one request may ask for, over all its prompts; OpenAI's own bound for n."""
MAX_STRINGS = 64
MAX_IDS = 1024
MAX_ALLOWED_IDS = 16384
MAX_TOP_LOGPROBS = 20

Strings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1000)]], Field(fail_fast=True, max_length=MAX_STRINGS)
]
Choices = Annotated[
    list[Annotated[str, Field(json_schema_extra={"minLength": 1})]],
    Field(fail_fast=True, json_schema_extra={"minItems": 1}),
]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True, max_length=MAX_IDS)]
AllowedIds = Annotated[
    list[Annotated[int, Field(ge=0)]], Field(fail_fast=True, min_length=1, max_length=MAX_ALLOWED_IDS)
]
TopCount = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class Unsupported:
    """Marks a field that is known but not supported. It accepts null and the values that ask for nothing, and rejects all
    others with the reason.

    neutral: the values that ask for nothing.
    """

    def __init__(self, *neutral: Any, reason: str) -> None:
        self._neutral = (None, *neutral)
        self._reason = f"not supported: {reason}"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, _: CoreSchema, __: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(self._neutral), "description": self._reason}

    def _check(self, value: Any) -> Any:
        if not any(type(value) is type(neutral) and value == neutral for neutral in self._neutral):
            raise ValueError(self._reason)
        return value
