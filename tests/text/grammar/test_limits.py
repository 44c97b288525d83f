"""The cost of hostile grammars is limited: they are refused or fail alone, and do not delay other requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from foredraft import LLM, AsyncLLM, ForedraftError, RequestError, SamplingParams, StructuredOutputs
from foredraft.model import EMBEDDED
from foredraft.text.grammar import GrammarLimits, Grammars, GrammarWalk
from foredraft.text.grammar.trials import Trials

END = 0
STORY = "Once upon a time, there was a little"
AMBIGUOUS = StructuredOutputs(grammar='start: e\ne: e e | e e e | "a" | ""')
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)


def an_object(count: int) -> dict[str, object]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}


def chain(count: int) -> str:
    rules = "\n".join(f'r{i}: r{i + 1} | "x" r{i + 1} "y"' for i in range(count))
    return f'start: r0\n{rules}\nr{count}: "z"'


def nested_refs(count: int) -> dict[str, object]:
    defs: dict[str, object] = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(count)
    }
    return {"$defs": {**defs, f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(EMBEDDED / "target")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(seed=0)


@pytest.fixture(autouse=True)
def _idle(llm: LLM) -> Iterator[None]:
    yield
    assert not llm.engine.has_work


HOSTILE = {
    "optional properties": (StructuredOutputs(json=an_object(5000)), "steps of the parser|processor time"),
    "pattern properties": (
        StructuredOutputs(
            json={"type": "object", "patternProperties": {f"^k{i}_[a-z]+$": {"type": "integer"} for i in range(1000)}}
        ),
        "more than 1 s of processor time",
    ),
    "multiples": (
        StructuredOutputs(json={"allOf": [{"type": "integer", "multipleOf": k} for k in (97, 89, 83)]}),
        "more than 1 s of processor time",
    ),
    "deep rules": (StructuredOutputs(grammar=chain(9000)), "nested too deeply"),
    "deep references": (StructuredOutputs(json=nested_refs(1000)), "nested too deeply"),
    "long literal": (StructuredOutputs(grammar=f'start: "{"ab" * 20_000}"'), "same 40000 bytes"),
    # which limit it exceeds first depends on the speed of the machine
    "repetitions": (
        StructuredOutputs(regex="((a{1000}){1000}){1000}"),
        "more memory and time|MiB|1 s of processor time",
    ),
    "all of any": (
        StructuredOutputs(
            json={"allOf": [{"anyOf": [an_object(1), {"properties": {f"b{i}": {}}}]} for i in range(18)]},
        ),
        "too large|processor time",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_grammars_that_are_too_expensive_to_compile_are_refused_with_the_limit(
    name: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """If compiled in this process, the deep ones would crash it and two others would not return."""
    form, why = HOSTILE[name]
    grammars = Grammars(tokenizer, [END], limits=GrammarLimits(compile_seconds=1))
    for _ in range(2):  # the second time the refusal is cached
        with pytest.raises(ForedraftError, match=why) as caught:
            grammars.compile(form)
        assert str(caught.value).startswith(f"structured_outputs.{form.kind}: ")
        assert "\n" not in str(caught.value)
    assert grammars.is_known(form)
    grammars.compile(StructuredOutputs(choice=["a"]))


def test_memory_for_one_grammar_is_bounded(tokenizer: PreTrainedTokenizerBase) -> None:
    many = StructuredOutputs(choice=[f"c{i * 7919 % 100003}" for i in range(75_000)])
    with pytest.raises(ForedraftError, match="MiB to compile"):
        Grammars(tokenizer, [END], limits=GrammarLimits(compile_bytes=2**20)).compile(many)


def test_the_memory_of_cached_grammars_is_bounded(tokenizer: PreTrainedTokenizerBase) -> None:
    forms = [StructuredOutputs(choice=[f"{k} {i}" for i in range(2000)]) for k in range(6)]
    size = Grammars(tokenizer, [END]).compile(forms[0]).num_bytes
    few = Grammars(tokenizer, [END], limits=GrammarLimits(cache_bytes=int(2.8 * size)))
    for form in forms:
        few.compile(form)
        assert few.num_bytes <= 2.8 * size
    assert few.is_known(forms[-1])
    assert not few.is_known(forms[0])


def test_a_grammar_that_has_grown_is_compiled_again(tokenizer: PreTrainedTokenizerBase) -> None:
    ticks = count()
    grammars = Grammars(tokenizer, [END], limits=GrammarLimits(clock=lambda: float(next(ticks)), worn_seconds=2.5))
    form = StructuredOutputs(regex="[a-z]*")
    first = grammars.compile(form)
    before = first.num_bytes
    for length in range(3):
        assert grammars.compile(form) is first
        first.start(0).allowed([5] * length, [])
    assert first.num_bytes > before
    assert grammars.compile(form) is not first


@pytest.mark.parametrize("kind", ["regex", "grammar", "json", "choice"])
def test_too_long_formats_are_refused(kind: str) -> None:
    long = "a" * 2**19 + "b"
    value = {"json": {"const": long}, "choice": [long]}.get(kind, long)
    with pytest.raises(ForedraftError, match=rf"structured_outputs.{kind} has \d+ bytes: at most 524288 are allowed"):
        StructuredOutputs(**{kind: value})  # type: ignore[arg-type]


def walk_with_clock(tokenizer: PreTrainedTokenizerBase, **limits: float) -> GrammarWalk:
    """A walk with a clock by which every mask takes a second."""
    ticks = count()
    known = GrammarLimits(clock=lambda: float(next(ticks)), **limits)  # type: ignore[arg-type]
    return Grammars(tokenizer, [END], limits=known).compile(StructuredOutputs(regex="[a-z]*")).start(0)


def test_mask_time_is_limited_per_request_and_per_token(tokenizer: PreTrainedTokenizerBase) -> None:
    (letter,) = tokenizer.encode("a", add_special_tokens=False)
    walk = walk_with_clock(tokenizer, base_seconds=3.5, seconds_per_token=0.0)
    for length in range(4):
        walk.allowed([letter] * length, [])
    with pytest.raises(ForedraftError, match=r"structured_outputs.regex: its masks take more than 3.5 s plus 0 ms"):
        walk.allowed([letter] * 4, [])
    free = walk_with_clock(tokenizer, base_seconds=3.5, seconds_per_token=1.0)
    for length in range(20):
        free.allowed([letter] * length, [])


def test_mask_time_for_drafts_ends_drafting_but_not_the_request(tokenizer: PreTrainedTokenizerBase) -> None:
    (a,), (b,) = (tokenizer.encode(letter, add_special_tokens=False) for letter in "ab")
    walk = walk_with_clock(tokenizer, base_seconds=3.5, seconds_per_token=0.0)
    num_drafts = 0
    while walk.allows_drafts:
        walk.num_allowed([a], [b, b])
        walk.allowed([a], [a])
        num_drafts += 1
    assert 0 < num_drafts < 10
    walk.allowed([a], [])  # plain decoding has only computed one mask so far
    walk.allowed([a, a], [])


def is_refused(walk: GrammarWalk, drafted: list[int]) -> bool:
    try:
        walk.allowed([], drafted)
    except ForedraftError:
        return True
    return False


def test_limits_exceeded_only_in_a_draft_do_not_fail_the_text(tokenizer: PreTrainedTokenizerBase) -> None:
    form = StructuredOutputs(regex="c*|[ab]((a{1000}){1000}){1000}")
    walk = Grammars(tokenizer, [END]).compile(form).start(0)
    (c,), (b,), aa = (tokenizer.encode(text, add_special_tokens=False) for text in ("c", "b", "a" * 12))
    assert any(is_refused(walk, [b, *aa[:length]]) for length in range(len(aa)))
    for length in range(1, 8):
        bits = np.unpackbits(walk.allowed([c] * length, []), bitorder="little")
        assert bits[c]


def test_an_ambiguous_grammar_fails_only_its_request(llm: LLM) -> None:
    (expected,) = llm.generate(STORY, GREEDY)
    hostile = SamplingParams(
        max_tokens=2000, temperature=1.0, seed=1, structured_outputs=AMBIGUOUS, logit_bias={0: -100}
    )
    with pytest.raises(RequestError, match=r"structured_outputs.grammar: .*unambiguous|processor time") as caught:
        llm.generate([STORY] * 3, [GREEDY, hostile, GREEDY])
    first, bad, last = (output.outputs[0] for output in caught.value.outputs)  # type: ignore[attr-defined]
    assert bad.finish_reason == "error"
    assert first.token_ids == last.token_ids == expected.outputs[0].token_ids


def test_compiling_grammars_delays_no_other_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """While sixteen requests wait for their grammars, others run, with a cached grammar or without one."""
    known = SamplingParams(max_tokens=5, structured_outputs=StructuredOutputs(choice=["known"]))
    llm.generate(STORY, known)
    (expected,) = llm.generate(STORY, GREEDY)
    gate, where, run = threading.Event(), set[str](), Trials.run

    def slow(self: Trials, text: str, parser_limits: dict[str, int]) -> int:
        where.add(threading.current_thread().name)
        assert gate.wait(60)
        return run(self, text, parser_limits)

    monkeypatch.setattr(Trials, "run", slow)

    async def main() -> None:
        async with AsyncLLM(llm=llm) as engine:
            forms = [StructuredOutputs(choice=[f"new {i}"]) for i in range(16)]
            waiting = [
                asyncio.create_task(engine.generate(STORY, SamplingParams(max_tokens=8, structured_outputs=form)))
                for form in forms
            ]
            while not where:
                await asyncio.sleep(0.01)
            others = await asyncio.gather(*(engine.generate(STORY, GREEDY) for _ in range(16)))
            assert (await engine.generate(STORY, known)).outputs[0].text == "known"
            assert not any(task.done() for task in waiting)
            gate.set()
            assert [(await task).outputs[0].text for task in waiting] == [f"new {i}" for i in range(16)]
            assert all(one.outputs[0].token_ids == expected.outputs[0].token_ids for one in others)

    try:
        asyncio.run(asyncio.wait_for(main(), 120))
    finally:
        gate.set()
    assert "foredraft-engine" not in where


def test_a_killed_worker_is_restarted(tokenizer: PreTrainedTokenizerBase) -> None:
    grammars = Grammars(tokenizer, [END])
    grammars.compile(StructuredOutputs(choice=["a"]))
    worker = grammars._trials._idle.queue[-1]
    assert worker._process is not None
    worker._process.kill()
    worker._process.wait()
    grammars.compile(StructuredOutputs(choice=["b"]))
