"""Plain decoding compared with speculation: properties of the comparison that do not depend on times."""

from __future__ import annotations

import json

import pytest

from foredraft import LLM, ForedraftError, Origin, SamplingParams
from foredraft.bench.figures import expected_length, repeated_share
from foredraft.tools.demo import DEMO_PROMPT, DEMO_QUESTION, compare, demo_prompt

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_threads=1)


def test_both_sides_write_the_same_text(llm: LLM) -> None:
    found = compare(llm, DEMO_PROMPT, GREEDY, 4, num_runs=1)
    assert found.identical is True
    assert found.first_difference is None
    assert found.num_tokens == 20
    assert found.stats.num_draft_tokens > 0


def test_only_the_speculative_side_drafts_with_the_given_number(llm: LLM) -> None:
    before = llm.engine.stats.num_draft_tokens
    found = compare(llm, DEMO_PROMPT, SamplingParams(temperature=0.0, max_tokens=12), 2, num_runs=2)
    # with drafts: two measured runs and one for warm-up; without: three runs
    assert (llm.engine.stats.num_draft_tokens - before) * 2 == found.stats.num_draft_tokens * 3
    assert len(found.stats.acceptance_histogram) == 3


def test_neither_side_finds_its_prompt_in_the_cache(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    generate = llm.generate

    def spy(*args: object, **kwargs: object) -> object:
        held.append(llm.engine.cache.bytes_retained)
        return generate(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(llm, "generate", spy)
    compare(llm, DEMO_PROMPT, GREEDY, 4, num_runs=1)
    assert held == [0, 0, 0, 0]


def test_seeded_texts_are_identical_and_unseeded_ones_need_not_be(llm: LLM) -> None:
    seeded = compare(llm, DEMO_PROMPT, SamplingParams(temperature=0.8, seed=5, max_tokens=12, n=2), 4, num_runs=1)
    assert seeded.identical is True
    assert seeded.num_tokens == 24
    unseeded = compare(llm, DEMO_PROMPT, SamplingParams(temperature=0.8, max_tokens=12), 4, num_runs=1)
    assert unseeded.identical is None


def test_progress_counts_every_run(llm: LLM) -> None:
    calls = []
    compare(llm, DEMO_PROMPT, SamplingParams(temperature=0.0, max_tokens=2), 4, num_runs=2,
            progress=lambda: calls.append(1))  # fmt: skip
    assert len(calls) == 4


def test_a_slow_machine_gets_one_run_of_each(llm: LLM) -> None:
    found = compare(llm, DEMO_PROMPT, GREEDY, 4, budget=0.0)
    assert found.num_runs == 1
    assert found.identical is True


def test_nothing_to_compare_is_refused(llm: LLM) -> None:
    with pytest.raises(ForedraftError, match="nothing to compare"):
        compare(llm, DEMO_PROMPT, GREEDY, 0)


def test_the_comparison_is_json(llm: LLM) -> None:
    found = compare(llm, DEMO_PROMPT, GREEDY, 3, num_runs=1)
    data = json.loads(json.dumps(found.as_dict()))
    assert data["identical"] is True
    assert data["speedup"] == pytest.approx(
        data["speculative"]["tokens_per_second"] / data["plain"]["tokens_per_second"]
    )
    # the last draft of a text may be shorter than the others
    assert 1 < data["formula_acceptance_length"] <= expected_length(data["stats"]["conditional_acceptance"], 3)


def test_auto_can_be_compared_too(llm: LLM) -> None:
    found = compare(llm, DEMO_PROMPT, GREEDY, "auto", num_runs=1)
    assert found.identical is True
    assert json.loads(json.dumps(found.as_dict()))["speculative_tokens"] == "auto"


def test_the_demo_text_has_every_origin_and_does_not_loop(llm: LLM) -> None:
    (output,) = llm.generate(DEMO_PROMPT, SamplingParams(temperature=0.0, max_tokens=128))
    assert {Origin.ACCEPTED, Origin.RECOVERED, Origin.BONUS} <= set(output.outputs[0].origins)
    assert repeated_share(output.outputs[0].token_ids) < 0.5
    assert not DEMO_PROMPT.endswith("\n")


def test_a_model_with_a_chat_template_is_asked_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(num_threads=1)
    assert demo_prompt(llm) == (DEMO_PROMPT, DEMO_PROMPT)
    monkeypatch.setattr(
        llm.tokenizer, "chat_template", "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    shown, prompt = demo_prompt(llm)
    assert shown == f"> {DEMO_QUESTION}\n\n"
    assert llm.text_tokenizer.decode(prompt) == f"<user>{DEMO_QUESTION}"
