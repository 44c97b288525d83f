"""The form of a text, as a request specifies it."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from foredraft.errors import ForedraftError

FIELD = "structured_outputs"
MAX_BYTES = 2**19
"""The largest specification of a form: half a mebibyte compiles in about a second, if it compiles at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The form that a text must have: exactly one of these fields. Names are those of vLLM.

    json: a JSON schema, as a dict or as JSON text. json_object: any JSON object. regex: must match the whole text.
    choice: the text is one of these strings. grammar: a context-free grammar in Lark's syntax, as llguidance reads it.

    Raises ForedraftError with the name of the field. Errors that only the grammar's compiler can find (a schema that nothing
    satisfies, a regular expression without end) are raised when the request is submitted, before anything runs.
    """

    json: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise ForedraftError(f"{FIELD}.json_object must be true or false, not {self.json_object!r}")
        given = [one.name for one in fields(self) if getattr(self, one.name) not in (None, False)]
        if len(given) != 1:
            what = f"{' and '.join(given)} are given" if given else "none is given"
            raise ForedraftError(f"{FIELD} takes exactly one of {', '.join(_NAMES)}; {what}")
        if self.json is not None:
            _check_schema(self.json)
            _check_size("json", self.schema)
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ForedraftError(f"{FIELD}.{name} must be a non-empty string, not {value!r}")
            _check_size(name, value or "")
        if self.choice is not None:
            _check_choice(self.choice)
            object.__setattr__(self, "choice", tuple(self.choice))
            _check_size("choice", "".join(self.choice))

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in _NAMES if getattr(self, name) not in (None, False))

    @property
    def schema(self) -> str:
        """The JSON schema as JSON text; for json_object, that of any object."""
        if self.json_object:
            return '{"type": "object"}'
        return self.json if isinstance(self.json, str) else json_text.dumps(self.json)


_NAMES = tuple(one.name for one in fields(StructuredOutputs))


def _check_size(name: str, text: str) -> None:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise ForedraftError(
            f"{FIELD}.{name} contains a lone surrogate, which is not valid in a text: leave it out"
        ) from None
    if num_bytes > MAX_BYTES:
        raise ForedraftError(f"{FIELD}.{name} has {num_bytes} bytes: at most {MAX_BYTES} are allowed")


def _check_schema(schema: object) -> None:
    wrong = f"{FIELD}.json must be a JSON schema: an object, or JSON text of one"
    if isinstance(schema, str):
        _check_size("json", schema)
        try:
            schema = json_text.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ForedraftError(f"{wrong}; this is not valid JSON ({error})") from None
    elif isinstance(schema, Mapping):
        try:
            json_text.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ForedraftError(f"{wrong}; this cannot be written as JSON ({error})") from None
    if not isinstance(schema, Mapping):
        raise ForedraftError(f"{wrong}, not {schema!r}")


def _check_choice(choice: object) -> None:
    good = isinstance(choice, Sequence) and not isinstance(choice, str | bytes) and len(choice) > 0
    if not good or not all(isinstance(one, str) and one for one in choice):  # type: ignore[attr-defined]
        raise ForedraftError(f"{FIELD}.choice must be a list of strings, at least one and none empty, not {choice!r}")
