"""Grammars, and walks of texts through them: a mask is a function of the output alone."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from foredraft.errors import ForedraftError
from foredraft.model import EMBEDDED
from foredraft.sampling import StructuredOutputs, has_id, only_id
from foredraft.text.grammar import Grammar, Grammars, GrammarWalk

END = 0
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS = {
    "json": StructuredOutputs(json=SCHEMA),
    "json_object": StructuredOutputs(json_object=True),
    "slashes": StructuredOutputs(regex="[ab]/\nc\\\\"),
    "regex": StructuredOutputs(regex="(cat|catalog|dog)s? sat on the (mat|hat)[.!]"),
    "choice": StructuredOutputs(choice=["yes", "yes, sir", "no (/[a-z]+\\d/)", "\n é\t'\"", "🙂"]),
    "grammar": StructuredOutputs(grammar='start: e\ne: t | e "+" t\nt: /[0-9]+/ | "(" e ")"'),
}
PROMPT = [5, 6, 7]


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(EMBEDDED / "target")


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), [END])


def grammar(name: str) -> Grammar:
    return grammars().compile(FORMS[name])


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def some_text(walk: GrammarWalk, picks: list[int]) -> list[int]:
    """A text of the grammar. picks: which of the allowed ids to take at each step."""
    output: list[int] = []
    for pick in picks:
        allowed = np.flatnonzero(np.unpackbits(walk.allowed(PROMPT, output), bitorder="little"))
        output.append(int(allowed[pick % len(allowed)]))
        if output[-1] == END:
            break
    return output


def mask_violations(form: Grammar, picks: list[int], jumps: list[tuple[int, int, list[int]]]) -> int:
    """How often a walk that jumps back and forth, with drafts of right and wrong tokens, differs from new walks. jumps: (length of the
    history, number of the text's tokens drafted, other draft tokens after them)"""
    used, count = form.start(len(PROMPT)), 0
    text = some_text(form.start(len(PROMPT)), picks)
    for place, num_drafted, others in jumps:
        history = PROMPT + text[: place % (len(text) + 1)]
        drafted = (PROMPT + text)[len(history) : len(history) + num_drafted] + others
        fresh = form.start(len(PROMPT)).allowed(history + drafted, [])
        count += not np.array_equal(used.allowed(history, drafted), fresh)
        count += used.num_allowed(history, drafted) != form.start(len(PROMPT)).num_allowed(history, drafted)
        count += used.forced(history, drafted, 3) != form.start(len(PROMPT)).forced(history + drafted, [], 3)
    return count


picks = st.lists(st.integers(0, 2**30), max_size=12)
jumps = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 4), st.lists(st.integers(0, 4200), max_size=2)), min_size=1, max_size=8
)


@pytest.mark.parametrize("name", FORMS)
@given(picks=picks, jumps=jumps)
@settings(max_examples=40, deadline=None)
def test_a_mask_along_a_draft_is_the_mask_from_scratch(
    name: str, picks: list[int], jumps: list[tuple[int, int, list[int]]]
) -> None:
    assert mask_violations(grammar(name), picks, jumps) == 0


BACK_AND_FORTH = [(3, 4, []), (3, 1, []), (2, 2, [9]), (5, 0, []), (1, 3, []), (0, 0, [])]


def test_a_walk_that_does_not_roll_back_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    picks = [7, 1, 5, 3, 2, 9, 4]
    assert mask_violations(grammar("json"), picks, BACK_AND_FORTH) == 0

    def forget_to(self: GrammarWalk, place: int) -> None:
        del self._walked[place:]

    monkeypatch.setattr(GrammarWalk, "_roll_back", forget_to)
    assert mask_violations(grammar("json"), picks, BACK_AND_FORTH) > 0


def test_a_walk_that_keeps_the_masks_of_a_rejected_draft_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    right = GrammarWalk._roll_back

    def keep_masks(self: GrammarWalk, place: int) -> None:
        kept = dict(self._masks)
        right(self, place)
        self._masks = kept

    form, asked = grammar("json"), ids_of('{"name": "a')
    other = ids_of('{"name": "abcdefgh')

    def violations() -> int:
        walk, count = form.start(0), 0
        for output in (other, asked, [*asked, *ids_of('"')], other):
            for n in range(len(output) + 1):
                count += not np.array_equal(walk.allowed([], output[:n]), form.start(0).allowed([], output[:n]))
        return count

    assert violations() == 0
    monkeypatch.setattr(GrammarWalk, "_roll_back", keep_masks)
    assert violations() > 0


@pytest.mark.parametrize("name", FORMS)
@given(picks=picks)
@settings(max_examples=20, deadline=None)
def test_forced_tokens_are_the_only_allowed_ones(name: str, picks: list[int]) -> None:
    walk = grammar(name).start(len(PROMPT))
    text = some_text(walk, picks)
    history = PROMPT + [token for token in text if token != END]
    forced = walk.forced(history, [], 6)
    for place, token in enumerate(forced):
        assert only_id(walk.allowed(history, forced[:place])) == token
    assert walk.num_allowed(history, forced) == len(forced)
    assert walk.forced(history, [], 0) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json", '{"name": "Bo", "age": 12}'),
        ("json", '{\n    "name": "Bo",\n    "age": 12\n}'),
        ("json", '{"name":"","age":-3}'),
        ("json_object", '{"a": [1, {"b": null}]}'),
        ("regex", "catalogs sat on the hat!"),
        ("slashes", "b/\nc\\"),
        ("choice", "no (/[a-z]+\\d/)"),
        ("choice", "\n é\t'\""),
        ("choice", "🙂"),
        ("grammar", "(1+2)+3"),
    ],
)
def test_a_valid_text_can_be_written_and_may_then_end(name: str, text: str) -> None:
    """Byte by byte at least: for text that the grammar forces, it allows only one tokenization."""
    walk, output = grammar(name).start(0), []
    while (written := tokenizer().decode(output)) != text:
        allowed = np.flatnonzero(np.unpackbits(walk.allowed([], output), bitorder="little"))
        raw = text.encode()
        fitting = [token for token in allowed.tolist() if raw.startswith(bytes_of([*output, token])) and token != END]
        assert fitting, (written, text)
        output.append(max(fitting, key=lambda token: len(bytes_of([token]))))
    assert has_id(walk.allowed([], output), END)


def bytes_of(ids: list[int]) -> bytes:
    return bytes(grammars()._tokenizer.decode_bytes(ids))


@pytest.mark.parametrize(("name", "text"), [("json", '{"name": "Bo"}'), ("choice", "yes, "), ("regex", "cat sat")])
def test_an_unfinished_text_may_not_end(name: str, text: str) -> None:
    walk = grammar(name).start(0)
    output = ids_of(text)[: walk.num_allowed([], ids_of(text))]
    assert not has_id(walk.allowed([], output), END)


def test_after_the_end_or_a_refused_token_only_the_end_is_allowed() -> None:
    walk = grammar("choice").start(0)
    for output in ([*ids_of("no"), 9], [END], [END, 9], [4095], [10**6], [*ids_of("yes"), END, END]):
        assert only_id(walk.allowed([], output)) == END
    assert walk.num_allowed([], [*ids_of("yes"), END, END]) == len(ids_of("yes")) + 1


def test_two_texts_of_one_grammar_are_independent() -> None:
    form = grammar("choice")
    one, other = form.start(0), form.start(0)
    before = other.allowed([], []).copy()
    one.allowed([], ids_of("yes"))
    assert np.array_equal(other.allowed([], []), before)


def test_a_grammar_is_compiled_once_and_the_least_recently_used_is_evicted() -> None:
    few = Grammars(tokenizer(), [END], capacity=2)
    a, b, c = (StructuredOutputs(regex=letter) for letter in "abc")
    first = few.compile(a)
    assert few.compile(a) is first
    few.compile(b)
    assert few.compile(a) is first
    few.compile(c)
    assert few.compile(a) is first
    second = few.compile(b)
    assert few.compile(b) is second


IMPOSSIBLE = [
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"type": "object", "properties": {"a": False}, "required": ["a"]},
    {"enum": []},
    {"type": "integer", "minimum": 5, "maximum": 3},
    {"type": "array", "minItems": 5, "maxItems": 2},
    {"type": "strng"},
    {"$ref": "#"},
    {"$ref": "#/definitions/none"},
    {"$ref": "http://example.org/schema.json"},
    {"not": {}},
    {"type": "array", "uniqueItems": True},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "string", "pattern": "^(a{1000}){1000}$"},
    {"enum": list(range(60_000)), "type": "object"},
]
REFUSED = [
    *(("json", StructuredOutputs(json=schema)) for schema in IMPOSSIBLE),
    *(
        ("regex", StructuredOutputs(regex=regex))
        for regex in (
            "(a",
            "(?=a)b",
            "a\\",
            "[^\\x00-\\x{10ffff}]",
            "(a{1000}){1000}",
            "(((a{1000}){1000}){1000}){1000}",
        )
    ),
    *(
        ("grammar", StructuredOutputs(grammar=lark))
        for lark in ("start: a", "start: start", 'start: b\nb: b "x"', 'start: "', "x: y", "start: <none>")
    ),
]


@pytest.mark.parametrize(("name", "form"), REFUSED, ids=[f"{n}{i}" for i, (n, _) in enumerate(REFUSED)])
def test_unsupported_formats_are_refused_in_one_line_that_names_the_field(name: str, form: StructuredOutputs) -> None:
    with pytest.raises(ForedraftError) as caught:
        grammars().compile(form)
    assert str(caught.value).startswith(f"structured_outputs.{name}: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (StructuredOutputs(regex="[0-9"), "regex: unclosed character class"),
        (StructuredOutputs(json={"type": "string", "pattern": "(a"}), "json: regex parse error: unclosed group"),
        (
            StructuredOutputs(grammar='start: b\nb: "b" /[0-9/\n'),
            r'grammar: line 2, column 4: invalid regex "[0-9" (in regex): regex parse error: unclosed character class',
        ),
        (StructuredOutputs(grammar='start: "a" b'), 'grammar: line 1, column 8: unknown name: "b"'),
    ],
    ids=["regex", "json", "regex in a grammar", "grammar"],
)
def test_a_mistake_is_told_without_the_diagram_of_its_place(form: StructuredOutputs, reason: str) -> None:
    with pytest.raises(ForedraftError) as caught:
        grammars().compile(form)
    assert str(caught.value) == f"structured_outputs.{reason}"


@pytest.mark.parametrize(
    "text", ['root ::= "a"', '<start> ::= "a"', "root ::= a\na ::= [0-9]+", '{"type": "object"}', "[1]"]
)
def test_other_forms_of_grammars_are_told_that_lark_is_expected(text: str) -> None:
    with pytest.raises(
        ForedraftError, match=r"^structured_outputs.grammar: it must be in Lark's form, with rules such as"
    ):
        grammars().compile(StructuredOutputs(grammar=text))


BOMBS = ["b?((a{1000}){1000}){1000}", "([ab](c{1000}){1000}){1000}"]


@pytest.mark.parametrize("regex", BOMBS)
def test_a_grammar_that_explodes_later_ends_only_its_own_text(regex: str) -> None:
    """Texts of one grammar share its lazily computed states; other texts, and later ones, are not affected."""
    form = grammars().compile(StructuredOutputs(regex=regex))
    walk, other, output = form.start(0), form.start(0), list[int]()
    before = other.allowed([], []).copy()

    def go_on(num_tokens: int) -> None:
        for _ in range(num_tokens):
            output.append(int(np.flatnonzero(np.unpackbits(walk.allowed(output, []), bitorder="little"))[-1]))

    with pytest.raises(ForedraftError, match=r"^structured_outputs.regex: [^\n]*$"):
        go_on(4)
    for still_good in (other, walk, form.start(0)):
        assert np.array_equal(still_good.allowed([], []), before)
        assert still_good.num_allowed([], output[:1]) == 1


def test_exceeded_limits_never_look_like_the_end_of_a_text() -> None:
    """For earlier positions the walk then gives the same result or fails: it never refuses an allowed token."""
    walk = grammars().compile(StructuredOutputs(regex="[bc]((a{1000}){1000}){1000}")).start(0)
    output = [*ids_of("b"), *ids_of("aa") * 6]
    for last in (3, 6, 3, 6):
        with suppress(ForedraftError):
            walk.allowed([], output[:last])
    for _ in range(3):
        for last in (2, 1):
            with suppress(ForedraftError):
                assert walk.num_allowed([], output[:last]) == last


def test_a_tokenizer_without_an_end_token_is_refused() -> None:
    with pytest.raises(ForedraftError, match="end-of-sequence"):
        Grammars(tokenizer(), []).compile(FORMS["json"])


@given(picks=st.lists(st.integers(0, 2**30), min_size=80, max_size=80))
@settings(max_examples=30, deadline=None)
def test_any_choice_of_allowed_tokens_satisfies_the_schema(picks: list[int]) -> None:
    walk = grammar("json").start(len(PROMPT))
    text = some_text(walk, picks)
    assert walk.num_allowed(PROMPT, text) == len(text)
    if text[-1] == END:
        assert set(json.loads(tokenizer().decode(text[:-1]))) == {"name", "age"}
