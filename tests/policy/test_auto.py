"""Law 2 with speculative_tokens="auto": the controller's choices do not change the text."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM

from foredraft import LLM, SamplingParams
from foredraft.drafters import DraftModelDrafter
from foredraft.errors import ForedraftError
from foredraft.model import EMBEDDED
from foredraft.policy import Controller, Guard

METHODS = "suffix+draft_model"
PROMPTS = ["def count_words(text):", "Once upon a time", "def area(width, height):\n    return", "one two one two one"]


@pytest.fixture(scope="module", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> object:
    """A temporary cache folder: costs of other processes are not read, and ours are not left behind."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def llm(cache_folder: Path) -> LLM:
    return LLM(EMBEDDED / "target", EMBEDDED / "draft", method=METHODS, dtype="bfloat16", num_threads=1)


SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 6, "n": 2},
    {"temperature": 0.0, "repetition_penalty": 1.1},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_text_is_plain_decodings(settings: dict[str, float], llm: LLM) -> None:
    if not llm.target.traits.row_exact:
        pytest.skip("elsewhere only up to near ties")
    params = SamplingParams(max_tokens=96, **settings)
    plain = llm.with_drafter("none").generate(PROMPTS, params)
    auto = llm.generate(PROMPTS, params)
    for a, b in zip(plain, auto, strict=True):
        assert [one.token_ids for one in a.outputs] == [one.token_ids for one in b.outputs]


def test_the_controller_did_draft(llm: LLM) -> None:
    """The draft model is not asked by itself."""
    asked = Counter[str]()
    llm.engine.observers.append(SimpleNamespace(observe=lambda step: asked.update(step.draft_times)))
    for _ in range(5):  # where other programs make drafts slow, it rests for a while
        llm.generate(PROMPTS, SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
        if llm.engine.stats.num_draft_tokens > 0:
            break
    assert isinstance(llm.policy, Controller)
    assert llm.engine.stats.num_draft_tokens > 0
    assert asked.keys() <= {"suffix", "hybrid"}


def test_mixed_batches_are_invisible_too(llm: LLM) -> None:
    """Greedy, seeded, with a fixed number of draft tokens and without drafts, in one batch."""
    if not llm.target.traits.row_exact:
        pytest.skip("elsewhere only up to near ties")
    wanted: list[dict[str, float]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 0.0, "speculative_tokens": 3},
        {"temperature": 0.0, "speculative_tokens": 0},
    ]
    params = [SamplingParams(max_tokens=64 + 10 * i, **one) for i, one in enumerate(wanted)]
    plain = llm.with_drafter("none").generate(PROMPTS, params)
    auto = llm.generate(PROMPTS, params)
    assert [o.outputs[0].token_ids for o in plain] == [o.outputs[0].token_ids for o in auto]


@pytest.mark.slow
def test_costs_of_models_in_memory_are_not_stored(llm: LLM, cache_folder: Path) -> None:
    before = set(cache_folder.rglob("costs-*"))
    own = LLM(AutoModelForCausalLM.from_pretrained(EMBEDDED / "target"), tokenizer=llm.tokenizer, method="suffix")
    own.generate(PROMPTS * 4, SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True))
    assert set(cache_folder.rglob("costs-*")) == before


# Thresholds, through LLM


def test_crossing_a_threshold_is_logged_and_counted_and_changes_no_text(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    strict = LLM(EMBEDDED / "target", EMBEDDED / "draft", speculative_tokens=4, min_acceptance_rate=1.0)
    assert isinstance(strict.policy, Guard)
    params = SamplingParams(max_tokens=160, temperature=0.0, ignore_eos=True)
    with caplog.at_level(logging.WARNING, "foredraft"):
        outputs = strict.generate(PROMPTS, params)
    assert strict.crossings["draft_model", "min_acceptance_rate"] == 1
    assert sum("min_acceptance_rate" in record.getMessage() for record in caplog.records) == 1
    if strict.target.traits.row_exact:
        plain = strict.with_drafter("none").generate(PROMPTS, params)
        assert [o.outputs[0].token_ids for o in plain] == [o.outputs[0].token_ids for o in outputs]
    assert not strict.with_drafter("suffix").crossings
    assert not llm.crossings


def test_a_draft_model_above_its_memory_threshold_frees_its_memory() -> None:
    llm = LLM(EMBEDDED / "target", EMBEDDED / "draft", speculative_tokens=4, max_draft_memory=1)
    llm.generate(PROMPTS, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    assert llm.crossings == {("draft_model", "max_draft_memory"): 1}
    assert llm.draft is not None
    assert isinstance(llm.policy, Guard)
    drafter = llm.policy.drafters["draft_model"]
    assert isinstance(drafter, DraftModelDrafter)
    assert drafter.bytes_held == 0


@pytest.mark.parametrize("threshold", [{"min_acceptance_rate": 2.0}, {"max_draft_memory": -1}], ids=str)
def test_an_invalid_threshold_is_refused(threshold: dict[str, float]) -> None:
    with pytest.raises(ForedraftError, match=next(iter(threshold))):
        LLM(**threshold)  # type: ignore[arg-type]
