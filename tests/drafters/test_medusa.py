"""The Medusa drafter: which head drafts which token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from foredraft.drafters import DrafterContext, MedusaDrafter
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import DraftRequest, Features
from foredraft.errors import ForedraftError
from foredraft.heads import MedusaHead
from foredraft.model import LanguageModel
from foredraft.testing import DrafterContract
from foredraft.testing.requests import request_for
from tests.heads.random_heads import random_head

HISTORY = [0, 549, 300, 11, 12, 300, 11, 12]


@pytest.fixture(scope="module")
def head(target: LanguageModel) -> MedusaHead:
    head = random_head("medusa", target)
    assert isinstance(head, MedusaHead)
    return head


def request(
    head: MedusaHead, tokens: Sequence[int], max_len: int, num_forced: int = 0, **params: object
) -> DraftRequest:
    num_read = len(tokens) - 1 - num_forced
    rows = torch.randn(num_read, head.config.feature_size, generator=torch.Generator().manual_seed(num_read))
    made = request_for(0, tokens, max_len, **params)
    return DraftRequest(0, tokens, max_len, made.sampler, Features(rows.bfloat16()), num_forced)


@torch.inference_mode()
def likeliest(head: MedusaHead, made: DraftRequest) -> list[int]:
    """The likeliest token of every head, for the last row that the target has read."""
    assert made.features is not None
    logits = head(made.features.since(len(made.features) - 1))[0]
    return [int(head.on_target(logits[i : i + 1]).argmax()) for i in range(head.config.num_heads)]


def test_head_h_drafts_the_token_h_positions_after_the_pending_one(head: MedusaHead) -> None:
    made = [request(head, HISTORY, 3), request(head, HISTORY[:4], 9), request(head, HISTORY[:5], 1)]
    drafts = MedusaDrafter(head, 4096).propose(made).draft_ids
    assert drafts == [likeliest(head, made[0])[:3], likeliest(head, made[1]), likeliest(head, made[2])[:1]]


def test_heads_of_forced_positions_are_skipped(head: MedusaHead) -> None:
    made = request(head, [*HISTORY, 5, 6], 9, num_forced=2)
    assert MedusaDrafter(head, 4096).propose([made]).draft_ids == [likeliest(head, made)[2:]]
    all_forced = request(head, [*HISTORY, *range(9)], 9, num_forced=9)
    assert MedusaDrafter(head, 4096).propose([all_forced]).draft_ids == [[]]


def test_sampled_tokens_name_their_distributions(head: MedusaHead) -> None:
    proposal = MedusaDrafter(head, 4096).propose([request(head, HISTORY, 4, temperature=1.0)])
    assert proposal.probs is not None
    assert proposal.draft_prob_rows == [[0, 1, 2, 3]]
    assert torch.allclose(proposal.probs.sum(-1), torch.ones(4), atol=1e-4)


def test_heads_are_required() -> None:
    with pytest.raises(
        ForedraftError, match='"medusa" needs Medusa heads: give their directory or hub id as draft_model'
    ):
        MedusaDrafter.build(DrafterContext(16, MemoryPool(1)))


@pytest.mark.slow
class TestContract(DrafterContract):
    """Law 4, with features of a made-up target."""

    vocab_size = 4096
    invisible = False  # tests/engine/test_engine.py checks its texts

    @pytest.fixture(autouse=True)
    def _with_head(self, head: MedusaHead) -> None:
        self._head, self.feature_size = head, head.config.feature_size

    def make_drafter(self, vocab_size: int) -> MedusaDrafter:
        return MedusaDrafter(self._head, vocab_size)
