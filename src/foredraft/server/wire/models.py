"""The base classes of requests and responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class RequestModel(BaseModel):
    """A request or a part of one. Types are not converted. Unknown fields are kept apart; `unknown_fields` names them."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    def unknown_fields(self) -> Iterator[str]:
        """Names of the given fields that nothing reads, such as messages[2].mood, in the order of the fields. A field that is null
        is left out: it asks for nothing."""
        for name, field in type(self).model_fields.items():
            yield from _unknown_fields_in(getattr(self, name), field.alias or name)
        yield from (name for name, value in (self.model_extra or {}).items() if value is not None)


def _unknown_fields_in(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, RequestModel):
        yield from (f"{path}.{name}" for name in value.unknown_fields())
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, RequestModel):
                yield from (f"{path}[{index}].{name}" for name in item.unknown_fields())


class ResponseModel(BaseModel):
    """A response, a chunk of one, or a part of either."""

    model_config = ConfigDict(protected_namespaces=())


def omit_if_none() -> Any:
    """The default of a response field that is left out of the JSON when it is None."""
    return Field(None, exclude_if=lambda value: value is None)
