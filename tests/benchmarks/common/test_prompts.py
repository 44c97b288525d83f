"""The prompts of conversations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.common.prompts import conversation_starts

QUESTIONS = [("writing", "a"), ("writing", "b"), ("writing", "c"), ("math", "d"), ("code", "e"), ("code", "f")]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "prompts").mkdir()
    lines = [json.dumps({"category": category, "turns": [text, "a second turn"]}) for category, text in QUESTIONS]
    (tmp_path / "prompts" / "mt_bench.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_categories_alternate(data: Path) -> None:
    assert conversation_starts(None, data) == ["a", "d", "e", "b", "f", "c"]


def test_a_few_prompts_have_several_categories(data: Path) -> None:
    assert conversation_starts(3, data) == ["a", "d", "e"]
