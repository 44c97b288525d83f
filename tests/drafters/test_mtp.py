"""The MTP drafters, and law 2 for them: texts are plain decoding's. tests/heads/test_mtp.py tests the heads' numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.drafters.context import DrafterContext
from foredraft.drafters.mtp import LayeredMtpDrafter, MtpDrafter
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import DraftRequest, Features
from foredraft.heads import MtpHead, attach_mtp
from foredraft.model import LanguageModel, LoadOptions, load_model
from foredraft.testing import DrafterContract, request_for
from foredraft.trace import read_trace, record
from tests.heads.fitted_heads import fitted_mtp
from tests.heads.mtp_targets import VOCAB_SIZE, saved

PROMPTS = [
    "def read_lines(path):",
    "Once upon a time there was a",
    "import os\nimport sys\n",
    "def add(a, b):\n    return",
]
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 2, "top_p": 0.9},
    {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.2},
)
HISTORY = [5, 17, 3, 60, 41, 8, 8, 29]
NUM_LAYERS = [1, 3]


def texts_of(llm: LLM, gammas: Sequence[int | str], preempted: int | None = None) -> list[list[int]]:
    """The texts of every prompt with every kind of sampling, as many at a time as the LLM runs. gammas: of the requests in turn.
    preempted: preempt the first text that has begun, at this step or later."""
    engine, of_request = llm.engine, cycle(gammas)
    sequences = [
        engine.add(
            llm.text_tokenizer(prompt)["input_ids"],
            SamplingParams(max_tokens=16, speculative_tokens=next(of_request), **kind).resolve({}),
        )
        for kind in KINDS
        for prompt in PROMPTS
    ]
    step = 0
    while engine.has_work:
        begun = [each for each in sequences if not each.is_finished and each.output_ids]
        if preempted is not None and step >= preempted and begun:
            engine.preempt(begun[0])
            preempted = None
        engine.step()
        step += 1
    assert preempted is None
    assert not any(sequence.error for sequence in sequences)
    assert engine.pool.used == engine.pool.bytes_retained
    return [sequence.output_ids for sequence in sequences]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return texts_of(LLM(fitted_mtp(), method="none", num_threads=1), [0])


@pytest.mark.parametrize(
    ("num_layers", "num_running"), [(1, 1), (1, 8), (2, 8), pytest.param(2, 1, marks=pytest.mark.slow)]
)
def test_texts_are_plain_decodings(plain: list[list[int]], num_layers: int, num_running: int) -> None:
    """Greedy and seeded. In the first run a text is preempted; in the second the prompts are in the cache."""
    llm = LLM(fitted_mtp(num_layers), method="mtp", num_threads=1, max_num_seqs=num_running, max_num_batched_tokens=64)
    assert texts_of(llm, [4], preempted=7) == plain
    stats = llm.engine.stats
    assert stats.num_accepted_tokens > 20
    assert len([count for count in stats.accepted_per_position if count]) == (4 if num_layers == 1 else 2)
    assert texts_of(llm, [1, 2, 3, "auto", 4]) == plain


@pytest.mark.slow
def test_texts_of_a_quantised_target_are_plain_decodings() -> None:
    """Its MTP layers are not quantised."""
    llm = LLM(fitted_mtp(), method="mtp", quantization="int8", num_threads=1)
    assert llm.head_identity is not None
    assert llm.head_identity.quantization is None
    assert texts_of(llm, [3, "auto"]) == texts_of(llm.with_drafter("none"), [0])
    assert llm.engine.stats.num_accepted_tokens > 20


def test_sampled_texts_can_be_traced(tmp_path: Path) -> None:
    llm = LLM(fitted_mtp(), method="mtp", num_threads=1, speculative_tokens=3, seed=0)
    with record(llm, tmp_path / "trace.jsonl"):
        llm.generate(PROMPTS, SamplingParams(max_tokens=24, temperature=0.8))
    trace = read_trace(tmp_path / "trace.jsonl")
    assert trace.header.draft is not None
    assert trace.header.draft.name == f"MTP layers of {fitted_mtp()}"
    stats = llm.engine.stats
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 20


@pytest.fixture(scope="module", params=NUM_LAYERS)
def head(request: pytest.FixtureRequest) -> MtpHead:
    folder = saved("deepseek", request.param)
    return attach_mtp(str(folder), toy(request.param))


def toy(num_layers: int) -> LanguageModel:
    return load_model(saved("deepseek", num_layers), LoadOptions(device="cpu", dtype="float32"))


def new_drafter(head: MtpHead, memory: int = 1 << 26, max_rows: int = 512) -> MtpDrafter | LayeredMtpDrafter:
    return MtpDrafter.build(DrafterContext(VOCAB_SIZE, MemoryPool(memory), None, max_rows, head, 256))


def request(head: MtpHead, max_len: int = 3, seq_id: int = 0, num_forced: int = 0, **params: Any) -> DraftRequest:
    (features,) = toy(head.num_layers).read_features([HISTORY[: len(HISTORY) - 1 - num_forced]], head.config.taps)
    sampler = request_for(seq_id, HISTORY, max_len, **params).sampler
    return DraftRequest(seq_id, HISTORY, max_len, sampler, Features(features), num_forced)


def test_reading_a_long_history_in_several_passes_changes_no_draft(head: MtpHead) -> None:
    made = [request(head, 3, 0), request(head, 2, 1, num_forced=1), request(head, 3, 2)]
    assert new_drafter(head, max_rows=3).propose(made).draft_ids == new_drafter(head).propose(made).draft_ids


def test_sampled_tokens_name_their_distributions(head: MtpHead) -> None:
    """Each is drawn from the q of its own position; the greedy draft takes the likeliest token of the same rows."""
    sampled = new_drafter(head).propose([request(head, temperature=0.7)])
    greedy = new_drafter(head).propose([request(head)])
    assert sampled.draft_prob_rows == [[0, 1, 2]]
    assert sampled.token_probs is not None
    dense = sampled.token_probs.dense(VOCAB_SIZE)
    torch.testing.assert_close(dense.sum(-1), torch.ones(3).to(dense))
    assert int(dense[0].argmax()) == greedy.draft_ids[0][0]


def test_without_features_room_or_memory_there_is_no_draft(head: MtpHead) -> None:
    unread = DraftRequest(0, HISTORY, 4, request_for(0, HISTORY, 4).sampler, Features(torch.empty(0, 0)))
    drafter = new_drafter(head)
    assert drafter.propose([unread, request(head, 0, 1)]).lens.tolist() == [0, 0]
    assert drafter.bytes_held == 0
    assert new_drafter(head, memory=1).propose([request(head)]).lens.tolist() == [0]
    drafter.propose([request(head)])
    assert drafter.bytes_held > 0
    drafter.forget([0, 7])
    assert drafter.bytes_held == 0


@pytest.mark.slow
class TestContract(DrafterContract):
    """Law 4, with features of a made-up target. One layer drafts as EAGLE heads do, which have a test of their own."""

    vocab_size = VOCAB_SIZE
    invisible = False  # the tests above check its texts

    @pytest.fixture(autouse=True)
    def _with_head(self) -> None:
        self._head = attach_mtp(str(saved("deepseek", 3)), toy(3))
        self.feature_size = self._head.config.feature_size

    def make_drafter(self, vocab_size: int) -> MtpDrafter | LayeredMtpDrafter:
        return MtpDrafter.build(DrafterContext(vocab_size, MemoryPool(1 << 30), None, 512, self._head, 1024))
