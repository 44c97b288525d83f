"""Structured outputs through the engine, with every kind of draft: texts are valid, drafts do not change them, and
impossible requests are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from foredraft import LLM, ForedraftError, RequestError, SamplingParams, StructuredOutputs
from foredraft.drafters import REGISTRY
from foredraft.model import EMBEDDED
from foredraft.trace import read_trace, record
from tests.draft_servers import remote_settings
from tests.heads.random_heads import head_settings
from tests.methods import all_methods

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = StructuredOutputs(json=SCHEMA)
STORY = "Once upon a time, there was a little"
PROMPTS = [STORY, "def mean(values):", 'A record: {"name": "Bob", "age": 12, "tags": ["red"]}, {"name": "']
WAYS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "seed": 2, "top_p": 0.9},
    {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.2},
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(seed=0)


@pytest.fixture(autouse=True)
def _idle(llm: LLM) -> Iterator[None]:
    yield
    assert not llm.engine.has_work
    assert llm.engine.pool.used == llm.engine.pool.bytes_retained


def params(form: StructuredOutputs = JSON, **settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 200, "temperature": 1.0, "structured_outputs": form, **settings})


def is_valid(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[Sequence[int]]]:
    """Plain decoding's texts, for each entry of WAYS."""
    found = [llm.generate(PROMPTS, params(speculative_tokens=0, **way)) for way in WAYS]
    return [[output.outputs[0].token_ids for output in outputs] for outputs in found]


@pytest.mark.parametrize("method", all_methods(REGISTRY))
@pytest.mark.parametrize("gamma", [4, "auto"])
def test_drafts_do_not_change_a_greedy_or_seeded_text(
    llm: LLM, plain: list[list[Sequence[int]]], method: str, gamma: int | str
) -> None:
    """Law 2 under a schema, in a batch with an unconstrained request."""
    own = head_settings(method) | remote_settings(method)
    other = LLM(method=method, **own) if own else llm.with_drafter(method)
    for way, expected in zip(WAYS, plain, strict=True):
        mixed = [params(speculative_tokens=gamma, **way)] * len(PROMPTS)
        *found, free = other.generate([*PROMPTS, STORY], [*mixed, SamplingParams(max_tokens=30, temperature=0.0)])
        assert [o.outputs[0].token_ids for o in found] == expected
        assert all(is_valid(o.outputs[0].text) for o in found)
        assert free.outputs[0].finish_reason == "length"
    other.engine.drop_retained()


@pytest.mark.parametrize(
    ("form", "good"),
    [
        (StructuredOutputs(choice=["yes", "yes, sir", "no"]), lambda text: text in ("yes", "yes, sir", "no")),
        (StructuredOutputs(regex="[a-c]{3}-[0-9]{2}"), lambda text: len(text) == 6 and text[3] == "-"),
        (StructuredOutputs(grammar='start: "a" start "b" | "c"'), lambda text: text.count("a") == text.count("b")),
        (JSON, is_valid),
    ],
    ids=["choice", "regex", "grammar", "json"],
)
@pytest.mark.parametrize("verification", ["block", "rejection"])
def test_texts_keep_every_format_at_a_high_temperature(
    llm: LLM, form: StructuredOutputs, good: Any, verification: str
) -> None:
    wanted = params(form, n=4, speculative_tokens=4, verification=verification, temperature=1.5)
    for output in llm.generate(PROMPTS, wanted):
        for text in output.outputs:
            assert text.finish_reason == "length" or good(text.text)
            assert text.error is None


def test_forced_text_is_drafted_for_free_even_without_a_drafter(llm: LLM) -> None:
    form = StructuredOutputs(regex="the quick brown fox jumps over the lazy dog[.!]")
    undrafted = llm.with_drafter("none")
    (output,) = undrafted.generate(STORY, params(form, speculative_tokens=4))
    undrafted.engine.drop_retained()
    stats = output.metrics.speculative_decoding
    assert output.outputs[0].text[:-1] == "the quick brown fox jumps over the lazy dog"
    assert stats.num_draft_tokens > 0
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens
    assert stats.num_steps < len(output.outputs[0].token_ids)


def test_zero_draft_tokens_is_plain_decoding(llm: LLM) -> None:
    form = StructuredOutputs(regex="the quick brown fox jumps over the lazy dog[.!]")
    (output,) = llm.generate(STORY, params(form, speculative_tokens=0))
    assert output.metrics.speculative_decoding.num_draft_tokens == 0


@pytest.mark.slow
def test_two_hundred_texts_at_temperature_one_are_all_valid(llm: LLM) -> None:
    for gamma in (4, "auto"):
        outputs = llm.generate([STORY] * 200, params(max_tokens=300, speculative_tokens=gamma))
        assert all(output.outputs[0].finish_reason == "stop" for output in outputs)
        assert all(is_valid(output.outputs[0].text) for output in outputs)


def test_a_text_may_end_before_its_format_is_complete(llm: LLM) -> None:
    (output,) = llm.generate(STORY, params(max_tokens=5))
    assert output.outputs[0].finish_reason == "length"
    (output,) = llm.generate(STORY, params(stop='"age"', temperature=0.0))
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == '"age"'


def test_the_texts_of_one_request_differ_and_are_all_valid(llm: LLM) -> None:
    (output,) = llm.generate(STORY, params(n=5, seed=3, temperature=1.5))
    assert len({text.text for text in output.outputs}) > 1
    assert all(is_valid(text.text) for text in output.outputs)


def test_preemption_changes_no_text(llm: LLM) -> None:
    wanted = params(seed=1)
    expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, wanted)]
    requests = [llm.frontend.prepare(prompt, wanted) for prompt in PROMPTS]
    for request in requests:
        llm.frontend.start(request)
    for step in range(10_000):
        running = [s for request in requests for s in request.sequences if s.num_output and not s.is_finished]
        if step % 3 == 2 and running:
            llm.engine.preempt(running[step % len(running)])
        llm.engine.step()
        if not llm.engine.has_work:
            break
    assert [request.sequences[0].output_ids for request in requests] == expected


def test_logprobs_are_those_of_the_unconstrained_distribution(llm: LLM) -> None:
    (output,) = llm.generate(STORY, params(StructuredOutputs(choice=["zz"]), logprobs=1))
    assert output.outputs[0].text == "zz"
    assert output.outputs[0].logprobs is not None
    first = output.outputs[0].logprobs[0]
    assert len(first) == 2, "what the model would have liked best is another token"


def test_a_bias_that_leaves_no_token_fails_only_its_request(llm: LLM) -> None:
    form = StructuredOutputs(choice=["a"])
    assert llm.tokenizer is not None
    (token,) = llm.tokenizer.encode("a", add_special_tokens=False)
    with pytest.raises(RequestError, match="nothing is left to sample") as caught:
        llm.generate([STORY, STORY], [params(form, logit_bias={token: -float("inf")}), params(form)])
    assert caught.value.outputs[1].outputs[0].text == "a"  # type: ignore[attr-defined]


def test_a_grammar_that_exceeds_its_limits_fails_only_its_request(llm: LLM) -> None:
    bomb = StructuredOutputs(regex="[bc]((a{1000}){1000}){1000}")
    with pytest.raises(RequestError, match="structured_outputs") as caught:
        llm.generate([STORY, STORY], [params(bomb), params(StructuredOutputs(choice=["a"]))])
    bad, good = caught.value.outputs
    assert bad.outputs[0].finish_reason == "error"  # type: ignore[attr-defined]
    assert good.outputs[0].text == "a"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("form", "field"),
    [
        (StructuredOutputs(json={"allOf": [{"type": "string"}, {"type": "integer"}]}), "json"),
        (StructuredOutputs(regex="((a{1000}){1000}){1000}"), "regex"),
        (StructuredOutputs(grammar="start: start"), "grammar"),
    ],
)
def test_an_impossible_format_is_refused_before_anything_runs(llm: LLM, form: StructuredOutputs, field: str) -> None:
    with pytest.raises(ForedraftError, match=f"prompt 1: structured_outputs.{field}"):
        llm.generate([STORY, STORY], [params(), params(form)])


def test_structured_outputs_need_a_tokenizer() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(EMBEDDED / "target")
    with pytest.raises(ForedraftError, match="structured_outputs need a tokenizer"):
        LLM(model).generate([[5, 6]], params())


def test_a_trace_names_the_format(llm: LLM, tmp_path: Path) -> None:
    with record(llm, tmp_path / "trace"):
        llm.generate(STORY, params(max_tokens=10, seed=0))
    assert read_trace(tmp_path / "trace").texts
