"""The PARD drafter: it drafts in one pass, with mask tokens that leave no trace in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from foredraft import LLM, SamplingParams
from foredraft.drafters import DrafterContext, PardDrafter, build
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import CERTAIN, DraftRequest, Proposal
from foredraft.engine.token_tree import TreeShape
from foredraft.errors import ForedraftError
from foredraft.model import LanguageModel, LoadOptions, Read, load_model
from foredraft.sampling import Row, adjusted, choose, token_probs_of
from foredraft.testing import DrafterContract
from foredraft.testing.requests import request_for
from tests.heads.random_heads import MASK_TOKEN, embedded_pard

PROMPTS = [[5, 900, 77, 300], [40, 41, 42], list(range(100, 130))]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.1, "seed": 3},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 1.0, "seed": 9, "frequency_penalty": 0.5},
]


def drafter_of(model: LanguageModel, memory: int = 1 << 28, **settings: Any) -> PardDrafter:
    return PardDrafter(model, MASK_TOKEN, model.traits.vocab_size, MemoryPool(memory), **settings)


def place_logits(model: LanguageModel, tokens: Sequence[int], num_places: int) -> Tensor:
    """[num_places, V], the logits at these positions, with a new cache."""
    masks = [MASK_TOKEN] * (num_places - 1)
    cache = model.scratch_cache([len(tokens) + num_places])
    return model.read([Read(0, [*tokens, *masks], num_places)], cache)


def expected_draft(model: LanguageModel, request: DraftRequest) -> list[int]:
    """The expected draft, position by position: the sampler sees the draft tokens before, the model does not."""
    ids: list[int] = []
    for logits in place_logits(model, request.tokens, request.max_len).split(1):
        ids.append(choose(logits, [Row(request.sampler, request.tokens, list(ids))]).ids[0])
    return ids


def tree_request(seq_id: int, tokens: list[int], shape: TreeShape, max_len: int, **params: Any) -> DraftRequest:
    return DraftRequest(seq_id, tokens, max_len, request_for(seq_id, tokens, max_len, **params).sampler, shape=shape)


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    """A small Llama with random weights, in float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pard_token=MASK_TOKEN,
    )
    model = LlamaForCausalLM(config)
    for weight in model.parameters():
        weight.data.mul_(3.0)
    return model.eval()


@pytest.fixture
def reads(reference: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> tuple[LanguageModel, list[Tensor]]:
    """The reference as the drafter's model, and a list of the logits of its passes."""
    model, seen = load_model(reference, LoadOptions(device="cpu", dtype="float32")), []
    read: Callable[..., Tensor] = model.read

    def watched(*args: Any) -> Tensor:
        seen.append(read(*args))
        return seen[-1]

    monkeypatch.setattr(model, "read", watched)
    return model, seen


def test_its_logits_are_those_of_transformers_after_mask_tokens(
    reference: PreTrainedModel, reads: tuple[LanguageModel, list[Tensor]]
) -> None:
    """Compared in every step with transformers' own causal pass over the whole text with masks, whatever was accepted before."""
    model, seen = reads
    drafter = build("pard", DrafterContext(1024, MemoryPool(1 << 28), model))
    texts = [[5, 900, 77, 300], list(range(100, 130)), [300, 300, 9]]
    for taken, own, max_len in ((0, 17, 8), (3, 18, 4), (8, 300, 1), (1, 20, 6), (2, 21, 8)):
        drafts = drafter.propose([request_for(b, tokens, max_len) for b, tokens in enumerate(texts)]).draft_ids
        rows = seen.pop().split(max_len)
        assert not seen  # one pass
        for tokens, logits in zip(texts, rows, strict=True):
            whole = torch.tensor([[*tokens, *[MASK_TOKEN] * (max_len - 1)]])
            with torch.no_grad():
                expected = reference(whole, use_cache=False).logits[0, -max_len:]
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
        texts = [[*tokens, *ids[:taken], own] for tokens, ids in zip(texts, drafts, strict=True)]


@pytest.mark.parametrize("params", KINDS, ids=str)
def test_greedy_and_seeded_drafts_are_certain_and_each_position_has_its_own_noise(
    params: dict[str, Any], draft: LanguageModel
) -> None:
    if not draft.traits.row_exact:
        pytest.skip("this machine's kernels do not give exact rows")
    requests = [request_for(b, prompt, 3 + b, **params) for b, prompt in enumerate(PROMPTS)]
    proposal = drafter_of(draft).propose(requests)
    assert proposal.draft_ids == [expected_draft(draft, request) for request in requests]
    assert {row for rows in proposal.draft_prob_rows for row in rows} == {CERTAIN}
    assert proposal.probs is None


@pytest.mark.parametrize("params", [{}, {"top_k": 7}, {"repetition_penalty": 1.3}, {"top_p": 0.8, "min_p": 0.01}])
def test_a_drawn_token_names_the_distribution_it_was_drawn_from(params: dict[str, Any], draft: LanguageModel) -> None:
    requests = [request_for(b, prompt, 3, temperature=0.9, **params) for b, prompt in enumerate(PROMPTS)]
    for request in requests[1:]:
        request.sampler.generator = requests[0].sampler.generator
    proposal = drafter_of(draft).propose(requests)
    token_probs = proposal.token_probs
    assert token_probs is not None
    dense = token_probs.dense(draft.traits.vocab_size)
    named = [row for rows in proposal.draft_prob_rows for row in rows]
    assert CERTAIN not in named
    assert len(set(named)) == len(named) == 9
    for request, ids, prob_rows in zip(requests, proposal.draft_ids, proposal.draft_prob_rows, strict=True):
        logits = place_logits(draft, request.tokens, 3)
        for i, (token, prob_row) in enumerate(zip(ids, prob_rows, strict=True)):
            row = [Row(request.sampler, request.tokens, ids[:i])]
            changed = adjusted(logits[i : i + 1], row).logits
            expected = token_probs_of(changed, row).dense(draft.traits.vocab_size)[0]
            assert float(dense[prob_row, token]) > 0
            torch.testing.assert_close(dense[prob_row].float(), expected.float(), rtol=0.05, atol=2e-3)


def test_siblings_are_the_likeliest_tokens_of_their_position(draft: LanguageModel) -> None:
    """Whichever node they follow. A pass reads no more masks than the longest branch needs."""
    shape = TreeShape.of_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)])
    requests = [tree_request(b, prompt, shape, 6 + b) for b, prompt in enumerate(PROMPTS)]
    proposal = drafter_of(draft).propose([*requests, request_for(9, PROMPTS[0], 2)])
    for request, ids, parents in zip(requests, proposal.draft_ids, proposal.draft_parents, strict=False):
        cut = shape.cut(request.max_len)
        best = place_logits(draft, request.tokens, cut.depth).topk(2).indices.tolist()
        ranks = [cut.children[parent].index(node) for node, parent in enumerate(cut.parents)]
        assert parents == list(cut.parents)
        assert ids == [best[depth - 1][rank] for depth, rank in zip(cut.depths, ranks, strict=True)]
    assert proposal.draft_ids[-1] == expected_draft(draft, request_for(9, PROMPTS[0], 2))


def test_passes_keep_to_the_maximum_of_rows(draft: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    if not draft.traits.row_exact:
        pytest.skip("this machine's kernels do not give exact rows")
    sizes: list[int] = []
    read = draft.read
    requests = [request_for(b, prompt, 4) for b, prompt in enumerate(PROMPTS)]
    whole = drafter_of(draft).propose(requests).draft_ids
    monkeypatch.setattr(
        draft, "read", lambda given, cache: sizes.append(sum(len(each.tokens) for each in given)) or read(given, cache)
    )
    assert drafter_of(draft, max_rows=12).propose(requests).draft_ids == whole
    assert max(sizes) <= 15  # 12 rows, and three masks, which are never split off
    assert len(sizes) > 3


def test_a_draft_ends_before_a_row_that_fails(draft: LanguageModel) -> None:
    def fails_late(prefix: list[int], logits: Tensor) -> Tensor:
        if len(prefix) == len(PROMPTS[0]) + 2:
            raise ValueError("late")
        return logits

    for params in ({"temperature": 0.0}, {"temperature": 1.0}, {"seed": 1, "temperature": 1.0}):
        failing = request_for(0, PROMPTS[0], 5, logits_processors=[fails_late], **params)
        proposal: Proposal = drafter_of(draft).propose([failing, request_for(1, PROMPTS[2], 5)])
        assert proposal.lens.tolist() == [2, 5], params


def test_a_position_without_a_distribution_ends_the_draft(
    draft: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = draft.read

    def broken(reads: Sequence[Read], cache: Any) -> Tensor:
        logits = read(reads, cache).clone()
        logits[2] = torch.nan
        return logits

    monkeypatch.setattr(draft, "read", broken)
    for params in ({"temperature": 0.0}, {"temperature": 1.0}, {"seed": 1, "temperature": 1.0}):
        assert drafter_of(draft).propose([request_for(0, PROMPTS[0], 5, **params)]).lens.tolist() == [2], params


def test_without_context_known_ids_or_memory_there_is_no_draft(draft: LanguageModel) -> None:
    context_len, vocab_size = draft.traits.context_len, draft.traits.vocab_size
    past = request_for(0, [7] * (context_len + 1), 4)
    near_the_end = request_for(1, [7] * (context_len - 1), 4)
    unknown = request_for(2, [5, vocab_size, 6], 4)
    nothing_asked = request_for(3, [5, 6], 0)
    assert drafter_of(draft).propose([past, near_the_end, unknown, nothing_asked]).lens.tolist() == [0, 2, 0, 0]
    short_of_memory = drafter_of(draft, memory=1)
    assert short_of_memory.propose([request_for(0, PROMPTS[0], 4)]).lens.tolist() == [0]
    assert short_of_memory.bytes_held == 0


def test_a_mask_token_is_required_and_must_be_one_of_the_models_ids(reference: PreTrainedModel) -> None:
    model = load_model(reference, LoadOptions(device="cpu", dtype="float32"))
    for token, words in ((None, "whose config.json has pard_token"), (1024, "is 1024, but it has only 1024 ids")):
        model.hf.config.pard_token = token
        with pytest.raises(ForedraftError, match=words):
            build("pard", DrafterContext(1024, MemoryPool(1), model))
    model.hf.config.pard_token = MASK_TOKEN
    with pytest.raises(ForedraftError, match='"pard" needs a draft model with mask tokens'):
        build("pard", DrafterContext(1024, MemoryPool(1)))


def test_a_draft_models_files_select_pard(tmp_path: Path) -> None:
    assert LLM(draft_model=embedded_pard(), num_threads=1).method == "pard"
    assert LLM(draft_model=embedded_pard(), method="draft_model", num_threads=1).method == "draft_model"
    with pytest.raises(ForedraftError, match='"pard" needs a draft model with mask tokens: give one whose config'):
        LLM(method="pard")


@pytest.fixture(scope="module")
def pard() -> LLM:
    return LLM(draft_model=embedded_pard(), num_threads=1)


@pytest.mark.parametrize(
    "gamma", [gamma if gamma in (1, 4, 8) else pytest.param(gamma, marks=pytest.mark.slow) for gamma in range(1, 9)]
)
def test_texts_are_plain_decodings(pard: LLM, gamma: int) -> None:
    """Alone and eight at a time, greedy and seeded. Some drafts are accepted."""
    plain = pard.with_drafter("none")
    prompts = [f"def f{i}(x):\n    return" for i in range(4)] + ["Once upon a time", "import os", "The cat", "x = ["]
    for way in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.0, "seed": 6, "top_p": 0.9}):
        params = SamplingParams(max_tokens=32, speculative_tokens=gamma, **way)
        expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params)]
        assert [output.outputs[0].token_ids for output in pard.generate(prompts, params)] == expected
        assert pard.generate(prompts[4], params)[0].outputs[0].token_ids == expected[4]
    assert pard.engine.stats.num_accepted_tokens > 0


@pytest.mark.slow
class TestContract(DrafterContract):
    """Law 4."""

    vocab_size = 4096

    @pytest.fixture(autouse=True)
    def _with_model(self, draft: LanguageModel) -> None:
        self._draft = draft

    def make_drafter(self, vocab_size: int) -> PardDrafter:
        return PardDrafter(self._draft, MASK_TOKEN, vocab_size, MemoryPool(1 << 30))
