"""Fixtures of the live tests: the embedded pair with a fixed number of draft tokens, and observers of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from foredraft import LLM
from foredraft.server.live import LiveObserver

MakeObserver = Callable[..., LiveObserver]


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM(seed=3, speculative_tokens=3)


@pytest.fixture
def make_observer(llm: LLM) -> Iterator[MakeObserver]:
    """Makes an observer of the model: make_observer(**settings)."""
    with ExitStack() as stack:

        def make(**settings: Any) -> LiveObserver:
            observer = LiveObserver(**settings)
            stack.enter_context(observer.attached(llm))
            return observer

        yield make
