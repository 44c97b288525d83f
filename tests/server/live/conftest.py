"""A model of the live tests' own: the embedded pair, with a fixed number of draft tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from foredraft import LLM
from foredraft.server.live import LiveFeed

MakeFeed = Callable[..., LiveFeed]


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM(seed=3, speculative_tokens=3)


@pytest.fixture
def make_feed(llm: LLM) -> Iterator[MakeFeed]:
    """A feed that looks on at the model: make_feed(**settings)."""
    with ExitStack() as stack:

        def make(**settings: Any) -> LiveFeed:
            feed = LiveFeed(**settings)
            stack.enter_context(feed.attached(llm))
            return feed

        yield make
