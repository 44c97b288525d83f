"""Invariant 6: the features that a drafter receives are the target's hidden states of the history, in order, whatever happened to the
sequence before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from foredraft.engine.engine import Engine
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.engine.scheduler import Limits
from foredraft.model import LanguageModel, Read
from foredraft.model.taps import FINAL_NORM
from foredraft.sampling import SamplingParams
from tests.laws import same

TAPS = (5, 2, FINAL_NORM)
PROMPTS = ([0, 549, 300, 11, 12, 300, 11, 12], [0, 616, 635, 271, 480], [0, *range(500, 600)])


class FeatureAudit:
    """Drafts the last two tokens again, which are sometimes accepted, and compares the features with those of a fresh pass."""

    def __init__(self, model: LanguageModel, taps: tuple[int, ...] = TAPS) -> None:
        self.taps = taps
        self.num_given: dict[int, list[int]] = {}
        self.num_wrong = 0
        self._model = model

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        self.num_wrong += 1  # undone below if all are right: errors raised here would be caught
        for request in requests:
            assert request.features is not None
            count = len(request.features)
            assert count < len(request.tokens)
            self.num_given.setdefault(request.seq_id, []).append(count)
            if count > 0:
                expected = hidden_states(self._model, request.tokens[:count], self.taps)
                for start in (0, count // 2):
                    given = request.features.since(start)
                    assert same(given, expected[start:], exact=self._model.traits.row_exact)
        self.num_wrong -= 1
        return Proposal.certain([list(request.tokens[-2:][: request.max_len]) for request in requests])

    def forget(self, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            self.num_given.pop(seq_id, None)


class Repeat:
    """Drafts the last token again, without features."""

    def __init__(self) -> None:
        self.was_given_features = False

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        self.was_given_features |= any(request.features is not None for request in requests)
        return Proposal.certain([list(request.tokens[-1:][: request.max_len]) for request in requests])

    def forget(self, seq_ids: list[int]) -> None: ...


def hidden_states(model: LanguageModel, tokens: Sequence[int], taps: tuple[int, ...]) -> Tensor:
    cache = model.new_cache(MemoryPool(1 << 40), taps)
    cache.reserve(0, len(tokens))
    model.read([Read(0, list(tokens), 1)], cache)
    features = cache.features(0)
    assert features is not None
    return features


def params(**settings: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "temperature": 0.0, **settings}).resolve({})  # type: ignore[arg-type]


def finish(engine: Engine, *audits: FeatureAudit) -> None:
    while engine.has_work:
        engine.step()
    assert [audit.num_wrong for audit in audits] == [0] * len(audits)


def test_features_follow_acceptance_and_rejection_in_a_batch(target: LanguageModel) -> None:
    audit = FeatureAudit(target)
    engine = Engine(target, audit, MemoryPool(1 << 28), seed=0)
    sequences = [engine.add(prompt, params()) for prompt in PROMPTS]
    for _ in range(12):
        engine.step()
        for sequence in sequences:
            # the first draft may come before the prompt is read; from then on only the pending token has no features
            given = audit.num_given.get(sequence.seq_id, [])
            assert all(count >= len(sequence.tokens) - sequence.num_output for count in given[1:])
    finish(engine, audit)
    assert sum(sequence.stats.num_accepted_tokens for sequence in sequences) > 0
    assert all(sequence.error is None for sequence in sequences)


def test_features_follow_chunked_prompts(target: LanguageModel) -> None:
    audit = FeatureAudit(target)
    engine = Engine(target, audit, MemoryPool(1 << 28), seed=0, limits=Limits(max_batch_tokens=16))
    sequence = engine.add(PROMPTS[2], params())
    finish(engine, audit)
    assert sequence.error is None
    assert sequence.num_output == 24


def test_features_are_right_after_preemption(target: LanguageModel) -> None:
    audit = FeatureAudit(target)
    engine = Engine(target, audit, MemoryPool(1 << 28), seed=0)
    sequences = [engine.add(prompt, params()) for prompt in PROMPTS[:2]]
    for _ in range(4):
        engine.step()
    engine.preempt(sequences[0])
    finish(engine, audit)
    assert [sequence.error for sequence in sequences] == [None, None]
    assert [sequence.num_output for sequence in sequences] == [24, 24]


@pytest.mark.parametrize("length", [40, 101], ids=["copied", "taken over"])
def test_a_prefix_hit_includes_the_features(target: LanguageModel, length: int) -> None:
    audit = FeatureAudit(target)
    engine = Engine(target, audit, MemoryPool(1 << 28), seed=0)
    first = engine.add(PROMPTS[2], params(max_tokens=4))
    finish(engine, audit)
    second = engine.add([*first.tokens[:length], 77, 78], params())
    finish(engine, audit)
    assert second.error is None
    assert second.num_cached >= min(length, 40)


def test_each_drafter_gets_the_columns_of_its_own_taps(target: LanguageModel) -> None:
    audits = {name: FeatureAudit(target, taps) for name, taps in {"a": (2,), "b": (FINAL_NORM, 5), "c": TAPS}.items()}
    for name in audits:
        engine = Engine(target, {name: audits[name], **audits, "d": Repeat()}, MemoryPool(1 << 28), seed=0)
        sequence = engine.add(PROMPTS[0], params())
        finish(engine, audits[name])
        assert sequence.error is None
        assert audits[name].num_given == {}  # it was called, and has forgotten the sequence


def test_a_drafter_without_taps_costs_no_memory_and_gets_no_features(target: LanguageModel) -> None:
    repeat = Repeat()
    engine = Engine(target, repeat, MemoryPool(1 << 28), seed=0)
    engine.add(PROMPTS[0], params())
    finish(engine)
    assert not repeat.was_given_features
    assert engine.cache.bytes_per_token == target.traits.bytes_per_token
    beside = Engine(target, {"a": repeat, "b": FeatureAudit(target)}, MemoryPool(1 << 28), seed=0)
    beside.add(PROMPTS[0], params())
    finish(beside)
    assert not repeat.was_given_features
    width = target.hf.config.hidden_size
    assert beside.cache.bytes_per_token == target.traits.bytes_per_token + 2 * len(TAPS) * width


def test_features_are_stored_in_bfloat16(target: LanguageModel) -> None:
    assert hidden_states(target, PROMPTS[0], (0,)).dtype == torch.bfloat16
