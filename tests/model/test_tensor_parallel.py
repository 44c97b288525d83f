"""A target that two processes compute: its texts are one process's, drafts change nothing, and each process holds half of it. Neither
rank outlives the other."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from foredraft.engine.cache import MemoryPool
from foredraft.errors import ModelError
from foredraft.model import LanguageModel, Read
from foredraft.model.library import LibraryBody
from foredraft.model.tensor_parallel import Follower, LeadingBody
from tests.conftest import MakeEngine, embedded
from tests.engine.test_trees import KINDS, PROMPTS, BranchingDrafter, params, texts_of

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


class Echo:
    """Another rank in this process. It has all heads, so its logits have to be the first one's, bit by bit."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self.is_broken = self.has_ended = False
        self.logits: list[torch.Tensor] = []

    def send(self, message: object) -> None:
        self.logits.append(self.follower.read(pickle.loads(pickle.dumps(message))).logits)

    def end(self) -> None:
        self.has_ended = True


class Watched(LibraryBody):
    """Notes what it gave."""

    def __init__(self, hf: Any) -> None:
        super().__init__(hf)
        self.logits: list[torch.Tensor] = []

    def __call__(self, *args: Any) -> Any:
        reading = super().__call__(*args)
        self.logits.append(reading.logits)
        return reading


@pytest.fixture(scope="module")
def float32_target() -> LanguageModel:
    return embedded("target", dtype="float32")


def test_another_rank_follows_whatever_happens_to_a_region(
    make_engine: MakeEngine, float32_target: LanguageModel
) -> None:
    """Chains, trees, prompts in pieces, preemption, retained prefixes, regions that grow and are evicted."""
    hf, own = float32_target.hf, Watched(float32_target.hf)
    echo = Echo(Follower(LibraryBody(hf)))
    model = LanguageModel(hf, float32_target.traits, LeadingBody(own, echo))
    wanted = [params(16, **kind) for kind in KINDS[:2]]
    plain = texts_of(make_engine("none", model=float32_target), wanted)
    known = {tuple(prompt): [*prompt, *text] for prompt, text in zip(PROMPTS, plain, strict=False)}
    engine = make_engine(
        BranchingDrafter(known, 4096), model=model, speculative_tokens=6, pool=MemoryPool(9 << 20)
    )  # room for four texts of 128 tokens
    for _ in range(2):
        assert texts_of(engine, wanted, preempted=3) == plain
    assert engine.stats.num_accepted_tokens > 20
    assert engine.prefix_stats.num_found_tokens > 0
    assert len(own.logits) == len(echo.logits) > 10
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(own.logits, echo.logits, strict=True))
    engine.drop_retained()
    model.read([Read(0, [1], 0)], model.scratch_cache([1]))
    assert len(echo.follower.regions) == 1  # that of the last pass, which is told with the next


def test_the_others_hear_of_the_end(float32_target: LanguageModel) -> None:
    echo = Echo(Follower(LibraryBody(float32_target.hf)))
    body = LeadingBody(LibraryBody(float32_target.hf), echo)
    assert not echo.has_ended
    del body
    assert echo.has_ended


def test_no_pass_is_read_after_one_that_failed(float32_target: LanguageModel) -> None:
    class Fails(LibraryBody):
        def __call__(self, *args: Any) -> Any:
            raise RuntimeError("Connection closed by peer")

    echo = Echo(Follower(LibraryBody(float32_target.hf)))
    model = LanguageModel(float32_target.hf, float32_target.traits, LeadingBody(Fails(float32_target.hf), echo))
    for expected in ("Connection closed by peer", "has failed"):
        with pytest.raises(ModelError, match=expected) as caught:
            model.read([Read(0, [1], 1)], model.scratch_cache([1]))
        assert "\n" not in str(caught.value)
    assert len(echo.logits) == 1
