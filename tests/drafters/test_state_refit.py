"""Medusa heads that adapt: what they learn from, that it helps, and that it changes no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pytest
import torch

from foredraft import LLM
from foredraft.drafters import CountedRefits, MedusaDrafter, TimedRefits
from foredraft.drafters._state_refit import MAX_EXAMPLES, StateRefit
from foredraft.engine.engine import Engine
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import DraftRequest, Features
from foredraft.heads import MedusaHead
from foredraft.model import EMBEDDED, LanguageModel
from foredraft.sampling import SamplingParams
from foredraft.testing import DrafterContract
from foredraft.testing.requests import request_for
from foredraft.train import MedusaKind
from tests.heads.random_heads import embedded_head, random_head

STORY = [0, *range(500, 540)]
PROMPTS = ([0, 549, 300, 11, 12, 300, 11, 12], [0, 616, 635, 271, 480], STORY, [0, 9])
WANTED = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 2, "top_p": 0.9},
    {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.2},
)


@pytest.fixture(scope="module")
def head(target: LanguageModel) -> MedusaHead:
    head = random_head("medusa", target)
    assert isinstance(head, MedusaHead)
    return head


@pytest.fixture(scope="module")
def untrained(target: LanguageModel, head: MedusaHead) -> MedusaHead:
    """Untrained heads that use the target's lm_head: each drafts the target's next token, which is right for another position."""
    made = MedusaKind().new(target, [], seed=0).requires_grad_(False)
    made._target_embed = head._target_embed
    return made


def request(head: MedusaHead, length: int, seq_id: int = 0, **params: object) -> DraftRequest:
    """A request in which row t of the features is t + 1, and token t has the id t."""
    made = request_for(seq_id, [*range(length)], 4, **params)
    rows = torch.arange(1.0, length)[:, None].expand(-1, head.config.feature_size)
    return replace(made, features=Features(rows))


def drafter(head: MedusaHead, vocab_size: int, num_steps: int = 1) -> MedusaDrafter:
    return MedusaDrafter(head, vocab_size, CountedRefits(num_steps))


def engine_of(target: LanguageModel, made: MedusaDrafter, **settings: object) -> Engine:
    observers = [] if made.refits is None else [made.refits]
    return Engine(target, made, MemoryPool(1 << 28), end_ids=[0], seed=0, observers=observers, **settings)  # type: ignore[arg-type]


def texts_of(engine: Engine, params: Sequence[SamplingParams], preempted_at: Sequence[int] = ()) -> list[list[int]]:
    sequences = [engine.add(prompt, each) for each in params for prompt in PROMPTS]
    for step in count():
        if step in preempted_at:
            engine.preempt(next(sequence for sequence in sequences if not sequence.is_finished))
        if not engine.has_work:
            return [sequence.output_ids for sequence in sequences]
        engine.step()
    raise AssertionError


def params_of(max_tokens: int = 32) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=max_tokens, **each).resolve({}) for each in WANTED]  # type: ignore[arg-type]


def test_an_example_is_a_state_its_pending_token_and_the_states_that_follow(head: MedusaHead) -> None:
    refit, num_heads = StateRefit(head, CountedRefits()), head.config.num_heads
    (found,) = refit._examples(request(head, 9), MAX_EXAMPLES)
    # 8 tokens are read; only the first of them have all states that the heads should predict
    assert found.hidden[:, 0].tolist() == [t + 1 for t in range(8 - num_heads)]
    assert found.wanted[:, :, 0].tolist() == [[t + 2 + h for h in range(num_heads)] for t in range(8 - num_heads)]
    assert torch.equal(found.pending, head.embed(torch.arange(1, 9 - num_heads)))


def test_no_position_is_learned_twice_and_the_newest_are_preferred(head: MedusaHead) -> None:
    refit, num_heads = StateRefit(head, CountedRefits()), head.config.num_heads
    places: list[float] = []
    for length in (9, 9, 10, 14):
        places += [row for part in refit._examples(request(head, length), MAX_EXAMPLES) for row in part.hidden[:, 0]]
    assert places == [t + 1 for t in range(13 - num_heads)]
    (found,) = refit._examples(request(head, 200), MAX_EXAMPLES)
    assert found.hidden[:, 0].tolist() == [t + 1 for t in range(199 - num_heads - MAX_EXAMPLES, 199 - num_heads)]
    refit.forget([0])
    assert refit._examples(request(head, 9), MAX_EXAMPLES)


def test_requests_without_prefix_caching_are_not_learned_from(head: MedusaHead) -> None:
    made = drafter(head, 4096)
    made.propose([request(head, 30, prefix_caching=False)])
    assert made.refits is not None
    assert made.refits.num_refits == 0
    made.propose([request(head, 30, prefix_caching=False), request(head, 30, 1)])
    assert made.refits.num_tokens == 29 - head.config.num_heads


def test_the_head_itself_does_not_change(head: MedusaHead) -> None:
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    made = drafter(head, 4096)
    first = MedusaDrafter(head, 4096).propose([request(head, 30)]).draft_ids
    made.propose([request(head, 30)])
    assert all(torch.equal(before[name], tensor) for name, tensor in head.state_dict().items())
    assert MedusaDrafter(head, 4096).propose([request(head, 30)]).draft_ids == first


@pytest.mark.slow
def test_drafts_get_better(target: LanguageModel, untrained: MedusaHead) -> None:
    def acceptance(made: MedusaDrafter) -> float:
        engine = engine_of(target, made, speculative_tokens=4)
        for _ in range(2):
            texts_of(engine, [SamplingParams(max_tokens=96, temperature=0.0, ignore_eos=True).resolve({})])
        return engine.stats.num_accepted_tokens / engine.stats.num_draft_tokens

    vocab_size = target.traits.vocab_size
    assert acceptance(drafter(untrained, vocab_size)) > 1.5 * acceptance(MedusaDrafter(untrained, vocab_size))


@pytest.mark.parametrize("gamma", [1, 4])
def test_greedy_and_seeded_texts_are_plain_decodings(target: LanguageModel, untrained: MedusaHead, gamma: int) -> None:
    assert target.traits.row_exact
    plain = engine_of(target, MedusaDrafter(untrained, 4096), speculative_tokens=0)
    made = drafter(untrained, 4096)
    engine = engine_of(target, made, speculative_tokens=gamma)
    assert texts_of(engine, params_of(), preempted_at=(4, 9)) == texts_of(plain, params_of())
    assert made.refits is not None
    assert made.refits.num_refits > 10


def test_unseeded_texts_repeat_with_the_engines_seed_and_the_order_of_requests(
    target: LanguageModel, untrained: MedusaHead
) -> None:
    """If learning goes by counted steps, drafts and draws are the same in every run."""
    sampled = [SamplingParams(max_tokens=32, temperature=0.9).resolve({})] * 2
    runs = []
    for _ in range(2):
        engine = engine_of(target, drafter(untrained, 4096), speculative_tokens=4)
        runs.append((texts_of(engine, sampled), engine.stats.num_accepted_tokens))
    assert runs[0] == runs[1]


def test_a_finished_text_is_forgotten(target: LanguageModel, untrained: MedusaHead) -> None:
    made = drafter(untrained, 4096)
    texts_of(engine_of(target, made, speculative_tokens=4, retain=False), params_of(8))
    assert made._refit is not None
    assert not made._refit._num_learned
    assert not made._refit._variants._pending


def test_an_llm_adapts_if_adapt_is_set() -> None:
    settings = {"draft_model": embedded_head("medusa"), "num_threads": 1}
    llm = LLM(EMBEDDED / "target", speculative_tokens=3, adapt=True, **settings)
    params = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
    drafted, plain = (each.generate("def add(a, b):", params) for each in (llm, llm.with_drafter("none")))
    assert drafted[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
    assert llm.refits["medusa"].num_refits >= 1
    assert isinstance(llm.refits["medusa"], CountedRefits)
    assert isinstance(llm.with_drafter(speculative_tokens="auto").refits["medusa"], TimedRefits)
    assert llm.with_drafter("none").refits == {}
    assert LLM(EMBEDDED / "target", **settings).refits == {}


@pytest.mark.slow
class TestContract(DrafterContract):
    """Law 4, while the drafter learns at every call."""

    vocab_size = 4096
    invisible = False  # the tests above check its texts
    remembers = True

    @pytest.fixture(autouse=True)
    def _with_head(self, head: MedusaHead) -> None:
        self._head, self.feature_size = head, head.config.feature_size

    def make_drafter(self, vocab_size: int) -> MedusaDrafter:
        return drafter(self._head, vocab_size)
