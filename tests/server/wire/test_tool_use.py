"""The schema of a call that is required, alone or in a list, into which each function's own schema is moved with its references."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft import ForedraftError, StructuredOutputs
from foredraft.server.tool_parsers import PARAMETERS
from foredraft.server.wire.tool_use import FunctionTool, ToolUse, _rebased

BASE = "#/items/0"


def moved(schema: dict[str, Any]) -> dict[str, Any]:
    return {"items": [_rebased(schema, BASE)]}


@pytest.mark.parametrize("name", ["unit", "default", "const", "enum", "examples", "properties", "$ref"])
@pytest.mark.parametrize("keyword", ["properties", "patternProperties", "$defs"])
def test_a_reference_is_followed_whatever_a_property_is_called(name: str, keyword: str) -> None:
    schema = {keyword: {name: {"$ref": "#/definitions/U"}}, "definitions": {"U": {"enum": ["C"]}}}
    assert moved(schema)["items"][0][keyword][name] == {"$ref": f"{BASE}/definitions/U"}


@pytest.mark.parametrize("keyword", ["default", "const", "enum", "examples"])
def test_data_is_not_changed(keyword: str) -> None:
    value = {"$ref": "#/definitions/U"}
    for data in (value, [value]):
        assert _rebased({keyword: data}, BASE) == {keyword: data}


PROPERTIES = {"properties": {"a": {"type": "integer"}}}


def use_of(parameters: dict[str, Any] | None, *, is_named: bool) -> ToolUse:
    choice = "f" if is_named else "required"
    return ToolUse([FunctionTool(name="f", parameters=parameters)], choice, is_named=is_named)


@pytest.mark.parametrize("parameters", [None, {}, PROPERTIES, {"type": "object", **PROPERTIES}], ids=str)
def test_required_arguments_are_an_object(parameters: dict[str, Any] | None) -> None:
    expected = {"type": "object", **(parameters or {})}
    assert use_of(parameters, is_named=True).structured_outputs() == StructuredOutputs(json=expected)
    outputs: Any = use_of(parameters, is_named=False).structured_outputs()
    (call,) = outputs.json["items"]["anyOf"]
    assert call["properties"][PARAMETERS] == expected


@pytest.mark.parametrize("kind", ["array", "string", None, ["object", "null"]], ids=str)
@pytest.mark.parametrize("is_named", [True, False])
def test_required_arguments_of_another_type_are_refused(kind: Any, is_named: bool) -> None:
    with pytest.raises(ForedraftError, match="tools: the parameters of 'f' must have the type \"object\""):
        use_of({"type": kind}, is_named=is_named).structured_outputs()
