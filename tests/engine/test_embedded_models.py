"""The embedded models that are used where settings name none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft import LLM, SamplingParams
from foredraft.engine.embedded_models import with_embedded_models
from foredraft.engine.stats import SpeculationStats
from foredraft.model import EMBEDDED
from foredraft.settings import Settings

TARGET, DRAFT, HEAD, SMOLLM2_HEAD = (EMBEDDED / name for name in ("target", "draft", "head", "smollm2-head"))
# So many that what the head reaches on them does not depend on the processor, which decides what the texts are.
QUESTIONS = (
    "Explain how plants make their food.",
    "Write a short poem about the sea.",
    "How do I boil an egg?",
    "Name three uses of copper, with a reason for each.",
    "Write a Python function that reverses a list.",
    "What is a good plan for a rainy day?",
    "Summarise the story of Cinderella.",
    "Why do people keep diaries?",
    "Give me a recipe for pancakes.",
    "What is the difference between a lake and a sea?",
    "Write an email that asks for a day off.",
    "Describe a market in the morning.",
)


@pytest.mark.parametrize(
    ("given", "draft"),
    [
        ({}, DRAFT),
        ({"method": "draft_model"}, DRAFT),
        ({"method": "suffix+draft_model"}, DRAFT),
        ({"method": "eagle"}, HEAD),
        ({"method": ["suffix", "eagle"]}, HEAD),
        ({"method": "suffix"}, None),
        ({"method": "none"}, None),
        ({"exit_layer": 2}, None),
        ({"draft_server": "tcp://127.0.0.1:5757"}, None),
        ({"draft_model": "mine"}, "mine"),
        ({"method": "eagle", "draft_model": "mine"}, "mine"),
    ],
)
def test_the_first_method_that_needs_a_draft_decides_which_one_is_used(given: dict[str, Any], draft: object) -> None:
    found = with_embedded_models(Settings(**given))
    assert (found.model, found.draft_model) == (TARGET, draft)


def test_settings_with_a_model_are_not_changed() -> None:
    settings = Settings(model="theirs", method="eagle")
    assert with_embedded_models(settings) == settings


def test_the_head_for_a_target_is_found_by_name_or_configuration(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}
    smollm2, other = tmp_path / "smollm2", tmp_path / "other"
    for folder, values in ((smollm2, config), (other, config | {"num_hidden_layers": 32})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(values))
    with torch.device("meta"):
        in_memory = LlamaForCausalLM(LlamaConfig(**config))
    for model in ("HuggingFaceTB/SmolLM2-135M-Instruct", str(smollm2), smollm2, in_memory):
        for method in ("eagle", "suffix+eagle"):
            assert with_embedded_models(Settings(model=model, method=method)).draft_model == SMOLLM2_HEAD
        for settings in (Settings(model=model), Settings(model=model, method="eagle", draft_model="mine")):
            assert with_embedded_models(settings) == settings
    assert with_embedded_models(Settings(model=other, method="eagle")).draft_model is None


@pytest.mark.real_model
@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"temperature": 0.0}, id="greedy", marks=pytest.mark.slow),
        pytest.param({"temperature": 0.8, "seed": 5}, id="seeded"),
    ],
)
def test_the_head_for_smollm2_drafts_and_does_not_change_the_text(smollm2: Path, params: dict[str, Any]) -> None:
    llm = LLM(smollm2, method="eagle", num_threads=1, speculative_tokens=4)
    wanted = SamplingParams(max_tokens=96, **params)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs, plain = (one.chat(chats, wanted) for one in (llm, llm.with_drafter("none")))
    assert [each.outputs[0].token_ids for each in outputs] == [each.outputs[0].token_ids for each in plain]
    stats = sum((each.metrics.stats for each in outputs), SpeculationStats())
    assert stats.mean_acceptance_length is not None
    assert stats.mean_acceptance_length > 1.5


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "seeded"])
def test_the_embedded_head_drafts_and_does_not_change_the_text(params: dict[str, Any]) -> None:
    llm = LLM(method="eagle", num_threads=1, speculative_tokens=4)
    wanted = SamplingParams(max_tokens=48, ignore_eos=True, **params)
    prompt = "def read_lines(path):\n    with open(path) as file:"
    (output,), (plain,) = (one.generate(prompt, wanted) for one in (llm, llm.with_drafter("none")))
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    stats = output.metrics.stats
    assert stats.mean_acceptance_length is not None
    assert stats.mean_acceptance_length > 2
