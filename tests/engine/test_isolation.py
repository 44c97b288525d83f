"""Invariant 9: an error that one row raises, at any stage of a step, ends only that row's request. Sixteen other requests of the
batch, greedy and seeded, finish with the texts that they have without it."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import foredraft.engine.engine as engine_module
from foredraft.engine.cache import KVCache
from foredraft.engine.engine import Engine
from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.engine.scheduler import Limits
from foredraft.engine.sequence import TokenSequence
from foredraft.engine.step import Step
from foredraft.errors import ForedraftError
from foredraft.model import LanguageModel, Read
from foredraft.policy import DraftBudget, FixedPolicy
from foredraft.sampling import Sampler, SamplingParams
from foredraft.utils.isolation import Shield, brief, run_isolated
from foredraft.verify import verify
from tests.conftest import MakeEngine
from tests.laws import FALSE_ALARM, chi_square

PROMPTS = ([0, 549, 300, 11, 12, 300, 11, 12], [0, 616, 635, 271, 480], [0, *range(500, 540)], [0, 9])
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 0.9, "seed": 3, "top_k": 40},
    {"temperature": 1.2, "seed": 4, "prompt_logprobs": 1},
)
BAD_PROMPT = [0, 700, 701, 702, 703]
MARK = 7
"""A number of logprobs that only the bad request asks for."""
METHODS = ("none", "draft_model")


def params(max_tokens: int = 14, **settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **settings).resolve({})


def neighbours(engine: Engine) -> list[TokenSequence]:
    """Add sixteen good requests."""
    return [engine.add(prompt, params(**kind)) for prompt in PROMPTS for kind in KINDS]


def run(engine: Engine) -> None:
    for _ in range(2000):
        if not engine.has_work:
            break
        engine.step()
    assert not engine.has_work
    assert engine.pool.used == engine.pool.bytes_retained
    assert engine.cache.bytes_running == 0
    engine.drop_retained()
    assert engine.pool.free == engine.pool.total


@pytest.fixture(scope="module")
def expected(make_engine: MakeEngine) -> list[list[int]]:
    """The texts of the good requests without the bad one, and without drafts."""
    engine = make_engine("none")
    sequences = neighbours(engine)
    run(engine)
    return [sequence.output_ids for sequence in sequences]


@dataclass
class Bad:
    """A request that raises. patch: makes the engine fail for its sequence; called before anything runs."""

    settings: dict[str, Any] = field(default_factory=dict)
    add: dict[str, Any] = field(default_factory=dict)
    patch: Callable[[Engine, TokenSequence, pytest.MonkeyPatch], None] = lambda engine, bad, monkeypatch: None
    error: str = "RuntimeError: injected"
    num_output: int | None = None


def is_due(bad: TokenSequence) -> bool:
    """Whether to raise: not at once, but when the other requests are in the middle of their texts."""
    return bad.num_output >= 3


class Broken:
    """A constraint that allows everything, until it raises."""

    allows_drafts = True

    def __init__(self, *methods: str) -> None:
        self.methods = methods

    def _check(self, method: str, history: Sequence[int], drafted: Sequence[int]) -> None:
        if method in self.methods and len(history) + len(drafted) >= len(BAD_PROMPT) + 3:
            raise KeyError("injected")

    def allowed(self, history: Sequence[int], drafted: Sequence[int]) -> Any:
        self._check("allowed", history, drafted)
        return np.full(512, 255, dtype=np.uint8)

    def num_allowed(self, history: Sequence[int], drafted: Sequence[int]) -> int:
        self._check("num_allowed", history, drafted)
        return len(drafted)

    def forced(self, history: Sequence[int], drafted: Sequence[int], at_most: int) -> list[int]:
        self._check("forced", history, drafted)
        return []


def raises(prefix: list[int], logits: Tensor) -> Tensor:
    if len(prefix) >= len(BAD_PROMPT) + 3:
        raise RuntimeError("injected")
    return logits


def gives_a_list(prefix: list[int], logits: Tensor) -> Any:
    return logits.tolist() if len(prefix) >= len(BAD_PROMPT) + 3 else logits


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("and this is why")


def raises_the_unprintable(prefix: list[int], logits: Tensor) -> Tensor:
    raise Unprintable


def stops_with_an_error(new_ids: Sequence[int], num_output_before: int) -> int | None:
    if num_output_before + len(new_ids) > 3:
        raise RuntimeError("injected")
    return None


def when_due(
    bad: TokenSequence, name: str, owner: Any, monkeypatch: pytest.MonkeyPatch, *, after: bool = False
) -> None:
    """Make a method raise for the bad sequence. after: whether it does its work first."""
    original = getattr(owner, name)

    def faulty(seq_id: int, *args: Any, **kwargs: Any) -> Any:
        found = original(seq_id, *args, **kwargs) if after else None
        if seq_id == bad.seq_id and not bad.is_finished and is_due(bad):
            raise RuntimeError("injected")
        return found if after else original(seq_id, *args, **kwargs)

    monkeypatch.setattr(owner, name, faulty)


def at_admission(engine: Engine, bad: TokenSequence, monkeypatch: pytest.MonkeyPatch) -> None:
    original = engine.cache.reserve

    def reserve(seq_id: int, num_tokens: int) -> bool:
        if seq_id == bad.seq_id:
            raise RuntimeError("injected")
        return original(seq_id, num_tokens)

    monkeypatch.setattr(engine.cache, "reserve", reserve)


def while_planned(engine: Engine, bad: TokenSequence, monkeypatch: pytest.MonkeyPatch) -> None:
    when_due(bad, "keep_prefix_of", engine.cache, monkeypatch)


def in_the_pass(engine: Engine, bad: TokenSequence, monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_reads(engine, bad, monkeypatch, after=False)


def behind_the_pass(engine: Engine, bad: TokenSequence, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache already holds what was read."""
    _fail_reads(engine, bad, monkeypatch, after=True)


def _fail_reads(engine: Engine, bad: TokenSequence, monkeypatch: pytest.MonkeyPatch, *, after: bool) -> None:
    original = LanguageModel.read

    def read(self: LanguageModel, reads: Sequence[Read], cache: KVCache, *launched: object) -> Tensor:
        due = cache is engine.cache and is_due(bad) and any(one.seq_id == bad.seq_id for one in reads)
        if due and not after:
            raise RuntimeError("injected")
        logits = original(self, reads, cache, *launched)
        if due:
            raise RuntimeError("injected")
        return logits

    monkeypatch.setattr(LanguageModel, "read", read)


def in_prefill(engine: Engine, bad: TokenSequence, monkeypatch: pytest.MonkeyPatch) -> None:
    original = LanguageModel.read

    def read(self: LanguageModel, reads: Sequence[Read], cache: KVCache, *launched: object) -> Tensor:
        if cache is engine.cache and any(one.seq_id == bad.seq_id for one in reads):
            raise RuntimeError("injected")
        return original(self, reads, cache, *launched)

    monkeypatch.setattr(LanguageModel, "read", read)


def in_verification(engine: Engine, bad: TokenSequence, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(logits: Tensor, proposal: Proposal, samplers: Sequence[Sampler], *args: Any, **kwargs: Any) -> Any:
        if is_due(bad) and bad.sampler in samplers:
            raise RuntimeError("injected")
        return verify(logits, proposal, samplers, *args, **kwargs)

    monkeypatch.setattr(engine, "_verifier", faulty)


def in_the_kernels_layout(engine: Engine, bad: TokenSequence, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number too large for the kernels' structs, which SamplingParams would refuse."""
    bad.sampler.spec = bad.sampler.spec._replace(truncation=(2**63, 1.0, 0.0))


def in_logprobs(engine: Engine, bad: TokenSequence, monkeypatch: pytest.MonkeyPatch) -> None:
    original = engine_module.logprobs_of

    def faulty(logits: Tensor, ids: Sequence[int], num_top: int) -> Any:
        if num_top == MARK and is_due(bad):
            raise RuntimeError("injected")
        return original(logits, ids, num_top)

    monkeypatch.setattr(engine_module, "logprobs_of", faulty)


def in_prompt_logprobs(engine: Engine, bad: TokenSequence, monkeypatch: pytest.MonkeyPatch) -> None:
    original = engine_module.record_prompt

    def faulty(sequence: TokenSequence, start: int, logits: Tensor) -> None:
        if sequence is bad:
            raise RuntimeError("injected")
        original(sequence, start, logits)

    monkeypatch.setattr(engine_module, "record_prompt", faulty)


SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "top_p": 0.9}
FAULTS = {
    "admission": Bad(patch=at_admission, num_output=0),
    "plan": Bad(patch=while_planned),
    "constraint": Bad(add={"constraint": Broken("allowed")}, error="KeyError: 'injected'", num_output=3),
    "constraint of drafts, too": Bad(
        add={"constraint": Broken("allowed", "num_allowed", "forced")}, error="KeyError: 'injected'", num_output=3
    ),
    "constraint, unseeded": Bad(
        {"temperature": 1.0, "top_k": 5},
        add={"constraint": Broken("allowed")},
        error="KeyError: 'injected'",
        num_output=3,
    ),
    "processor": Bad({"logits_processors": [raises]}, error="raises raised RuntimeError: injected", num_output=3),
    "processor's answer": Bad({"logits_processors": [gives_a_list]}, error="gives_a_list must return", num_output=3),
    "unprintable error": Bad(
        {"logits_processors": [raises_the_unprintable]}, error="raised Unprintable: no message", num_output=0
    ),
    "prefill": Bad(patch=in_prefill, num_output=0),
    "pass": Bad(patch=in_the_pass),
    "behind the pass": Bad(SEEDED, patch=behind_the_pass),
    "verification": Bad(SEEDED, patch=in_verification),
    "unseeded verification": Bad({"temperature": 1.0, "top_k": 5}, patch=in_verification),
    "layout": Bad({"temperature": 1.0, "top_k": 5}, patch=in_the_kernels_layout, error="error: "),
    "stop rule": Bad(add={"stop_rule": stops_with_an_error}),
    "log-probabilities": Bad({"logprobs": MARK}, patch=in_logprobs),
    "log-probabilities of the prompt": Bad({"prompt_logprobs": 2}, patch=in_prompt_logprobs, num_output=0),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_row_that_raises_ends_only_its_own_request(
    make_engine: MakeEngine,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
    method: str,
) -> None:
    case = FAULTS[fault]
    engine = make_engine(method, limits=Limits(max_batch_tokens=64))
    good = neighbours(engine)
    bad = engine.add(BAD_PROMPT, params(**{"temperature": 0.0, **case.settings}), **case.add)
    with monkeypatch.context() as patched:
        case.patch(engine, bad, patched)
        run(engine)
    assert [sequence.output_ids for sequence in good] == expected
    assert {sequence.error for sequence in good} == {None}
    assert all(len(s.logprobs) == s.num_output for s in good if s.sampler.params.logprobs is not None)
    assert all(len(s.prompt_logprobs) == s.prompt_len - 1 for s in good if s.sampler.params.prompt_logprobs is not None)
    assert bad.finish_reason == "error"
    assert case.error in str(bad.error)
    assert case.num_output is None or bad.num_output == case.num_output
    if method == "draft_model":
        assert engine.stats.num_draft_tokens > 50
        assert not any("drafter DraftModelDrafter failed" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("method", METHODS)
def test_several_bad_rows_end_one_by_one(
    make_engine: MakeEngine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    engine = make_engine(method)
    all_bad: list[TokenSequence] = []
    for _ in range(3):
        all_bad.append(engine.add(BAD_PROMPT, params(temperature=0.0)))
        in_verification(engine, all_bad[0], monkeypatch)
    good = neighbours(engine)

    def faulty(logits: Tensor, proposal: Proposal, samplers: Sequence[Sampler], *args: Any, **kwargs: Any) -> Any:
        if any(is_due(bad) and bad.sampler in samplers for bad in all_bad):
            raise RuntimeError("injected")
        return verify(logits, proposal, samplers, *args, **kwargs)

    monkeypatch.setattr(engine, "_verifier", faulty)
    run(engine)
    assert [sequence.output_ids for sequence in good] == expected
    assert [bad.error for bad in all_bad] == ["RuntimeError: injected"] * 3


def test_a_bad_row_that_runs_alone_ends_no_waiting_request(
    make_engine: MakeEngine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("suffix", limits=Limits(max_num_seqs=1))
    bad = engine.add(BAD_PROMPT, params(temperature=0.0))
    good = neighbours(engine)
    in_the_pass(engine, bad, monkeypatch)
    run(engine)
    assert bad.error == "RuntimeError: injected"
    assert [sequence.output_ids for sequence in good] == expected


def test_an_error_with_drafts_only_ends_no_request_and_the_drafter_cools_down(
    make_engine: MakeEngine, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    def refuses_drafts(logits: Tensor, proposal: Proposal, *args: Any, **kwargs: Any) -> Any:
        if int(proposal.lens.max()):
            raise ZeroDivisionError
        return verify(logits, proposal, *args, **kwargs)

    policy = FixedPolicy("DraftModelDrafter")
    engine = make_engine("draft_model", verifier=refuses_drafts, policy=policy)
    good = neighbours(engine)
    run(engine)
    assert [sequence.output_ids for sequence in good] == expected
    assert policy.fallbacks == {("DraftModelDrafter", "failed"): 1}
    assert any("drafter DraftModelDrafter failed: ZeroDivisionError" in r.getMessage() for r in caplog.records)


class BadDrafter:
    """Answers correctly twice, then misbehaves."""

    def __init__(self, behaviour: str) -> None:
        self.behaviour = behaviour
        self.num_calls = 0
        self.forgotten: set[int] = set()

    def propose(self, requests: list[DraftRequest]) -> Any:
        self.num_calls += 1
        rows = [[11] * request.max_len for request in requests]
        if self.num_calls < 3:
            return Proposal.certain(rows)
        if self.behaviour == "raises":
            raise KeyError("injected")
        if self.behaviour == "no proposal":
            return None
        if self.behaviour == "too many":
            return Proposal.certain([[*row, 1] for row in rows])
        if self.behaviour == "too few rows":
            return Proposal.certain(rows[1:])
        return Proposal.certain([[4096] for _ in rows])

    def forget(self, seq_ids: list[int]) -> None:
        self.forgotten |= set(seq_ids)
        if self.behaviour == "raises":
            raise KeyError("injected")


@pytest.mark.parametrize("behaviour", ["raises", "no proposal", "too many", "too few rows", "bad id"])
def test_a_failing_drafter_ends_no_request(
    make_engine: MakeEngine, expected: list[list[int]], caplog: pytest.LogCaptureFixture, behaviour: str
) -> None:
    drafter, policy = BadDrafter(behaviour), FixedPolicy("BadDrafter")
    engine = make_engine(drafter, policy=policy)
    good = neighbours(engine)
    run(engine)
    assert [sequence.output_ids for sequence in good] == expected
    assert drafter.num_calls == 3  # then it cools down
    assert policy.fallbacks == {("BadDrafter", "failed"): 1}
    assert drafter.forgotten == {sequence.seq_id for sequence in good}
    warned = [r.getMessage() for r in caplog.records if "drafter BadDrafter failed" in r.getMessage()]
    assert len(warned) == 1
    assert "it is not used for the next 32 steps" in warned[0]


def test_each_failure_of_a_drafter_doubles_its_cooldown(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = BadDrafter("raises")
    engine = make_engine(drafter)
    text = engine.add(PROMPTS[0], params(90, temperature=0.0))
    run(engine)
    assert text.num_output == 90
    assert drafter.num_calls == 4  # at about the third step, and 33 steps later; the next would be 65 later
    rests = [r.args[-1] for r in caplog.records if "drafter BadDrafter failed" in r.getMessage()]  # type: ignore[index]
    assert rests == [32, 64]


class BadPolicy(FixedPolicy):
    """Raises in every method."""

    def begin(self, running: Sequence[TokenSequence]) -> None:
        raise RuntimeError("injected")

    def draft_budget(self, sequence: TokenSequence) -> DraftBudget:
        raise RuntimeError("injected")

    def observe(self, step: Step) -> None:
        raise RuntimeError("injected")

    def cool_down(self, drafters: Sequence[str], reason: str, num_steps: int) -> list[str]:
        raise RuntimeError("injected")


def test_a_failing_policy_only_disables_drafting(
    make_engine: MakeEngine, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine("draft_model", policy=BadPolicy("DraftModelDrafter"))
    good = neighbours(engine)
    run(engine)
    assert [sequence.output_ids for sequence in good] == expected
    assert engine.stats.num_draft_tokens == 0
    (record,) = caplog.records  # logged once
    assert "BadPolicy failed: RuntimeError at test_isolation.py" in record.getMessage()


def test_a_failing_observer_ends_no_request_and_still_sees_every_step(
    make_engine: MakeEngine, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    class Raises:
        num_seen = 0

        def observe(self, step: Step) -> None:
            self.num_seen += 1
            raise RuntimeError("injected")

    class Counts(Raises):
        def observe(self, step: Step) -> None:
            self.num_seen += 1

    bad, good = Raises(), Counts()
    engine = make_engine("suffix", observers=[bad, good])
    texts = neighbours(engine)
    run(engine)
    assert [sequence.output_ids for sequence in texts] == expected
    assert bad.num_seen == good.num_seen > 5
    (record,) = caplog.records
    assert "Raises failed: RuntimeError at test_isolation.py" in record.getMessage()


@pytest.mark.parametrize("patch", [in_the_pass, in_verification], ids=["pass", "verification"])
def test_an_interrupt_is_no_requests_error(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, patch: Any
) -> None:
    engine = make_engine("draft_model")
    good = neighbours(engine)

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    engine.step()
    with monkeypatch.context() as patched:
        target = (engine, "_verifier") if patch is in_verification else (LanguageModel, "read")
        patched.setattr(*target, interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    run(engine)
    assert {sequence.error for sequence in good} == {None}


def test_run_isolated_splits_parts_until_one_item_is_at_fault() -> None:
    runs: list[list[int]] = []

    def run_part(items: Sequence[int]) -> list[int]:
        runs.append(list(items))
        if 5 in items:
            raise ValueError("five")
        return list(items)

    failed: list[tuple[int, str]] = []
    results, unexplained = run_isolated(
        range(8), run_part, run_part, lambda item, error: failed.append((item, str(error)))
    )
    assert unexplained is None
    assert [part[0] for part in results] == sorted(part[0] for part in results)
    assert sorted(item for part in results for item in part) == [0, 1, 2, 3, 4, 6, 7]
    assert failed == [(5, "five")]
    assert len(runs) == 1 + 7


def test_an_error_that_no_item_causes_alone_is_returned() -> None:
    first = ValueError("together")

    def together(items: Sequence[int]) -> list[int]:
        raise first

    failed: list[int] = []
    results, unexplained = run_isolated([1, 2], together, list, lambda item, _: failed.append(item))
    assert (results, unexplained, failed) == ([[1, 2]], first, [])
    with pytest.raises(ValueError, match="together"):
        run_isolated([], together, list, lambda item, _: failed.append(item))


def test_the_log_does_not_quote_foreign_errors(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    def quotes() -> int:
        raise RuntimeError("a prompt")

    shield = Shield()
    assert [shield.call(shield, quotes, 3) for _ in range(2)] == [3, 3]
    (record,) = caplog.records
    assert "a prompt" not in record.getMessage()
    assert brief(ForedraftError("ours")) == "ours"


@pytest.mark.slow
def test_unseeded_requests_beside_failing_ones_keep_their_distribution(make_engine: MakeEngine) -> None:
    """600 texts of three tokens, in steps that fail and are split again and again, are compared with the texts' probabilities. The
    false-alarm rate is 1e-6; the noise is seeded."""
    wanted = params(3, temperature=1.0, top_k=3)

    def faulty(logits: Tensor, proposal: Proposal, samplers: Sequence[Sampler], histories: Any, **kwargs: Any) -> Any:
        if any(s.params.top_k == 5 and len(h) > s.prompt_len for s, h in zip(samplers, histories, strict=True)):
            raise RuntimeError("injected")
        return verify(logits, proposal, samplers, histories, **kwargs)

    engine = make_engine("draft_model", speculative_tokens=2, verifier=faulty, seed=11, retain=False)
    good, bad = [], []
    for i in range(600):
        good.append(engine.add(PROMPTS[3], wanted))
        if i % 20 == 0:
            bad.append(engine.add(BAD_PROMPT, params(3, temperature=1.0, top_k=5)))
    run(engine)
    assert {sequence.error for sequence in bad} == {"RuntimeError: injected"}
    assert engine.stats.num_draft_tokens > 200
    law = _law_of_texts(make_engine("none"), PROMPTS[3], 3)
    seen = Counter(tuple(sequence.output_ids) for sequence in good)
    assert set(seen) <= set(law)
    texts = list(law)
    counts = torch.tensor([float(seen[text]) for text in texts])
    assert chi_square(counts, 600 * torch.tensor([law[text] for text in texts])) > FALSE_ALARM


def _law_of_texts(engine: Engine, prompt: Sequence[int], length: int) -> dict[tuple[int, ...], float]:
    """The probability of every text of this length under top_k 3, where ties at the border are kept."""
    if length == 0:
        return {(): 1.0}
    first = engine.add(prompt, params(1, temperature=0.0, logprobs=8))
    while engine.has_work:
        engine.step()
    (entry,) = first.logprobs
    weights = [math.exp(logprob) for logprob in entry.top_logprobs if logprob >= entry.top_logprobs[2]]
    found = {}
    for token, weight in zip(entry.top_ids, weights, strict=False):
        for rest, probability in _law_of_texts(engine, [*prompt, token], length - 1).items():
            found[token, *rest] = weight / sum(weights) * probability
    return found
