"""StructuredOutputs: bad values that can be found without a grammar compiler are refused at once."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft import ForedraftError, SamplingParams, StructuredOutputs

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
LOOP: dict[str, Any] = {}
LOOP["a"] = LOOP

BAD: dict[str, list[Any]] = {
    "json": ["", "{", "3", "[]", "null", 3, [], b"{}", {"a": {1, 2}}, {"a": float("nan")}, LOOP, "[" * 100_000],
    "json_object": [None, 1, "yes"],
    "regex": ["", 3, ["a"], b"a"],
    "choice": [[], "ab", [""], [3], [None], b"ab", {"a"}],
    "grammar": ["", 3, ["start: A"]],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_in_one_line_that_names_the_field(name: str, value: Any) -> None:
    with pytest.raises(ForedraftError) as caught:
        StructuredOutputs(**{name: value})
    assert f"structured_outputs.{name}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["yes", [1, 2]])
def test_a_choice_that_is_no_list_of_strings_is_told_so(value: Any) -> None:
    with pytest.raises(ForedraftError, match=r"structured_outputs\.choice must be a list of strings, .* not "):
        StructuredOutputs(choice=value)


GOOD: dict[str, Any] = {
    "json": SCHEMA,
    "json_object": True,
    "regex": "[ab]+",
    "choice": ["yes", "no"],
    "grammar": 'start: "a"',
}


@pytest.mark.parametrize("name", GOOD)
def test_exactly_one_field_may_be_given(name: str) -> None:
    assert StructuredOutputs(**{name: GOOD[name]}).kind == name
    for other in GOOD.keys() - {name}:
        with pytest.raises(ForedraftError, match=rf"exactly one of .*{name}.*{other}|exactly one of .*{other}.*{name}"):
            StructuredOutputs(**{name: GOOD[name], other: GOOD[other]})


def test_no_field_at_all_is_refused() -> None:
    with pytest.raises(ForedraftError, match="exactly one of json, json_object, regex, choice, grammar; none is given"):
        StructuredOutputs()


def test_a_schema_is_the_same_text_given_as_dict_or_text() -> None:
    assert StructuredOutputs(json=SCHEMA).schema == StructuredOutputs(json=StructuredOutputs(json=SCHEMA).schema).schema


@pytest.mark.parametrize(("name", "value"), [("ignore_eos", True), ("min_tokens", 3)])
def test_parameters_that_continue_past_the_end_of_the_format_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ForedraftError, match=f"{name}.*structured_outputs"):
        SamplingParams(structured_outputs=StructuredOutputs(regex="a"), **{name: value})


@pytest.mark.parametrize("value", [{"regex": "a"}, "a", 3])
def test_other_types_than_structured_outputs_are_refused(value: Any) -> None:
    with pytest.raises(ForedraftError, match="structured_outputs must be a StructuredOutputs object"):
        SamplingParams(structured_outputs=value)
