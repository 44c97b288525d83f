"""Block drafters with a serial correction: which tokens each token depends on, and the distribution it is drawn from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import LLM, SamplingParams
from foredraft.engine.proposal import CERTAIN, DraftRequest
from foredraft.engine.token_tree import ROOT, TreeShape, path_to
from foredraft.heads import DFlashHead, attach_head
from foredraft.model import LanguageModel
from foredraft.sampling import Row, choose
from tests.drafters.test_dflash import HISTORY, new_drafter, request
from tests.heads.random_heads import BLOCK_KINDS, embedded_block_head

KINDS = sorted(BLOCK_KINDS)


@pytest.fixture(scope="module", params=KINDS)
def head(request: pytest.FixtureRequest, target: LanguageModel) -> DFlashHead:
    head = attach_head(str(embedded_block_head(request.param)), target)
    assert isinstance(head, DFlashHead)
    return head


def logits_after(head: DFlashHead, made: DraftRequest, drafted: list[int]) -> Tensor:
    """[1, V], the logits after these draft tokens, computed row by row from the block's first row."""
    assert made.features is not None
    assert head.correction is not None
    cache, anchor = new_drafter(head)._cache, len(made.features)
    cache.reserve(0, 64)
    head.inject(cache.region(0), made.tokens[:anchor], made.features.since(0))
    block = head.correction.prepare(head.read([0], [made.tokens[anchor]], cache))
    before = made.tokens[anchor - head.correction.begins_earlier]
    text = [*[before] * head.config.first_row, *made.tokens[anchor:], *drafted]
    memory, logits = head.correction.empty_memory(1), torch.empty(0)
    with torch.inference_mode():
        for row, token in enumerate(text):
            logits, memory = head.correction(block, torch.tensor([row]), torch.tensor([token]), memory)
    return head.on_target(logits)


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.9, "seed": 7}, {"repetition_penalty": 1.4}], ids=["greedy", "seeded", "penalty"]
)
def test_each_token_depends_on_those_before(target: LanguageModel, head: DFlashHead, params: dict[str, Any]) -> None:
    """Sequences of different lengths in one pass, one of them with forced tokens after its history."""
    made = [
        request(target, head, HISTORY, 9, 0, **params),
        request(target, head, HISTORY[:3], 1, 1, **params),
        request(target, head, HISTORY[:9], 9, 2, num_forced=2, **params),
    ]
    places, expected = head.config.num_places, []
    for each, length in zip(made, (places, 1, places - 2), strict=True):
        ids: list[int] = []
        for _ in range(length):
            logits = logits_after(head, each, ids)
            ids.append(choose(logits, [Row(each.sampler, each.tokens, list(ids))]).ids[0])
        expected.append(ids)
    proposal = new_drafter(head).propose(made)
    assert proposal.draft_ids == expected
    assert {row for rows in proposal.draft_prob_rows for row in rows} == {CERTAIN}


def test_sampled_tokens_name_the_distributions_given_the_tokens_before(target: LanguageModel, head: DFlashHead) -> None:
    made = [
        request(target, head, HISTORY, 4, temperature=0.8),
        request(target, head, HISTORY[:7], 2, 1, temperature=0.8),
    ]
    proposal = new_drafter(head).propose(made)
    assert proposal.token_probs is not None
    laws = proposal.token_probs.dense(4096)
    for each, ids, rows in zip(made, proposal.draft_ids, proposal.draft_prob_rows, strict=True):
        assert len(ids) == each.max_len
        for place, row in enumerate(rows):
            expected = torch.softmax(logits_after(head, each, ids[:place]).float() / 0.8, -1)[0]
            torch.testing.assert_close(laws[row].float(), expected, rtol=0.05, atol=2e-3)
            assert laws[row, ids[place]] > 0


def test_children_are_the_likeliest_after_their_own_parent(target: LanguageModel, head: DFlashHead) -> None:
    shape = TreeShape.of_paths(
        [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), *([0] * n for n in (4, 5, 6, 7))]
    )
    made = request(target, head, HISTORY, 11, shape=shape)
    proposal = new_drafter(head).propose([made, request(target, head, HISTORY[:6], 3, 1, shape=shape)])
    drafted = [node for node in range(len(shape)) if shape.depths[node] <= head.config.num_places]
    ids = dict(zip(drafted, proposal.draft_ids[0], strict=True))
    for node in drafted:
        parent = shape.parents[node]
        before = [] if parent == ROOT else [ids[each] for each in path_to(shape.parents, parent)]
        rank = shape.children[parent].index(node)
        logits = logits_after(head, made, before)[0]
        assert logits[ids[node]] == logits.topk(rank + 1).values[rank]
    assert proposal.lens.tolist()[1] == 3


@pytest.mark.parametrize(
    "kind", [kind if kind == "dspark-rnn" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_texts_are_plain_decodings(kind: str) -> None:
    """Greedy and seeded, alone and in a batch."""
    prompts = ["def add(a, b):", "Once upon a time", "import os", "The", "class A:", "x = 1", "In the", "for i"]
    every = [SamplingParams(max_tokens=24, temperature=0), SamplingParams(max_tokens=24, temperature=0.8, seed=5)]
    drafting = LLM(method="dflash", draft_model=embedded_block_head(kind), speculative_tokens=4)
    plain = drafting.with_drafter("none")
    for params in every:
        expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params)]
        assert [output.outputs[0].token_ids for output in drafting.generate(prompts, params)] == expected
        assert drafting.generate(prompts[0], params)[0].outputs[0].token_ids == expected[0]


def test_only_the_plain_markov_correction_uses_compiled_chains(target: LanguageModel) -> None:
    if target.body.kernels is None:
        pytest.skip("no compiled kernels here")
    compiled = {kind: attach_head(str(embedded_block_head(kind)), target) for kind in KINDS}
    assert [kind for kind, head in compiled.items() if getattr(head, "chains", None) is not None] == ["dspark"]
