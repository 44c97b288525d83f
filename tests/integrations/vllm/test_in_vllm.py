"""The proposer in vLLM's CPU build: greedy texts are those that vLLM writes without speculation. Tested in float32, since in bfloat16
vLLM's rows depend on their batch, and near ties are common."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.export.exporting import TARGET, export, options_of
from tests.peers import ask

PROMPTS = [f"def area_{name}(width, height):\n    return width * height\n\n" for name in ("one", "two", "three")] + [
    f"Once upon a time there was a little {name}" for name in ("girl", "boy", "dog", "bird", "fish")
]

pytestmark = [pytest.mark.slow, pytest.mark.peer]


def answer(options: dict[str, Any]) -> Any:
    given = {"model": TARGET, "prompts": PROMPTS, "max_tokens": 64, "options": options}
    return ask("vllm", Path(__file__).parent / "vllm_texts.py", given)


@cache
def plain() -> Any:
    return answer({})


@pytest.mark.parametrize(
    ("method", "tokens"), [("suffix", "auto"), ("suffix", 4), ("suffix+ngram+draft_model", "auto"), ("draft_model", 3)]
)
def test_greedy_texts_are_those_without_speculation(method: str, tokens: int | str, tmp_path: Path) -> None:
    found = answer(options_of(export("vllm", method, tmp_path, tokens).text))
    assert found["texts"] == plain()["texts"]
    assert found["accepted"] > 0


def test_greedy_texts_are_those_without_speculation_under_preemption(tmp_path: Path) -> None:
    """Four texts of three blocks each do not fit into eight blocks, of which one is reserved for padding."""
    options = options_of(export("vllm", "suffix", tmp_path, 4).text)
    found = answer({**options, "num_gpu_blocks_override": 9, "block_size": 32})
    assert found["texts"] == plain()["texts"]
    assert found["preempted"] > 0
