"""What is an EAGLE head's own business: which rows it reads with whose states, how it catches up, and what it holds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from foredraft.drafters import DrafterContext, EagleDrafter
from foredraft.engine.cache import MemoryPool
from foredraft.engine.proposal import DraftRequest, Features, Proposal
from foredraft.errors import ForedraftError
from foredraft.heads import CompiledEagle, EagleHead
from foredraft.model import LanguageModel, Read
from foredraft.testing import DrafterContract
from foredraft.testing.requests import request_for
from tests.heads.random_heads import random_head

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
    """As the engine makes it, once the target has read all but the pending token and what is forced."""
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
    """The greedy draft, every row read anew in every pass."""
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


def test_the_draft_is_what_the_head_gives_row_by_row(target: LanguageModel, head: EagleHead | CompiledEagle) -> None:
    proposal = new_drafter(head).propose([request(target, head, HISTORY)])
    assert draft(proposal) == [by_hand(head, target, HISTORY, 4)]


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_a_draft_does_not_depend_on_those_before(
    target: LanguageModel, head: EagleHead | CompiledEagle, params: dict[str, object]
) -> None:
    """Neither on accepted tokens nor on rejected ones, nor on rounds without a draft in between."""
    drafter = new_drafter(head)
    for length in (3, 5, 6, 10, 7, 12):  # 7: a history that was rewound
        request_now = request(target, head, HISTORY[:length], **params)
        fresh = new_drafter(head).propose([request(target, head, HISTORY[:length], **params)])
        assert draft(drafter.propose([request_now])) == draft(fresh)


def test_another_history_under_the_same_id_is_read_anew(target: LanguageModel, head: EagleHead | CompiledEagle) -> None:
    drafter = new_drafter(head)
    drafter.propose([request(target, head, HISTORY)])
    other = [0, 616, *HISTORY[2:]]
    drafter.forget([0])
    assert draft(drafter.propose([request(target, head, other)])) == [by_hand(head, target, other, 4)]


def test_a_batch_and_small_passes_give_the_drafts_of_each_alone(
    target: LanguageModel, head: EagleHead | CompiledEagle
) -> None:
    histories = [HISTORY, HISTORY[:2], [0, *range(500, 530)]]
    alone = [by_hand(head, target, history, 3) for history in histories]
    for max_rows in (512, 8):
        requests = [request(target, head, history, 3, seq_id) for seq_id, history in enumerate(histories)]
        assert draft(new_drafter(head, max_rows=max_rows).propose(requests)) == alone


def test_forced_tokens_are_read_with_the_heads_own_states(
    target: LanguageModel, head: EagleHead | CompiledEagle
) -> None:
    """As if the head had drafted them: its draft behind its own first tokens is the rest of its draft."""
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
    assert proposal.probs is not None
    assert proposal.probs.shape == (4, 4096)
    assert set(draft(proposal)[0]) <= known
    outside = [i for i in range(4096) if i not in known]
    assert float(proposal.probs[:, outside].sum()) == 0.0


def test_memory_is_taken_from_the_pool_and_given_back(target: LanguageModel, head: EagleHead | CompiledEagle) -> None:
    pool = MemoryPool(64 * head.bytes_per_token)
    drafter = EagleDrafter(head, 4096, pool, context_len=1024)
    assert len(draft(drafter.propose([request(target, head, HISTORY)]))[0]) == 4
    assert pool.used == drafter.bytes_held == 64 * head.bytes_per_token
    assert draft(drafter.propose([request(target, head, HISTORY, seq_id=1)])) == [[]]
    drafter.forget([0, 1])
    assert pool.used == 0


def test_a_head_is_needed() -> None:
    with pytest.raises(ForedraftError, match='"eagle" needs an EAGLE head: give draft_model= its directory'):
        EagleDrafter.build(DrafterContext(16, MemoryPool(1)))


@pytest.mark.slow
class TestContract(DrafterContract):
    """Law 4, with the features of an imaginary target."""

    vocab_size = 4096
    invisible = False  # it writes texts in tests/engine/test_engine.py

    @pytest.fixture(autouse=True)
    def _with_head(self, head: EagleHead | CompiledEagle) -> None:
        self._head = head
        self.feature_size = head.config.feature_size

    def make_drafter(self, vocab_size: int) -> EagleDrafter:
        return new_drafter(self._head)
