"""A proposer's drafts change no text of its engine, and no input makes it raise."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from foredraft import ForedraftError
from foredraft.integrations.vllm import Proposer
from foredraft.integrations.vllm import proposer as module
from foredraft.integrations.vllm.options import ProposerOptions
from foredraft.model import EMBEDDED
from foredraft.policy.plan_schedule import PlanSchedule
from tests.integrations.vllm.fake_engine import FakeEngine, Target, config_for, hashing, looping

METHODS: list[dict[str, Any]] = [
    {"method": "suffix"},
    {"method": "ngram"},
    {"method": ["suffix", "ngram"]},
    {"method": "suffix", "corpus_tokens": 400},
]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(11) for _ in range(random.randint(2, 40))] for _ in range(count)]


def written(prompt: Sequence[int], target: Target, max_tokens: int) -> list[int]:
    tokens = [*prompt]
    for _ in range(max_tokens):
        tokens.append(target(tokens))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("target", [looping, hashing])
@pytest.mark.parametrize("tokens", [3, "auto"])
@pytest.mark.parametrize("options", METHODS, ids=str)
def test_drafts_change_no_text(options: dict[str, Any], tokens: int | str, target: Target) -> None:
    """With rows that move, cancelled and preempted texts, and four times as many texts as rows."""
    for seed in range(3):
        engine = FakeEngine(Proposer(config_for(speculative_tokens=tokens, **options)), target, disturb=seed)
        given = prompts(16, seed)
        for prompt, text in zip(given, engine.run(given, 40), strict=True):
            assert text == written(prompt, target, len(text))
        assert engine.num_cancelled
        assert engine.num_preempted


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_repeats_are_drafted_and_accepted(method: str) -> None:
    engine = FakeEngine(Proposer(config_for(method=method, speculative_tokens=4)), looping)
    engine.run(prompts(8), 60)
    assert engine.num_accepted > 0.3 * engine.num_drafted > 0
    assert engine.num_steps < 8 / 4 * 60, "fewer steps than tokens"


def test_each_text_is_recognised_in_any_row() -> None:
    proposer = Proposer(config_for())
    engine = FakeEngine(proposer, hashing, disturb=7)
    engine.run(prompts(25), 30)
    assert len(proposer._texts) == 25


def test_ended_texts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.integrations.vllm.texts.MOST_CALLS_UNSEEN", 20)
    proposer = Proposer(config_for(method="suffix+ngram"))
    FakeEngine(proposer, looping).run(prompts(8), 20)
    # nearly every draft token is rejected, so these texts end together, however many are drafted
    FakeEngine(proposer, hashing).run(prompts(4, seed=1), 100)
    assert len(proposer._texts) == 4
    for drafter in proposer._drafting._group._drafters.values():
        held = getattr(drafter, "_histories", None) or getattr(drafter, "_tables", {})
        assert len(held) <= 4


def test_finished_texts_are_drafted_from_if_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.integrations.vllm.texts.MOST_CALLS_UNSEEN", 10)
    accepted = []
    for corpus_tokens in (0, 4000):
        proposer = Proposer(config_for(speculative_tokens=4, corpus_tokens=corpus_tokens))
        for prompt in ([1, 2, 3], [5, 6, 7, 8], [1, 2, 3]):
            engine = FakeEngine(proposer, hashing)
            engine.run([prompt], 40)
        accepted.append(engine.num_accepted)
    assert accepted[0] < accepted[1]


def clocked(costs: tuple[float, float], target: Target = looping, **options: Any) -> FakeEngine:
    """An engine whose steps take costs[0] plus costs[1] for each row, by a clock that the proposer reads."""
    now = [0.0]

    def on_step(num_rows: int) -> None:
        now[0] += costs[0] + costs[1] * num_rows

    proposer = Proposer(config_for(**options))
    proposer._drafting._clock = lambda: now[0]
    return FakeEngine(proposer, target, on_step=on_step)


CHEAP, DEAR = (1e-2, 1e-5), (1e-4, 1e-2)
"""The seconds of a step, and of each of its rows."""


def test_auto_drafts_if_rows_are_cheap_and_hardly_if_they_are_expensive() -> None:
    per_step = []
    for tokens, costs, target in (("auto", CHEAP, looping), ("auto", DEAR, hashing), (4, DEAR, hashing)):
        engine = clocked(costs, target, method="ngram", speculative_tokens=tokens)
        engine.run([[1, 2, 3, 4]] * 4, 200)
        per_step.append(engine.num_drafted / engine.num_steps)
    assert per_step[0] > 4, "of 16 in four rows"
    assert per_step[1] < 0.2 * per_step[2], "where drafts are rejected"


def test_texts_that_come_and_go_cause_few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new text gets a plan of its own. The others keep theirs for 20 ms, which are 20 steps of this engine."""
    plans = []
    original = PlanSchedule.set_next

    def set_next(schedule: PlanSchedule, step: int, *, at_once: bool) -> None:
        plans.append(at_once)
        original(schedule, step, at_once=at_once)

    monkeypatch.setattr(PlanSchedule, "set_next", set_next)
    engine = clocked((1e-3, 1e-6), method="ngram")
    engine.run(prompts(100), 8)
    assert plans.count(False) <= engine.num_steps / 10


def test_ranks_draft_alike_whatever_their_clocks_are() -> None:
    given, runs = prompts(8), []
    for seconds in (1e-3, 1.0):
        engine = clocked((seconds, seconds), ranks=2, method="ngram")
        engine.run(given, 40)
        runs.append((engine.num_steps, engine.num_drafted))
    assert runs[0] == runs[1]
    assert runs[0][1] > 0


def test_a_failing_drafter_ends_no_text(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    proposer = Proposer(config_for(method="ngram", speculative_tokens=3))
    drafter = proposer._drafting._group._drafters["ngram"]
    monkeypatch.setattr(drafter, "propose", lambda requests: 1 / 0)
    engine = FakeEngine(proposer, looping)
    (text,) = engine.run([[1, 2, 3]], 20)
    assert text == written([1, 2, 3], looping, 20)
    assert "drafter ngram failed: ZeroDivisionError" in caplog.text


def test_invalid_input_gives_no_drafts(caplog: pytest.LogCaptureFixture) -> None:
    proposer = Proposer(config_for(speculative_tokens=3))
    tokens, lens = np.zeros((1, 4), dtype=np.int32), np.array([4], dtype=np.int32)
    assert proposer.propose([[1], [2]], lens, tokens) == [[], []]
    assert proposer.propose([[1]], None, tokens) == [[]]  # type: ignore[arg-type]
    assert caplog.text.count("drafting failed") == 1
    engine = FakeEngine(proposer, looping)
    assert engine.run([[1, 2]], 30) == [written([1, 2], looping, 30)], "and it goes on drafting"
    assert engine.num_drafted


def test_nothing_is_drafted_past_the_longest_text() -> None:
    proposer = Proposer(config_for(max_len=24, speculative_tokens=4))
    tokens = np.zeros((1, 24), dtype=np.int32)
    tokens[0] = [1, 2] * 12
    for length in range(20, 25):
        (draft,) = proposer.propose([[2 - length % 2]], np.array([length], dtype=np.int32), tokens)
        assert len(draft) <= 24 - length


@pytest.mark.parametrize(
    ("method", "tokens", "drafters"),
    [
        ("draft_model", 3, ["draft_model"]),
        ("suffix+draft_model", 3, ["suffix", "draft_model"]),
        ("suffix+draft_model", "auto", ["suffix", "draft_model", "hybrid"]),
    ],
)
def test_a_draft_model_drafts_on_the_cpu(method: str, tokens: int | str, drafters: list[str]) -> None:
    draft = str(EMBEDDED / "draft")
    engine = clocked(CHEAP, looping, vocab_size=4096, method=method, draft_model=draft, speculative_tokens=tokens)
    assert isinstance(engine._proposer, Proposer)
    assert [*engine._proposer._drafting._group.names] == drafters
    given = [[5, 6, 7], [100, 200]]
    for prompt, text in zip(given, engine.run(given, 40), strict=True):
        assert text == written(prompt, looping, 40)
    assert engine.num_drafted > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["suffix"]}, "unknown option 'methods' of foredraft: the options are method,"),
        ({"method": "eagle"}, "method must be one or more of suffix, ngram, draft_model"),
        ({"method": []}, "method must be one or more of"),
        ({"method": "suffix+suffix"}, "each once"),
        ({"speculative_tokens": 0}, "at least 1, not 0"),
        ({"speculative_tokens": "most"}, "at least 1, not 'most'"),
        ({"method": "draft_model"}, "give both, or neither"),
        ({"draft_model": "gpt2"}, "give both, or neither"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ForedraftError, match=message):
        ProposerOptions.of(options)


def test_an_additional_config_that_is_no_dict_is_ignored() -> None:
    config = config_for()
    config.additional_config = object()
    assert module._table(config.additional_config) == {}
    Proposer(config)
