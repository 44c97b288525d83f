"""Fixtures that several test modules share: the embedded pair, engines that run it, and real models."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

# Without a GPU its kernels run in Triton's interpreter, which must be selected before Triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from foredraft.drafters import SELF_DRAFTS, DrafterContext, build
from foredraft.engine.engine import Engine
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import Drafter
from foredraft.kernels import load_kernels
from foredraft.model import EMBEDDED, LanguageModel, LoadOptions, load_model
from recipes.real_models import GEMMA3, SMOLLM2
from tests.draft_servers import remote_context
from tests.heads.random_heads import MASK_TOKEN, random_head
from tests.real_models import real_model

# No deadline: on a busy machine an example may take a second.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=400)
hypothesis.settings.load_profile("untimed")

MakeEngine = Callable[..., Engine]


def pytest_configure() -> None:
    """Compile the kernels unless they are in the user's cache, before several processes do so at the same time."""
    load_kernels()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.sharing_out import Scheduler

    return Scheduler(config, log)


def embedded(name: str, **options: Any) -> LanguageModel:
    return load_model(EMBEDDED / name, LoadOptions(device="cpu", **options))


def with_mask_token(draft: LanguageModel) -> LanguageModel:
    """The draft model, usable with "pard". It was not trained to read the mask, so only its first draft token is good."""
    draft.hf.config.pard_token = MASK_TOKEN
    return draft


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """Sends this process what Ctrl-C sends; it is handled as in a terminal, even if the tests run where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def target() -> LanguageModel:
    """The embedded target, in bfloat16."""
    return embedded("target", dtype="bfloat16")


@pytest.fixture(scope="session")
def draft() -> LanguageModel:
    """The embedded draft, in bfloat16."""
    return with_mask_token(embedded("draft", dtype="bfloat16"))


@pytest.fixture(scope="session")
def int8_target() -> LanguageModel:
    """The embedded target, its linear layers in int8."""
    return embedded("target", quantization="int8")


@pytest.fixture(scope="session")
def int8_draft() -> LanguageModel:
    """The embedded draft, its linear layers in int8."""
    return with_mask_token(embedded("draft", quantization="int8"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, a GGUF file in Q4_1. Mark the test `real_model`."""
    return real_model(SMOLLM2)


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M, a GGUF file in Q4_K_M, not instruction-tuned. Mark the test `real_model`."""
    return real_model(GEMMA3)


@pytest.fixture(scope="session")
def real_models(smollm2: Path, gemma3: Path) -> Path:
    """The folder with both models. Mark the test `real_model`."""
    assert smollm2.parent == gemma3.parent
    return smollm2.parent


@pytest.fixture(scope="session")
def make_engine(target: LanguageModel, draft: LanguageModel, int8_target: LanguageModel) -> MakeEngine:
    """Makes a new engine for the target: make_engine(method, **engine_settings).

    method: a drafter's name in the registry, or a drafter. cache_memory: the size of the pool in bytes. pool: a pool to share.
    """

    def make(
        method: str | Drafter = "draft_model",
        *,
        model: LanguageModel | None = None,
        draft_model: LanguageModel | None = None,
        pool: MemoryPool | None = None,
        cache_memory: int = 1 << 30,
        **settings: Any,
    ) -> Engine:
        chosen = model or target
        pool = pool or MemoryPool(cache_memory)
        drafts = int8_target if method in SELF_DRAFTS else draft
        head = random_head(method, chosen) if isinstance(method, str) else None
        elsewhere = remote_context(str(method), chosen.traits.vocab_size)
        context = DrafterContext(chosen.traits.vocab_size, pool, draft_model or drafts, head=head, **elsewhere)
        drafter = build(method, context) if isinstance(method, str) else method
        return Engine(chosen, drafter, pool, **settings)

    return make
