"""Exports for transformers run there, and give the text of its plain `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.export import ENGINES
from foredraft.export.choice import choice_of
from foredraft.settings import Settings
from tests.export.exporting import TARGET, export

PROMPTS = ("def area(width, height):\n    return width * height\n\ndef area(", "Once upon a time there was a")


def executed(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(text, "exported.py", "exec"), names)
    return names


def generate(names: dict[str, Any], prompt: str, **options: Any) -> list[int]:
    inputs = names["tokenizer"](prompt, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        ids = names["target"].generate(**inputs, do_sample=False, max_new_tokens=32, **options)
    tokens: list[int] = ids[0].tolist()
    return tokens


def float32(names: dict[str, Any]) -> dict[str, Any]:
    for name in ("target", "draft"):
        if name in names:
            names[name].float()
    return names


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_greedy_texts_are_those_of_plain_decoding(method: str, tmp_path: Path) -> None:
    names = float32(executed(export("transformers", method, tmp_path).text))
    passes = PassCounter(names["target"])
    for prompt in PROMPTS:
        plain = generate(names, prompt)
        num_plain = passes.pop()
        assert generate(names, prompt, **names["options"]) == plain
        assert passes.pop() < num_plain, "it speculated"


@pytest.mark.slow
def test_an_early_exit_runs() -> None:
    settings = Settings(model=TARGET, method="early_exit", exit_layer=3, speculative_tokens=3)
    names = float32(executed(ENGINES["transformers"].export(choice_of(settings)).text))
    assert names["options"] == {"assistant_early_exit": 3}
    for prompt in PROMPTS:
        assert generate(names, prompt, **names["options"]) == generate(names, prompt)


def test_mtp_layers_are_run_by_transformers(tmp_path: Path) -> None:
    """There too they are read from the target's checkpoint."""
    names = executed(export("transformers", "mtp", tmp_path).text)
    assert names["options"] == {"use_mtp": True}


class PassCounter:
    """Counts the passes of a model since the last `pop`."""

    def __init__(self, model: Any) -> None:
        self._count = 0
        model.register_forward_hook(self._add)

    def _add(self, *_: Any) -> None:
        self._count += 1

    def pop(self) -> int:
        found, self._count = self._count, 0
        return found
