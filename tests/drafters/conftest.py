"""Fixtures of the drafters' tests: they build drafters and requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from foredraft.drafters import (
    REGISTRY,
    SELF_DRAFTS,
    DrafterContext,
    MergedDrafter,
    NgramDrafter,
    ScriptedDrafter,
    SuffixDrafter,
    build,
)
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import Drafter, DraftRequest
from foredraft.sampling import Sampler, SamplingParams
from tests.draft_servers import remote, start
from tests.heads.random_heads import OWN_DRAFT_METHODS

VOCAB_SIZE = 16
NEED_A_MODEL = ("draft_model", *SELF_DRAFTS, *OWN_DRAFT_METHODS)

UNREGISTERED: dict[str, Callable[[], Drafter]] = {
    "scripted": lambda: ScriptedDrafter(
        lambda request: [(t + 1) % VOCAB_SIZE for t in request.tokens], corrupt_every=3
    ),
    "suffix, eager": lambda: SuffixDrafter(min_probability=1e-6),
    "merged": lambda: MergedDrafter({"suffix": SuffixDrafter(min_probability=1e-6), "ngram": NgramDrafter()}),
    "suffix with a corpus": lambda: SuffixDrafter(min_probability=1e-6, corpus_tokens=64),
}

DRAFTERS = [*(name for name in REGISTRY if name not in NEED_A_MODEL), *UNREGISTERED]


@cache
def ngram_server() -> str:
    """The address of a draft server with NgramDrafter, which keeps nothing from one text to another."""
    return start(NgramDrafter())


@pytest.fixture(scope="session", params=DRAFTERS)
def drafter_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def vocab_size() -> int:
    return VOCAB_SIZE


@pytest.fixture(scope="session")
def make_drafter() -> Callable[[str], Drafter]:
    """Makes a new drafter by name, over VOCAB_SIZE ids. Drafters that need a model would get it here."""

    def make(name: str) -> Drafter:
        if name in UNREGISTERED:
            return UNREGISTERED[name]()
        if name == "remote":
            return remote(ngram_server(), VOCAB_SIZE)
        return build(name, DrafterContext(vocab_size=VOCAB_SIZE, pool=MemoryPool(1 << 30)))

    return make


@pytest.fixture(scope="session")
def make_request() -> Callable[..., DraftRequest]:
    """Makes a request: make_request(seq_id, tokens, max_len, **sampling_params). Greedy by default."""

    def make(seq_id: int, tokens: Sequence[int], max_len: int, **params: Any) -> DraftRequest:
        resolved = SamplingParams(**{"temperature": 0.0, **params}).resolve({})
        generator = torch.Generator().manual_seed(seq_id)
        return DraftRequest(seq_id, tokens, max_len, Sampler(resolved, tokens[:1], generator))

    return make
