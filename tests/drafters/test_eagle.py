"""The EAGLE drafter: which rows the head reads with which states, how it catches up, and what memory it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foredraft.drafters import DrafterContext, EagleDrafter
from foredraft.engine.engine import Engine
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import DraftRequest, Features, Proposal
from foredraft.engine.sequence import TokenSequence
from foredraft.engine.token_tree import ROOT, TreeShape
from foredraft.errors import ForedraftError
from foredraft.heads import CompiledEagle, EagleHead, HeadOptions, TargetEnds, TargetShape, attach_head, load_head
from foredraft.model import LanguageModel, Read
from foredraft.policy import FixedPolicy
from foredraft.policy.base import NO_DRAFTING, DraftBudget
from foredraft.sampling import Bits, Sampler, SamplingParams
from foredraft.testing import DrafterContract
from foredraft.testing.requests import request_for
from tests.heads.random_heads import embedded_head, random_head

HISTORY = [0, 549, 300, 11, 12, 300, 11, 12, 77, 78, 79, 80]
GREEDY: dict[str, object] = {}
SEEDED: dict[str, object] = {"temperature": 0.9, "seed": 7}


@pytest.fixture(scope="module")
def head(target: LanguageModel) -> EagleHead | CompiledEagle:
    head = random_head("eagle", target)
    assert isinstance(head, EagleHead | CompiledEagle)
    return head


def new_drafter(head: EagleHead | CompiledEagle, memory: int = 1 << 28, max_rows: int = 512) -> EagleDrafter:
    return EagleDrafter(head, 4096, MemoryPool(memory), context_len=1024, max_rows=max_rows)


def request(
    target: LanguageModel,
    head: EagleHead | CompiledEagle,
    tokens: Sequence[int],
    max_len: int = 4,
    seq_id: int = 0,
    num_forced: int = 0,
    **params: object,
) -> DraftRequest:
    """A request as the engine makes it after the target has read everything but the pending and the forced tokens."""
    num_read = len(tokens) - 1 - num_forced
    cache = target.new_cache(MemoryPool(1 << 28), head.config.taps)
    cache.reserve(0, num_read)
    target.read([Read(0, tokens[:num_read], 0)], cache)
    features = cache.features(0)
    assert features is not None
    made = request_for(seq_id, tokens, max_len, **params)
    return DraftRequest(seq_id, tokens, max_len, made.sampler, Features(features), num_forced)


def draft(proposal: Proposal) -> list[list[int]]:
    return proposal.draft_ids


@torch.inference_mode()
def by_hand(head: EagleHead | CompiledEagle, target: LanguageModel, tokens: Sequence[int], count: int) -> list[int]:
    """The greedy draft, with every row read again in every pass."""
    made = request(target, head, tokens)
    assert made.features is not None
    states = head.fuse(made.features.since(0))
    ids: list[int] = []
    for _ in range(count):
        cache = new_drafter(head)._cache
        cache.reserve(0, 64)
        rows = [*tokens[1:], *ids]
        reading = head.read([Read(0, rows, len(rows))], states, cache)
        ids.append(int(head.on_target(reading.logits[-1:]).argmax()))
        states = torch.cat([states, reading.states[-1:]])
    return ids


def test_the_draft_is_what_the_head_gives_without_a_cache(
    target: LanguageModel, head: EagleHead | CompiledEagle
) -> None:
    proposal = new_drafter(head).propose([request(target, head, HISTORY)])
    assert draft(proposal) == [by_hand(head, target, HISTORY, 4)]


@pytest.mark.parametrize("params", [{"repetition_penalty": 1.5}, {**SEEDED, "frequency_penalty": 0.8}], ids=str)
@pytest.mark.parametrize("shape", [None, TreeShape((ROOT, ROOT, 0, 0, 1, 2, 2))], ids=["chain", "tree"])
def test_adjusted_drafts_written_in_one_call_equal_those_of_single_passes(
    target: LanguageModel,
    head: EagleHead | CompiledEagle,
    params: dict[str, Any],
    shape: TreeShape | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not isinstance(head, CompiledEagle):
        pytest.skip("this machine has no compiled kernels")

    def drafted() -> tuple[list[list[int]], Any]:
        made = request(target, head, HISTORY, 8, **params)
        proposal = new_drafter(head).propose([replace(made, shape=shape)])
        return proposal.draft_ids, proposal.draft_parents

    at_once = drafted()
    monkeypatch.setattr(Sampler, "has_adjustments", lambda *_: False)
    assert drafted() == at_once
    assert len(at_once[0][0]) == (8 if shape is None else 7)


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_a_draft_does_not_depend_on_earlier_drafts(
    target: LanguageModel, head: EagleHead | CompiledEagle, params: dict[str, object]
) -> None:
    """Whether they were accepted or rejected, and also after steps without a draft."""
    drafter = new_drafter(head)
    for length in (3, 5, 6, 10, 7, 12):  # at 7 the history is shorter than before
        request_now = request(target, head, HISTORY[:length], **params)
        fresh = new_drafter(head).propose([request(target, head, HISTORY[:length], **params)])
        assert draft(drafter.propose([request_now])) == draft(fresh)


class RestingPolicy(FixedPolicy):
    """Drafts only at every seventh token of a text, as "auto" pauses where drafting is not worth its time."""

    def draft_budget(self, sequence: TokenSequence) -> DraftBudget:
        return super().draft_budget(sequence) if sequence.num_output % 7 == 6 else NO_DRAFTING


class NeverSkipped:
    """Drafts with an EAGLE head, and compares each draft with that of a new drafter. num_passes: how many passes the head took for each
    draft."""

    def __init__(self, head: EagleHead | CompiledEagle, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_passes: list[int] = []
        self.num_wrong = 0
        self._head, self._drafter, self._calls = head, new_drafter(head), 0
        self.taps = self._drafter.taps
        for name in ("read", "generate"):
            if hasattr(head, name):
                monkeypatch.setattr(head, name, self._counting(getattr(head, name)))

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        self._calls = 0
        proposal = self._drafter.propose(requests)
        if any(len(ids) > 0 for ids in draft(proposal)):
            self.num_passes.append(self._calls)
        self.num_wrong += draft(proposal) != draft(new_drafter(self._head).propose(requests))
        return proposal

    def forget(self, seq_ids: list[int]) -> None:
        self._drafter.forget(seq_ids)

    def _counting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self._calls += 1
            return method(*args)

        return counted


def test_after_steps_without_a_draft_a_head_catches_up_in_one_pass(
    target: LanguageModel, head: EagleHead | CompiledEagle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drafts are those of a head that was never skipped, and take no more passes: one that reads the new history, and in plain
    PyTorch one for each further token."""
    drafter = NeverSkipped(head, monkeypatch)
    engine = Engine(target, drafter, MemoryPool(1 << 28), policy=RestingPolicy("NeverSkipped"), seed=0)
    params = SamplingParams(max_tokens=40, temperature=0.0, speculative_tokens=3, ignore_eos=True).resolve({})
    sequence = engine.add(HISTORY, params)
    while engine.has_work:
        engine.step()
    assert sequence.error is None
    assert sequence.num_output == 40
    assert len(drafter.num_passes) >= 4
    assert drafter.num_wrong == 0
    assert set(drafter.num_passes) == {1 if isinstance(head, CompiledEagle) else 3}


def test_a_new_history_of_a_forgotten_sequence_is_read_from_its_beginning(
    target: LanguageModel, head: EagleHead | CompiledEagle
) -> None:
    drafter = new_drafter(head)
    drafter.propose([request(target, head, HISTORY)])
    other = [0, 616, *HISTORY[2:]]
    drafter.forget([0])
    assert draft(drafter.propose([request(target, head, other)])) == [by_hand(head, target, other, 4)]


def test_batches_and_small_passes_give_the_drafts_of_each_request_alone(
    target: LanguageModel, head: EagleHead | CompiledEagle
) -> None:
    histories = [HISTORY, HISTORY[:2], [0, *range(500, 530)]]
    alone = [by_hand(head, target, history, 3) for history in histories]
    for max_rows in (512, 8):
        requests = [request(target, head, history, 3, seq_id) for seq_id, history in enumerate(histories)]
        assert draft(new_drafter(head, max_rows=max_rows).propose(requests)) == alone


def dense_probs(proposal: Proposal) -> Tensor:
    """Over all 4,096 ids."""
    assert proposal.token_probs is not None
    return proposal.token_probs.dense(4096)


def test_beyond_its_window_a_head_drafts_as_if_the_text_began_there(target: LanguageModel) -> None:
    """The first draft token's distribution is that of a head that has read only the last tokens, at different lengths of the text. The
    module and the compiled head agree."""
    window, history = 8, [*HISTORY, *range(300, 320), *HISTORY]
    capped = attach_head(str(embedded_head("eagle")), target, options=HeadOptions(window))
    checkpoint, ends = load_head(str(embedded_head("eagle")), TargetShape.of(target.hf.config)), TargetEnds(target.hf)
    module = EagleHead.of(checkpoint, ends.embed, ends.lm_head, target.hf.dtype, window)
    whole = random_head("eagle", target)
    assert isinstance(capped, EagleHead | CompiledEagle)
    assert isinstance(whole, EagleHead | CompiledEagle)
    drafters = [new_drafter(capped), new_drafter(module)]
    for end in (len(history) - 4, len(history)):
        asked = request(target, capped, history[:end], 1, temperature=1.0)
        assert asked.features is not None
        features = Features(asked.features.since(end - 1 - window))
        recent = DraftRequest(0, history[end - 1 - window : end], 1, asked.sampler, features)
        expected, unlimited = (dense_probs(new_drafter(whole).propose([each])) for each in (recent, asked))
        for drafter in drafters:
            probs = dense_probs(drafter.propose([asked]))
            assert (probs - expected).abs().sum() < 0.2 * (probs - unlimited).abs().sum()


def test_forced_tokens_are_read_with_the_heads_own_states(
    target: LanguageModel, head: EagleHead | CompiledEagle
) -> None:
    """As if the head had drafted them: if its own first draft tokens are forced, the rest of its draft is the same."""
    whole = by_hand(head, target, HISTORY, 5)
    behind = request(target, head, [*HISTORY, *whole[:2]], 3, num_forced=2)
    assert draft(new_drafter(head).propose([behind])) == [whole[2:]]


def test_nothing_is_drafted_before_the_target_has_read_the_history(
    target: LanguageModel, head: EagleHead | CompiledEagle
) -> None:
    whole = request(target, head, HISTORY)
    assert whole.features is not None
    partly = DraftRequest(0, HISTORY, 4, whole.sampler, Features(whole.features.since(0)[:5]))
    one = request_for(1, [0], 4)
    nothing = DraftRequest(1, [0], 4, one.sampler, Features(torch.empty(0, 0)))
    drafter = new_drafter(head)
    assert draft(drafter.propose([partly, nothing])) == [[], []]
    assert drafter.bytes_held == 0


def test_sampled_tokens_come_from_their_distributions_and_only_from_the_heads_vocabulary(
    target: LanguageModel, head: EagleHead | CompiledEagle
) -> None:
    proposal = new_drafter(head).propose([request(target, head, HISTORY, temperature=1.0)])
    assert head.config.target_ids is not None
    known = set(head.config.target_ids.tolist())
    probs = dense_probs(proposal)
    assert probs.shape == (4, 4096)
    assert set(draft(proposal)[0]) <= known
    outside = [i for i in range(4096) if i not in known]
    assert float(probs[:, outside].sum()) == 0.0
    assert float(probs.sum()) == pytest.approx(4)


def test_under_a_constraint_nan_drafts_nothing(target: LanguageModel, head: EagleHead | CompiledEagle) -> None:
    class Anything:
        allows_drafts = True

        def allowed(self, history: Sequence[int], drafted: Sequence[int]) -> Bits:
            return np.full(4096 // 8, 0xFF, np.uint8)

        def num_allowed(self, history: Sequence[int], drafted: Sequence[int]) -> int:
            return len(drafted)

        def forced(self, history: Sequence[int], drafted: Sequence[int], at_most: int) -> list[int]:
            return []

    asked = request(target, head, HISTORY, temperature=1.0)
    assert asked.features is not None
    asked.sampler.constraint = Anything()
    asked.features = Features(torch.full_like(asked.features.since(0), torch.nan))
    assert draft(new_drafter(head).propose([asked])) == [[]]


def test_memory_is_taken_from_the_pool_and_returned(target: LanguageModel, head: EagleHead | CompiledEagle) -> None:
    pool = MemoryPool(64 * head.bytes_per_token)
    drafter = EagleDrafter(head, 4096, pool, context_len=1024)
    assert len(draft(drafter.propose([request(target, head, HISTORY)]))[0]) == 4
    assert pool.used == drafter.bytes_held == 64 * head.bytes_per_token
    assert draft(drafter.propose([request(target, head, HISTORY, seq_id=1)])) == [[]]
    drafter.forget([0, 1])
    assert pool.used == 0


def test_a_head_is_required() -> None:
    with pytest.raises(
        ForedraftError, match='"eagle" needs an EAGLE head: give its directory or hub id as draft_model'
    ):
        EagleDrafter.build(DrafterContext(16, MemoryPool(1)))


@pytest.mark.slow
class TestContract(DrafterContract):
    """Law 4, with features of a made-up target."""

    vocab_size = 4096
    invisible = False  # tests/engine/test_engine.py checks its texts

    @pytest.fixture(autouse=True)
    def _with_head(self, head: EagleHead | CompiledEagle) -> None:
        self._head = head
        self.feature_size = head.config.feature_size

    def make_drafter(self, vocab_size: int) -> EagleDrafter:
        return new_drafter(self._head)
