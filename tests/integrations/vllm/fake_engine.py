"""An engine with vLLM's interface to a proposer: rows that move, chunked prefill, preemption and cancelled texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Target = Callable[[Sequence[int]], int]


class Proposes(Protocol):
    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]: ...


def config_for(num_tokens: int = 4, max_len: int = 256, vocab_size: int = 32, ranks: int = 1, **options: Any) -> Any:
    """What a Proposer reads from a VllmConfig. options: those of foredraft."""
    return SimpleNamespace(
        additional_config={"foredraft": options},
        speculative_config=SimpleNamespace(num_speculative_tokens=num_tokens),
        model_config=SimpleNamespace(max_model_len=max_len, get_vocab_size=lambda: vocab_size),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
    )


def looping(history: Sequence[int]) -> int:
    """A target whose texts repeat after at most 20 tokens: Fibonacci numbers modulo 5."""
    return (history[-1] + history[-2]) % 5


def hashing(history: Sequence[int]) -> int:
    """A target whose texts do not repeat."""
    return hash(tuple(history)) % 32


@dataclass
class Text:
    prompt: list[int]
    max_tokens: int
    unread: int
    tokens: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.tokens) >= self.max_tokens


class FakeEngine:
    """A greedy engine. chunk: tokens of a prompt that are read in a step. disturb: move, preempt and cancel texts at random."""

    def __init__(
        self,
        proposer: Proposes,
        target: Target,
        *,
        num_rows: int = 4,
        chunk: int = 8,
        disturb: int | None = None,
        max_len: int = 256,
        most: int = 4,
        on_step: Callable[[int], None] = lambda num_rows: None,
    ) -> None:
        self._proposer, self._target = proposer, target
        self._num_rows, self._chunk, self._max_len, self._most = num_rows, chunk, max_len, most
        self._random = None if disturb is None else Random(disturb)
        self._on_step = on_step
        self.num_drafted = self.num_accepted = self.num_cancelled = self.num_preempted = self.num_steps = 0

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Run all texts. -> the texts without their prompts; a cancelled one is shorter"""
        texts = [Text([*prompt], max_tokens, len(prompt)) for prompt in prompts]
        waiting, rows = texts[:], list[Text]()
        while waiting or rows:
            while waiting and len(rows) < self._num_rows:
                rows.append(waiting.pop(0))
            self._step(rows)
            rows = [text for text in rows if not text.is_done]
            if self._random is not None:
                rows = self._disturbed(rows, waiting, self._random)
        return [text.tokens[:max_tokens] for text in texts]

    def _step(self, rows: list[Text]) -> None:
        self.num_steps += 1
        self._on_step(sum(1 + len(text.draft) for text in rows))
        sampled = [self._advance(text) for text in rows]
        tokens = np.zeros((self._num_rows, self._max_len), dtype=np.int32)
        lens = np.zeros(self._num_rows, dtype=np.int32)
        for place, text in enumerate(rows):
            history = text.prompt + text.tokens
            tokens[place, : len(history)], lens[place] = history, len(history)
        before = tokens.copy()
        drafts = self._proposer.propose(sampled, lens, tokens)
        assert np.array_equal(tokens, before), "the histories are the engine's"
        assert len(drafts) == len(rows)
        for text, new_ids, draft in zip(rows, sampled, drafts, strict=True):
            assert len(draft) <= self._most
            assert new_ids or not draft, "a row that reads its prompt has no draft"
            text.draft = draft

    def _advance(self, text: Text) -> list[int]:
        """What vLLM passes to the proposer: the accepted draft tokens and the target's own, or nothing within a prompt."""
        if text.unread > self._chunk:
            text.unread -= self._chunk
            return []
        text.unread = 0
        new = list[int]()
        for drafted in [*text.draft, None]:
            own = self._target([*text.prompt, *text.tokens, *new])
            new.append(own)
            if own != drafted:
                break
        self.num_drafted += len(text.draft)
        self.num_accepted += len(new) - 1
        text.tokens += new
        return new

    def _disturbed(self, rows: list[Text], waiting: list[Text], random: Random) -> list[Text]:
        random.shuffle(rows)
        if rows and random.random() < 0.05:
            rows.pop()
            self.num_cancelled += 1
        if rows and random.random() < 0.1:
            preempted = rows.pop()
            preempted.draft, preempted.unread = [], len(preempted.prompt + preempted.tokens)
            waiting.insert(random.randint(0, len(waiting)), preempted)
            self.num_preempted += 1
        return rows
