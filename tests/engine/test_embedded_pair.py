"""What settings without a model stand for."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft import LLM, SamplingParams
from foredraft.engine.embedded_pair import with_embedded_pair
from foredraft.model import EMBEDDED
from foredraft.settings import Settings

TARGET, DRAFT, HEAD = (EMBEDDED / name for name in ("target", "draft", "head"))


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
def test_the_first_method_that_needs_a_draft_decides_which(given: dict[str, Any], draft: object) -> None:
    found = with_embedded_pair(Settings(**given))
    assert (found.model, found.draft_model) == (TARGET, draft)


def test_settings_with_a_model_stay() -> None:
    settings = Settings(model="theirs", method="eagle")
    assert with_embedded_pair(settings) == settings


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "seeded"])
def test_the_embedded_head_drafts_and_the_text_is_the_targets(params: dict[str, Any]) -> None:
    llm = LLM(method="eagle", num_threads=1, speculative_tokens=4)
    wanted = SamplingParams(max_tokens=48, ignore_eos=True, **params)
    prompt = "def read_lines(path):\n    with open(path) as file:"
    (output,), (plain,) = (one.generate(prompt, wanted) for one in (llm, llm.with_drafter("none")))
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    stats = output.metrics.stats
    assert stats.mean_acceptance_length is not None
    assert stats.mean_acceptance_length > 2
