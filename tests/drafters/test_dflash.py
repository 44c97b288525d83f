"""The DFlash drafter: its block over the target's features, and which row of the block drafts which token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.drafters import DFlashDrafter, DrafterContext
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import CERTAIN, DraftRequest, Features
from foredraft.engine.token_tree import TreeShape
from foredraft.errors import ForedraftError
from foredraft.heads import DFlashHead
from foredraft.model import LanguageModel
from foredraft.sampling import Row, choose
from foredraft.testing import DrafterContract
from foredraft.testing.requests import request_for
from tests.heads.random_heads import random_head

HISTORY = [0, 549, 300, 11, 12, 300, 11, 12, 77, 78, 79, 80]


@pytest.fixture(scope="module")
def head(target: LanguageModel) -> DFlashHead:
    head = random_head("dflash", target)
    assert isinstance(head, DFlashHead)
    return head


def new_drafter(head: DFlashHead, memory: int = 1 << 28, max_rows: int = 512) -> DFlashDrafter:
    return DFlashDrafter(head, 4096, MemoryPool(memory), context_len=1024, max_rows=max_rows)


def request(
    target: LanguageModel,
    head: DFlashHead,
    tokens: Sequence[int],
    max_len: int = 4,
    seq_id: int = 0,
    num_forced: int = 0,
    shape: TreeShape | None = None,
    **params: object,
) -> DraftRequest:
    """A request as the engine makes it after the target has read everything but the pending and the forced tokens."""
    (features,) = target.read_features([tokens[: len(tokens) - 1 - num_forced]], head.config.taps)
    sampler = request_for(seq_id, tokens, max_len, **params).sampler
    return DraftRequest(seq_id, tokens, max_len, sampler, Features(features), num_forced, shape=shape)


def place_logits(head: DFlashHead, made: DraftRequest) -> Tensor:
    """[positions, V], the logits of the positions that are not forced, with a newly injected context."""
    assert made.features is not None
    cache, length = new_drafter(head)._cache, len(made.features)
    cache.reserve(0, 64)
    head.inject(cache.region(0), made.tokens[:length], made.features.since(0))
    return head.on_target(head.read([0], [made.tokens[length]], cache).logits[0, 1:])[made.num_forced :]


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.9, "seed": 7}, {"repetition_penalty": 1.4}], ids=["greedy", "seeded", "penalty"]
)
def test_each_mask_row_drafts_the_token_of_its_position(
    target: LanguageModel, head: DFlashHead, params: dict[str, Any]
) -> None:
    """Sequences of different lengths in one pass, one of them with forced tokens after its history."""
    made = [
        request(target, head, HISTORY, 9, 0, **params),
        request(target, head, HISTORY[:3], 1, 1, **params),
        request(target, head, HISTORY[:9], 9, 2, num_forced=2, **params),
    ]
    expected = []
    for each, length in zip(made, (4, 1, 2), strict=True):
        ids: list[int] = []
        for logits in place_logits(head, each)[:length].split(1):
            ids.append(choose(logits, [Row(each.sampler, each.tokens, list(ids))]).ids[0])
        expected.append(ids)
    proposal = new_drafter(head).propose(made)
    assert proposal.draft_ids == expected
    assert {row for rows in proposal.draft_prob_rows for row in rows} == {CERTAIN}


def test_the_context_follows_accepted_and_rejected_drafts(target: LanguageModel, head: DFlashHead) -> None:
    drafter, tokens = new_drafter(head), list(HISTORY)
    for taken, own in ((4, 17), (0, 300), (2, 19), (1, 300)):
        made = request(target, head, tokens)
        (ids,) = drafter.propose([made]).draft_ids
        assert [ids] == new_drafter(head).propose([made]).draft_ids
        tokens = [*tokens, *ids[:taken], own]
    other = request(target, head, [*HISTORY[:5], 9, 10])
    assert drafter.propose([other]).draft_ids == new_drafter(head).propose([other]).draft_ids


def test_injecting_a_long_history_in_several_passes_changes_no_draft(target: LanguageModel, head: DFlashHead) -> None:
    made = [request(target, head, HISTORY, 4, 0), request(target, head, HISTORY[:7], 4, 1)]
    assert new_drafter(head, max_rows=3).propose(made).draft_ids == new_drafter(head).propose(made).draft_ids


def test_siblings_are_the_likeliest_tokens_of_their_position(target: LanguageModel, head: DFlashHead) -> None:
    shape = TreeShape.of_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), *([0] * n for n in (4, 5, 6))])
    made = request(target, head, HISTORY, 9, shape=shape)
    best = place_logits(head, made).topk(2).indices.tolist()
    proposal = new_drafter(head).propose([made])
    drafted = [node for node in range(len(shape)) if shape.depths[node] <= 4]  # a block drafts four tokens
    ranks = [shape.children[shape.parents[node]].index(node) for node in drafted]
    assert proposal.draft_parents == [[shape.parents[node] for node in drafted]]
    assert proposal.draft_ids == [
        [best[shape.depths[node] - 1][rank] for node, rank in zip(drafted, ranks, strict=True)]
    ]


def test_sampled_tokens_name_their_distributions(target: LanguageModel, head: DFlashHead) -> None:
    made = request(target, head, HISTORY, 4, temperature=0.8)
    proposal = new_drafter(head).propose([made])
    assert proposal.draft_prob_rows == [[0, 1, 2, 3]]
    assert proposal.token_probs is not None
    expected = torch.softmax(place_logits(head, made).float() / 0.8, -1)
    torch.testing.assert_close(proposal.token_probs.dense(4096).float(), expected, rtol=0.05, atol=2e-3)


def test_without_features_room_or_memory_there_is_no_draft(target: LanguageModel, head: DFlashHead) -> None:
    unread = DraftRequest(0, HISTORY, 4, request_for(0, HISTORY, 4).sampler, Features(torch.empty(0, 0)))
    all_forced = request(target, head, HISTORY, 4, 2, num_forced=4)
    drafter = new_drafter(head)
    assert drafter.propose([unread, request(target, head, HISTORY, 0, 1), all_forced]).lens.tolist() == [0, 0, 0]
    assert drafter.bytes_held == 0
    assert new_drafter(head, memory=1).propose([request(target, head, HISTORY)]).lens.tolist() == [0]
    drafter.propose([request(target, head, HISTORY)])
    assert drafter.bytes_held > 0
    drafter.forget([0, 7])
    assert drafter.bytes_held == 0


def test_a_dflash_head_is_required(target: LanguageModel) -> None:
    for other in (None, random_head("eagle", target)):
        with pytest.raises(
            ForedraftError, match='"dflash" needs a DFlash head: give its directory or hub id as draft_model'
        ):
            DFlashDrafter.build(DrafterContext(16, MemoryPool(1), head=other))


@pytest.mark.slow
class TestContract(DrafterContract):
    """Law 4, with features of a made-up target."""

    vocab_size = 4096
    invisible = False  # tests/engine/test_engine.py checks its texts

    @pytest.fixture(autouse=True)
    def _with_head(self, head: DFlashHead) -> None:
        self._head, self.feature_size = head, head.config.feature_size

    def make_drafter(self, vocab_size: int) -> DFlashDrafter:
        return DFlashDrafter(self._head, vocab_size, MemoryPool(1 << 30), context_len=1024)
