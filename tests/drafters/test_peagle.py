"""The P-EAGLE drafter: it drafts in one pass over the target's features and mask rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.drafters import DrafterContext, PEagleDrafter
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import CERTAIN, DraftRequest, Features
from foredraft.engine.token_tree import TreeShape
from foredraft.errors import ForedraftError
from foredraft.heads import CompiledEagle, EagleHead
from foredraft.model import LanguageModel, Read
from foredraft.sampling import Row, choose
from foredraft.testing import DrafterContract
from foredraft.testing.requests import request_for
from tests.heads.random_heads import MASK_TOKEN, random_head

HISTORY = [0, 549, 300, 11, 12, 300, 11, 12, 77, 78, 79, 80]


@pytest.fixture(scope="module")
def head(target: LanguageModel) -> EagleHead | CompiledEagle:
    head = random_head("peagle", target)
    assert isinstance(head, EagleHead | CompiledEagle)
    return head


def new_drafter(head: EagleHead | CompiledEagle, memory: int = 1 << 28, max_rows: int = 512) -> PEagleDrafter:
    return PEagleDrafter(head, 4096, MemoryPool(memory), context_len=1024, max_rows=max_rows)


def features_of(target: LanguageModel, head: EagleHead | CompiledEagle, tokens: Sequence[int]) -> Tensor:
    return target.read_features([tokens], head.config.taps)[0]


def request(
    target: LanguageModel,
    head: EagleHead | CompiledEagle,
    tokens: Sequence[int],
    max_len: int = 4,
    seq_id: int = 0,
    num_forced: int = 0,
    shape: TreeShape | None = None,
    **params: object,
) -> DraftRequest:
    """A request as the engine makes it after the target has read everything but the pending and the forced tokens."""
    features = Features(features_of(target, head, tokens[: len(tokens) - 1 - num_forced]))
    sampler = request_for(seq_id, tokens, max_len, **params).sampler
    return DraftRequest(seq_id, tokens, max_len, sampler, features, num_forced, shape=shape)


@torch.inference_mode()
def place_logits(head: EagleHead | CompiledEagle, made: DraftRequest, num_places: int) -> Tensor:
    """[num_places, V], the logits after the forced tokens (which are masked too), with every row read again in one pass."""
    assert made.features is not None
    num_masks = made.num_forced + num_places - 1
    tokens = [*made.tokens[1 : len(made.features) + 1], *[MASK_TOKEN] * num_masks]
    states = torch.cat([head.fuse(made.features.since(0).to(head.dtype)), head.mask_state.expand(num_masks, -1)])
    cache = new_drafter(head)._cache
    cache.reserve(0, 64)
    return head.on_target(head.read([Read(0, tokens, num_places)], states, cache).logits)


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.9, "seed": 7}, {"repetition_penalty": 1.4}], ids=["greedy", "seeded", "penalty"]
)
def test_each_mask_row_drafts_the_token_of_its_position(
    target: LanguageModel, head: EagleHead | CompiledEagle, params: dict[str, Any]
) -> None:
    """Sequences of different lengths in one pass, one of them with forced tokens after its history."""
    made = [
        request(target, head, HISTORY, 4, 0, **params),
        request(target, head, HISTORY[:3], 1, 1, **params),
        request(target, head, HISTORY[:9], 3, 2, num_forced=2, **params),
    ]
    expected = []
    for each in made:
        ids: list[int] = []
        for logits in place_logits(head, each, each.max_len).split(1):
            ids.append(choose(logits, [Row(each.sampler, each.tokens, list(ids))]).ids[0])
        expected.append(ids)
    proposal = new_drafter(head).propose(made)
    assert proposal.draft_ids == expected
    assert {row for rows in proposal.draft_prob_rows for row in rows} == {CERTAIN}


def test_a_draft_takes_one_pass_and_masks_leave_no_trace(
    target: LanguageModel, head: EagleHead | CompiledEagle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether drafts are accepted, rejected or partly accepted, the next draft is that of a new drafter."""
    sizes: list[int] = []
    drafter, read, tokens = new_drafter(head), head.read, list(HISTORY)

    def watched(reads: Sequence[Read], *rest: Any) -> Any:
        sizes.append(sum(len(each.tokens) for each in reads))
        return read(reads, *rest)

    for taken, own, max_len in ((4, 17, 8), (0, 300, 4), (2, 19, 6), (1, 300, 4)):
        made = request(target, head, tokens, max_len)
        expected = new_drafter(head).propose([made]).draft_ids
        with monkeypatch.context() as patch:
            patch.setattr(head, "read", watched)
            (ids,) = drafter.propose([made]).draft_ids
        assert [ids] == expected
        tokens = [*tokens, *ids[:taken], own]
    # unread rows (all; 5; 1; 3) and masks
    assert sizes == [len(HISTORY) - 1 + 7, 5 + 3, 1 + 5, 3 + 3]


def test_reading_a_long_history_in_several_passes_changes_no_draft(
    target: LanguageModel, head: EagleHead | CompiledEagle
) -> None:
    made = [request(target, head, HISTORY, 4, 0), request(target, head, HISTORY[:7], 4, 1)]
    assert new_drafter(head, max_rows=5).propose(made).draft_ids == new_drafter(head).propose(made).draft_ids


def test_siblings_are_the_likeliest_tokens_of_their_position(
    target: LanguageModel, head: EagleHead | CompiledEagle
) -> None:
    shape = TreeShape.of_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
    made = request(target, head, HISTORY, 6, shape=shape)
    best = place_logits(head, made, 3).topk(2).indices.tolist()
    proposal = new_drafter(head).propose([made])
    ranks = [shape.children[parent].index(node) for node, parent in enumerate(shape.parents)]
    assert proposal.draft_parents == [list(shape.parents)]
    assert proposal.draft_ids == [[best[depth - 1][rank] for depth, rank in zip(shape.depths, ranks, strict=True)]]


def test_sampled_tokens_name_their_distributions(target: LanguageModel, head: EagleHead | CompiledEagle) -> None:
    made = request(target, head, HISTORY, 4, temperature=0.8)
    proposal = new_drafter(head).propose([made])
    assert proposal.draft_prob_rows == [[0, 1, 2, 3]]
    assert proposal.token_probs is not None
    expected = torch.softmax(place_logits(head, made, 4).float() / 0.8, -1)
    torch.testing.assert_close(proposal.token_probs.dense(4096).float(), expected, rtol=0.05, atol=2e-3)


def test_without_features_room_or_memory_there_is_no_draft(
    target: LanguageModel, head: EagleHead | CompiledEagle
) -> None:
    unread = DraftRequest(0, HISTORY, 4, request_for(0, HISTORY, 4).sampler, Features(torch.empty(0, 0)))
    drafter = new_drafter(head)
    assert drafter.propose([unread, request(target, head, HISTORY, 0, 1)]).lens.tolist() == [0, 0]
    assert drafter.bytes_held == 0
    short_of_memory = new_drafter(head, memory=1)
    assert short_of_memory.propose([request(target, head, HISTORY)]).lens.tolist() == [0]
    drafter.propose([request(target, head, HISTORY)])
    assert drafter.bytes_held > 0
    drafter.forget([0, 7])
    assert drafter.bytes_held == 0


def test_a_peagle_head_is_required(target: LanguageModel) -> None:
    for other in (None, random_head("eagle", target)):
        with pytest.raises(
            ForedraftError, match='"peagle" needs a P-EAGLE head: give its directory or hub id as draft_model'
        ):
            PEagleDrafter.build(DrafterContext(16, MemoryPool(1), head=other))


@pytest.mark.slow
class TestContract(DrafterContract):
    """Law 4, with features of a made-up target."""

    vocab_size = 4096
    invisible = False  # tests/engine/test_engine.py checks its texts

    @pytest.fixture(autouse=True)
    def _with_head(self, head: EagleHead | CompiledEagle) -> None:
        self._head, self.feature_size = head, head.config.feature_size

    def make_drafter(self, vocab_size: int) -> PEagleDrafter:
        return PEagleDrafter(self._head, vocab_size, MemoryPool(1 << 30), context_len=1024)
