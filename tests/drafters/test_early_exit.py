"""The early-exit drafter: it drafts what the target's first layers give, with the target's own cache, and leaves no trace there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from foredraft.drafters import DrafterContext, EarlyExitDrafter
from foredraft.engine.cache import KVCache
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.engine.token_tree import ROOT, TreeShape
from foredraft.errors import ForedraftError
from foredraft.heads import EarlyExit
from foredraft.model import EMBEDDED, LanguageModel, LoadOptions, Read, load_model
from foredraft.model.exits import Exit
from foredraft.sampling import Sampler
from foredraft.testing import DrafterContract
from foredraft.testing.drafters import check_proposal
from foredraft.testing.requests import request_for
from tests.heads.random_heads import random_head
from tests.laws import holds_exactly

HISTORY = [0, 549, 300, 11, 12, 300, 11, 12, 77, 78, 79, 80]
LAYER = 3


@pytest.fixture(scope="module", params=["compiled", "library"])
def model(request: pytest.FixtureRequest, target: LanguageModel) -> LanguageModel:
    """The embedded target, with the fastest available kernels and with transformers' own code."""
    if request.param == "compiled":
        return target
    return load_model(EMBEDDED / "target", LoadOptions(dtype="float32", device="cpu", kernels="torch"))


@pytest.fixture(scope="module", params=["untrained", "trained"])
def exit_head(request: pytest.FixtureRequest, model: LanguageModel) -> EarlyExit:
    if request.param == "untrained":
        return EarlyExit.after(model, LAYER)
    head = random_head("early_exit", model)
    assert isinstance(head, EarlyExit)
    return head


def reading(
    model: LanguageModel, tokens: Sequence[int], num_read: int, seq_id: int = 0, taps: tuple[int, ...] = ()
) -> KVCache:
    """The target's cache after it has read the first num_read tokens, with room for a draft."""
    cache = model.new_cache(MemoryPool(1 << 28), taps)
    cache.reserve(seq_id, len(tokens) + 8)
    if num_read:
        model.read([Read(seq_id, list(tokens[:num_read]), 0)], cache)
    return cache


def request(
    model: LanguageModel, tokens: Sequence[int], max_len: int = 4, seq_id: int = 0, num_forced: int = 0, **params: Any
) -> DraftRequest:
    """A request as the engine makes it after the target has read everything but the pending and the forced tokens."""
    cache = reading(model, tokens, len(tokens) - 1 - num_forced, seq_id)
    made = request_for(seq_id, tokens, max_len, **params)
    return replace(made, num_forced=num_forced, region=cache.region(seq_id).shared_view())


@torch.inference_mode()
def by_hand(model: LanguageModel, trained: Exit | None, tokens: Sequence[int], count: int) -> list[int]:
    """The greedy draft from a tap of the whole model. For each token all layers read the whole history again."""
    norm, ids = model.hf.model.norm, list[int]()  # type: ignore[union-attr]
    for _ in range(count):
        rows = [*tokens, *ids]
        features = reading(model, rows, len(rows), taps=(LAYER,)).features(0)
        assert features is not None
        state = features[-1:].float()
        normed = norm(state.to(model.hf.dtype)) if trained is None else trained(state).to(model.hf.dtype)
        ids.append(int(model.hf.get_output_embeddings()(normed)[:, :4096].argmax()))
    return ids


def trained_exit(head: EarlyExit) -> Exit | None:
    from foredraft.heads import TargetShape, load_head
    from foredraft.heads.early_exit import load_exit
    from tests.heads.random_heads import embedded_head

    if not head.config.is_trained:
        return None
    checkpoint = load_head(str(embedded_head("early_exit")), TargetShape.of(head.model.hf.config))
    return load_exit(head.config, checkpoint.tensors, head.model)


@pytest.mark.parametrize(
    "params", [{"repetition_penalty": 1.5}, {"temperature": 0.9, "seed": 7, "frequency_penalty": 0.8}]
)
@pytest.mark.parametrize("shape", [None, TreeShape((ROOT, ROOT, 0, 0, 1, 2, 2))], ids=["chain", "tree"])
def test_adjusted_drafts_written_in_one_call_equal_those_of_single_passes(
    model: LanguageModel,
    exit_head: EarlyExit,
    params: dict[str, Any],
    shape: TreeShape | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def drafted() -> tuple[list[list[int]], Any]:
        proposal = EarlyExitDrafter(exit_head, 4096).propose(
            [replace(request(model, HISTORY, 8, **params), shape=shape)]
        )
        return proposal.draft_ids, proposal.draft_parents

    at_once = drafted()
    monkeypatch.setattr(Sampler, "has_adjustments", lambda *_: False)
    assert drafted() == at_once


def test_the_draft_is_what_the_first_layers_give(model: LanguageModel, exit_head: EarlyExit) -> None:
    proposal = EarlyExitDrafter(exit_head, 4096).propose([request(model, HISTORY)])
    assert proposal.draft_ids == [by_hand(model, trained_exit(exit_head), HISTORY, 4)]


def test_forced_tokens_are_read_before_the_draft(model: LanguageModel, exit_head: EarlyExit) -> None:
    drafter = EarlyExitDrafter(exit_head, 4096)
    whole = drafter.propose([request(model, HISTORY, 5)]).draft_ids[0]
    behind = request(model, [*HISTORY, *whole[:2]], 3, num_forced=2)
    assert drafter.propose([behind]).draft_ids == [whole[2:]]


def test_logits_processors_are_applied(model: LanguageModel, exit_head: EarlyExit) -> None:
    """Each token then takes a pass of its own. Here the likeliest first token is banned."""
    drafter = EarlyExitDrafter(exit_head, 4096)
    (free,) = drafter.propose([request(model, HISTORY)]).draft_ids
    (other,) = drafter.propose([request(model, HISTORY, logit_bias={free[0]: -100.0})]).draft_ids
    assert len(other) == 4
    assert free[0] not in other


def test_sampled_tokens_name_their_distributions(model: LanguageModel, exit_head: EarlyExit) -> None:
    requests = [request(model, HISTORY, 3, temperature=1.0), request(model, HISTORY[:6], 2, seq_id=1)]
    proposal = EarlyExitDrafter(exit_head, 4096).propose(requests)
    assert proposal.draft_prob_rows == [[0, 1, 2], [-1, -1]]
    check_proposal(proposal, requests, 4096)


def test_drafting_does_not_change_the_targets_cache(model: LanguageModel, exit_head: EarlyExit) -> None:
    """The draft tokens' keys and values are after those of the history, where the next pass overwrites them."""
    cache = reading(model, HISTORY, len(HISTORY) - 1)
    held = cache.region(0)
    made = request_for(0, HISTORY, 4)
    EarlyExitDrafter(exit_head, 4096).propose([replace(made, region=held.shared_view())])
    assert held.tokens == HISTORY[:-1]
    assert holds_exactly(model, cache, 0, HISTORY[:-1])
    rest = [HISTORY[-1], 5, 6, 7]
    model.read([Read(0, rest, 1)], cache)
    assert holds_exactly(model, cache, 0, [*HISTORY[:-1], *rest])


def test_nothing_is_drafted_before_the_target_has_read_the_history(model: LanguageModel, exit_head: EarlyExit) -> None:
    partly = replace(request_for(0, HISTORY, 4), region=reading(model, HISTORY, 5).region(0).shared_view())
    nothing = replace(request_for(1, [0], 4), region=reading(model, [0], 0, 1).region(1).shared_view())
    without = request_for(2, HISTORY, 4)
    assert EarlyExitDrafter(exit_head, 4096).propose([partly, nothing, without]).draft_ids == [[], [], []]


def test_an_exit_is_required() -> None:
    with pytest.raises(ForedraftError, match='"early_exit" needs a layer: give exit_layer'):
        EarlyExitDrafter.build(DrafterContext(16, MemoryPool(1)))


class TestContract(DrafterContract):
    """Laws 4 and 2, with the embedded target's own cache."""

    @pytest.fixture(autouse=True)
    def _with_target(self, target: LanguageModel) -> None:
        self._target, self._exit = target, EarlyExit.after(target, 2)
        self._caches: dict[tuple[int, ...], KVCache] = {}

    def make_drafter(self, vocab_size: int) -> EarlyExitDrafter:
        return EarlyExitDrafter(self._exit, vocab_size)

    def _ask(self, drafter: Any, requests: list[DraftRequest]) -> Proposal:
        """Adds the keys and values of its history to each request."""
        requests = [replace(each, region=self._cache(each).region(each.seq_id).shared_view()) for each in requests]
        return super()._ask(drafter, requests)

    def _cache(self, request: DraftRequest) -> KVCache:
        """The cache for a history, which is read once: what drafters write after it is overwritten."""
        key = (request.seq_id, *request.tokens)
        if key not in self._caches:
            self._caches[key] = reading(self._target, request.tokens, len(request.tokens) - 1, request.seq_id)
        return self._caches[key]
