"""The models that the programs run, and the prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.paths import MODELS
from benchmarks.common.prompts import chat_ids, code_prompts, conversation_starts
from benchmarks.peers.workers.protocol import Ids

_CONTEXT_STEP = 512


@dataclass(frozen=True)
class ModelSet:
    """names: the checkpoints in `folder` that all programs read. has_head: whether it also has an EAGLE head, in foredraft's format.
    prompts: (the target's tokenizer, a count) -> token ids of that many prompts."""

    name: str
    title: str
    folder: Path
    names: tuple[str, ...]
    prompts: Callable[[Any, int], Ids]
    has_head: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Everything in `folder` that benchmarks.peers.workers.checkpoint writes."""
        return (*self.names, "head") if self.has_head else self.names

    @property
    def has_draft(self) -> bool:
        return "draft" in self.names

    @property
    def config(self) -> dict[str, Any]:
        """The target's configuration."""
        config: dict[str, Any] = json.loads((self.folder / "target" / "config.json").read_text())
        return config


def _code(tokenizer: Any, count: int) -> Ids:
    return [tokenizer(prompt)["input_ids"] for prompt in code_prompts(count)]


MODEL_SETS = {
    model_set.name: model_set
    for model_set in (
        ModelSet("embedded", "Code prompts, a 0.4 B target", MODELS, ("target", "draft"), _code, has_head=True),
        ModelSet(
            "smollm2",
            "MT-bench chats, SmolLM2-135M-Instruct",
            MODELS / "smollm2",
            ("target",),
            chat_ids,
            has_head=True,
        ),
        ModelSet(
            "smollm2-wide",
            "MT-bench chats, SmolLM2-135M-Instruct widened to 1.8 B",
            MODELS / "smollm2-wide",
            ("target",),
            chat_ids,
            has_head=True,
        ),
    )
}


def long_prompts(tokenizer: Any, length: int, count: int) -> Ids:
    """Prompts of exactly `length` tokens that begin differently: MT-bench's questions joined, each time starting at the next
    question.
    """
    questions = conversation_starts(None)
    pieces = [tokenizer(question + "\n\n", add_special_tokens=False)["input_ids"] for question in questions]
    return [_cycle(pieces, first % len(pieces), length) for first in range(count)]


def _cycle(pieces: Sequence[Sequence[int]], first: int, length: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < length:
        ids += pieces[first % len(pieces)]
        first += 1
    return ids[:length]


def context_for(longest: int) -> int:
    """The tokens to reserve for a text, a multiple of 512 and at least 1,024."""
    return max(1024, -(-longest // _CONTEXT_STEP) * _CONTEXT_STEP)


def cache_gib(config: dict[str, Any], context: int, batch: int) -> int:
    """Whole GiB for the keys and values of a batch at two bytes each, with half as much to spare."""
    per_token = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return max(1, -(-3 * per_token * context * batch // 2 // 2**30))


def prompt_multiplications(config: dict[str, Any], length: int) -> int:
    """The multiplications of a Llama for a prompt and one new token: every matrix for every token, attention to all tokens
    before, the lm_head once.
    """
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    matrices = hidden * (2 * queries + 2 * keys + 3 * config["intermediate_size"])
    attention = queries * length * (length + 1)  # scores and weighted sums, each over half of the square
    return config["num_hidden_layers"] * (matrices * length + attention) + hidden * config["vocab_size"]
