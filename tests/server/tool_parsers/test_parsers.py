"""Parsers turn texts, well-formed and hostile, into content and calls: the same however texts are cut, and without losing anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.server.tool_parsers import (
    CallArguments,
    CallStart,
    Content,
    NamedParser,
    Piece,
    RequiredParser,
    ToolParser,
    detect_parser,
)
from foredraft.server.tool_parsers.hermes import HermesParser
from foredraft.server.tool_parsers.llama3_json import Llama3JsonParser
from foredraft.server.tool_parsers.parsed_pieces import merge_adjacent

TOOLS = {"weather", "add", "größe"}
MAKERS: dict[str, Callable[[], ToolParser]] = {
    "hermes": lambda: HermesParser(TOOLS),
    "hermes, one call": lambda: HermesParser(TOOLS, parallel=False),
    "llama3_json": lambda: Llama3JsonParser(TOOLS),
    "named": lambda: NamedParser("add"),
    "required": lambda: RequiredParser(TOOLS),
}
CALL = '{"name": "add", "arguments": {"a": 1}}'


def parsed(parser: ToolParser, pieces: Sequence[str]) -> list[Piece]:
    found = [piece for text in pieces for piece in parser.feed(text)]
    return merge_adjacent([*found, *parser.finish()])


def hermes(text: str, **settings: Any) -> list[Piece]:
    return parsed(HermesParser(TOOLS, **settings), [text])


def llama(text: str) -> list[Piece]:
    return parsed(Llama3JsonParser(TOOLS), [text])


def added(arguments: str = '{"a": 1}', name: str = "add") -> list[Piece]:
    return [CallStart(name), CallArguments(arguments)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", added()),
        (f"<tool_call>{CALL}</tool_call>", added()),
        (f"I add.\n<tool_call>\n{CALL}\n</tool_call>\n", [Content("I add."), *added()]),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", [*added(), *added()]),
        (f" a <tool_call>{CALL}</tool_call> b ", [Content(" a"), *added(), Content("b ")]),
        (
            '<tool_call>{"arguments": {"city": "Köln 🌧 </tool_call> <tool_call>"}, "name": "größe"}</tool_call>',
            added('{"city": "Köln 🌧 </tool_call> <tool_call>"}', "größe"),
        ),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', added()),
        (
            '<tool_call>{"name": "add", "arguments": { "x" : [1.5e3, {"y": null}] }}</tool_call>',
            added('{ "x" : [1.5e3, {"y": null}] }'),
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_hermes_calls_are_parsed(text: str, expected: list[Piece]) -> None:
    assert hermes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>{CALL}",
        f"<tool_call>{CALL}</tool_cal",
        f"<tool_call>{CALL}<tool_call>",
        "<tool_call>",
        "  <tool_call>  ",
        "<tool_call></tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>',
        "<tool_call>{'name': 'add', 'arguments': {}}</tool_call>",
        '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add"}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "no object"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 01}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": "\n"}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>',
        f"<tool_call>[{CALL}]</tool_call>",
        f"<tool_call>{CALL} and so on</tool_call>",
        '<tool_call>{"name": "add", "arguments": ' + '{"a": ' * 100_000,
        f'<tool_call>{{"name": "add", "arguments": {{"a": {"9" * 5000}}}}}</tool_call>',
        "</tool_call> <tool_cal> <tool_",
        "text",
        "",
        " \n",
    ],
    ids=lambda text: text[:40],
)
def test_text_that_is_not_a_call_is_content(text: str) -> None:
    assert hermes(text) == ([Content(text)] if text else [])


def test_deeply_nested_arguments_are_parsed() -> None:
    deep = '{"a": ' * 50_000 + "1" + "}" * 50_000
    assert hermes(f'<tool_call>{{"name": "add", "arguments": {deep}}}</tool_call>') == added(deep)


def test_a_valid_call_after_a_broken_one_is_parsed() -> None:
    broken = '<tool_call>{"name": "add", </tool_call>'
    assert hermes(f"{broken}\n<tool_call>{CALL}</tool_call>") == [Content(broken), *added()]
    unclosed = '<tool_call>{"name": "'
    assert hermes(f"{unclosed}<tool_call>{CALL}</tool_call>") == [Content(unclosed), *added()]


def test_without_parallel_calls_only_one_is_parsed() -> None:
    text = f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>"
    assert hermes(text, parallel=False) == [*added(), Content(f"<tool_call>{CALL}</tool_call>")]


BARE = '{"name": "add", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BARE, added()),
        (f"\n\n {BARE}\n", added()),
        (f"<|python_tag|>{BARE}", added()),
        (f"Well: <|python_tag|>{BARE}", [Content("Well:"), *added()]),
        (f"{BARE}; {BARE};{BARE}", [*added(), *added(), *added()]),
        (f"{BARE}{BARE}", [*added(), *added()]),
        (f"{BARE};<|python_tag|>{BARE}", [*added(), Content(";"), *added()]),
        (f"{BARE} That is all", [*added(), Content("That is all")]),
        ('{"type": "function", "name": "add", "arguments": {}}', added("{}")),
        # no call either
        (f"For example {BARE}", [Content(f"For example {BARE}")]),
        (f"{BARE}; ", [*added(), Content("; ")]),
        ('<|python_tag|>print("x")', [Content('<|python_tag|>print("x")')]),
        ('{"name": "nobody", "parameters": {}}', [Content('{"name": "nobody", "parameters": {}}')]),
        ('{"a": 1} {"b": 2}', [Content('{"a": 1} {"b": 2}')]),
        ("{", [Content("{")]),
        (BARE[:-1], [Content(BARE[:-1])]),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_llama_calls_are_parsed(text: str, expected: list[Piece]) -> None:
    assert llama(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"[{BARE}]", added()),
        (f"[{BARE}, {BARE}]\n", [*added(), *added()]),
        (f"[{BARE}, ", added()),
        (f"[{BARE[:-1]}", added()),
        (
            f'[{BARE}, {{"name": "weather", "parameters": {{"city": "Ber',
            [*added(), CallStart("weather"), CallArguments('{"city": "Ber')],
        ),
        ('[{"name": "add", "parameters": {"a": 12', [CallStart("add"), CallArguments('{"a": 12')]),
        ('[{"parameters": {"a": 1}, "name": "add"}]', added()),
        ('[{"name": "ad', [Content('[{"name": "ad')]),
        (f"[{BARE},\n {{\n ", added()),
        (f'[{BARE}, {{"name', added()),
        (f'[{BARE}, {{"name": "weather", "parameters"', added()),
        (f'[{{"name": "add", "parameters": {{"a": {"9" * 5000}}}}}]', added(f'{{"a": {"9" * 5000}}}')),
        (f'[{{"name": "add", "parameters": {{"a": {"9" * 5000}', added(f'{{"a": {"9" * 5000}')),
        ("[", [Content("[")]),
        ("no list", [Content("no list")]),
        ('[{"name": "nobody", "parameters": {}}]', [Content('[{"name": "nobody", "parameters": {}}]')]),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_required_calls_are_parsed(text: str, expected: list[Piece]) -> None:
    assert parsed(RequiredParser(TOOLS), [text]) == expected


def test_arguments_of_required_calls_are_streamed() -> None:
    parser = RequiredParser(TOOLS)
    assert parser.feed('[{"name": "weather", "parameters": {"city": "Ber') == [
        CallStart("weather"),
        CallArguments('{"city": "Ber'),
    ]
    assert parser.feed("lin") == [CallArguments("lin")]
    assert parser.feed('"}}]') == [CallArguments('"}')]
    assert parser.finish() == []


def test_a_long_number_is_scanned_in_parts() -> None:
    digits = "9" * 3000
    text = f'[{{"name": "add", "parameters": {{"a": {digits}, "b": -1.5}}}}]'
    assert parsed(RequiredParser(TOOLS), list(text)) == added(f'{{"a": {digits}, "b": -1.5}}')


def test_a_named_call_is_the_whole_text() -> None:
    assert parsed(NamedParser("add"), ['{"a"', "", ": 1}"]) == added('{"a": 1}')
    assert parsed(NamedParser("add"), [""]) == []


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<tool_", "call>", "<|python_tag|>", "<|python", "\n", " ", ";", ",", "[", "]", "{", "}", '"', "\\",
        "\\ud83c", '"name"', ": ", '"add"', '"arguments"', '"parameters"', '{"a": 1}', CALL, BARE, "ü", "🌧", "12", "true", "text",
    ]
)  # fmt: skip
TEXTS = st.lists(FRAGMENTS | st.text(max_size=3), max_size=14).map("".join)


@pytest.mark.parametrize("kind", MAKERS)
@given(data=st.data(), text=TEXTS)
def test_results_do_not_depend_on_how_texts_are_cut(kind: str, data: Any, text: str) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=20).map(sorted))
    cut = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parsed(MAKERS[kind](), [text])
    assert parsed(MAKERS[kind](), cut) == whole
    assert parsed(MAKERS[kind](), list(text)) == whole


@pytest.mark.parametrize("kind", ["hermes", "hermes, one call", "llama3_json"])
@given(text=TEXTS)
def test_no_text_is_lost(kind: str, text: str) -> None:
    """Without a call the content is the text. With a call, every piece of content is in the text in order, and each call has a known
    name and an object as arguments."""
    found = parsed(MAKERS[kind](), [text])
    if not any(isinstance(piece, CallStart) for piece in found):
        assert found == ([Content(text)] if text else [])
        return
    at = 0
    for piece in found:
        if isinstance(piece, CallStart):
            assert piece.name in TOOLS
        elif isinstance(piece, Content):
            between, at = text[at : text.index(piece.text, at)], text.index(piece.text, at) + len(piece.text)
            assert "text" not in between
        else:
            assert isinstance(json.loads(piece.text), dict)
            if piece.text in text[at:]:
                at = text.index(piece.text, at) + len(piece.text)


SEGMENTS = st.lists(
    st.tuples(st.just("call"), st.sampled_from(sorted(TOOLS)), st.dictionaries(st.text(max_size=4), st.text(max_size=6), max_size=2))
    | st.tuples(st.just("text"), st.sampled_from(["a b", "<tool_call>", '<tool_call>{"name": 1}</tool_call>', "{}", "ü🌧"]), st.none()),
    max_size=6,
)  # fmt: skip


@given(SEGMENTS, st.integers(1, 7))
def test_generated_hermes_texts_are_parsed(segments: list[Any], size: int) -> None:
    text, expected = "", []
    for kind, what, arguments in segments:
        if kind == "text":
            text += f"{what}!"
            expected.append(Content(f"{what}!"))
        else:
            written = json.dumps(arguments, ensure_ascii=False)
            body = json.dumps({"name": what}, ensure_ascii=False)[:-1] + f', "arguments": {written}}}'
            text += f"\n<tool_call>\n{body}\n</tool_call>\n"
            expected += [CallStart(what), CallArguments(written)]
    found = parsed(HermesParser(TOOLS), [text[at : at + size] for at in range(0, len(text), size)])
    assert found == merge_adjacent(expected)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ '<tool_call>\\n{\\\"name\\\": ...  \\\"arguments\\\": ...}\\n</tool_call>' }}", "hermes"),
        ("<tool_call><function=name> arguments", None),
        ("<tool_call>name<arg_key> arguments", None),
        ("""{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}""", "llama3_json"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
    ],
)  # fmt: skip
def test_the_form_of_calls_is_detected_from_the_template(template: str, expected: str | None) -> None:
    assert detect_parser(template) == expected
