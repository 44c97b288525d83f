"""The schema of a list of calls: each function's own schema is moved into it, with its references."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.server.wire.tool_use import _rebased

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
