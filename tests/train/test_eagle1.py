"""EAGLE-1 heads that are initialised with a draft model: the same drafts at first, and a file that drafts like the head."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from foredraft import LLM, SamplingParams
from foredraft.errors import ForedraftError
from foredraft.heads import EagleConfig, EagleHead, TargetShape, load_head
from foredraft.heads.unrolled import unroll
from foredraft.model import LanguageModel, LoadOptions, load_model
from foredraft.train.eagle1 import Eagle1Kind
from foredraft.train.unrolled_drafts import TargetStates
from tests.train.conftest import make_toy
from tests.train.test_head_training import head as train

TEXTS = [[5, 6, 7, 8, 9], list(range(20, 60))]


@pytest.fixture(scope="module")
def target(toy: Path) -> LanguageModel:
    return load_model(toy, LoadOptions(dtype="float32", device="cpu", kernels="torch"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("draft"), num_layers=1, seed=5)


def drafted(head: EagleHead, target: LanguageModel, ids: Tensor) -> list[Tensor]:
    """The logits of the first, second and third token after each position."""
    features, _ = TargetStates(target, head.config.taps)(ids[:, :-1])
    return list(unroll(head, features, ids[:, 1:], 3))


@pytest.mark.parametrize(("num_layers", "width"), [(1, 16), (2, 32)])
def test_a_new_head_gives_the_draft_models_logits(
    num_layers: int, width: int, target: LanguageModel, tmp_path: Path
) -> None:
    folder = make_toy(tmp_path, num_layers=num_layers, width=width, seed=5)
    head = Eagle1Kind(str(folder)).new(target, TEXTS, seed=0)
    ids = torch.randint(1, 4096, (2, 14), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids[:, 1:]).logits
        for step, logits in enumerate(drafted(head, target, ids)):
            assert torch.allclose(logits[:, : 13 - step], expected[:, step:], atol=1e-4)


def test_embeddings_are_scaled_to_the_size_of_the_states(target: LanguageModel, draft: Path) -> None:
    """So that a training step on fc affects both equally."""
    head = Eagle1Kind(str(draft)).new(target, TEXTS, seed=0)
    features, _ = TargetStates(target, head.config.taps)(torch.tensor([TEXTS[1]]))
    with torch.no_grad():
        sizes = [float(x.square().mean().sqrt()) for x in (head.embed_tokens.weight, head.fuse(features))]
    assert sizes == pytest.approx([1.0, 1.0], rel=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_saved_files_give_the_same_head(
    target: LanguageModel, draft: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    kind = Eagle1Kind(str(draft))
    head = kind.new(target, TEXTS, seed=0)
    torch.nn.init.normal_(head.fc.weight, std=0.1)
    kind.save(head, target, "target", tmp_path, dtype)
    checkpoint = load_head(str(tmp_path), TargetShape.of(target.hf.config))
    assert checkpoint.config == replace(head.config, training_len=checkpoint.config.training_len)
    assert checkpoint.config.ambiguities == ()
    again = Eagle1Kind(init=str(tmp_path)).load(str(tmp_path), target)
    ids = torch.randint(1, 4096, (2, 14), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(parameter.to(dtype))
        pairs = zip(drafted(again, target, ids), drafted(head, target, ids), strict=True)
        for step, (found, expected) in enumerate(pairs):
            assert torch.allclose(found[:, : 13 - step], expected[:, : 13 - step], atol=1e-5)


def test_a_head_is_trained_further_and_drafts(toy: Path, draft: Path, text: Path, tmp_path: Path) -> None:
    """It reads the target's states, which have non-zero weights after training."""
    asked = ("--kind", "eagle1", "--steps", "6", "--unroll", "3", "--json")
    result = train(toy, text, tmp_path / "head", *asked, "--draft-model", draft)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["complete"]
    checkpoint = load_head(str(tmp_path / "head"), TargetShape.of(AutoModelForCausalLM.from_pretrained(toy).config))
    assert isinstance(checkpoint.config, EagleConfig)
    assert checkpoint.config.kind == "eagle1"
    assert checkpoint.tensors["fc.weight"][:, 16:].any()  # the half for the states
    card = (tmp_path / "head" / "README.md").read_text()
    assert "EAGLE-1" in card
    again = train(toy, text, tmp_path / "again", *asked, "--init", tmp_path / "head")
    assert again.exit_code == 0, again.stderr
    llm = LLM(toy, tmp_path / "again", dtype="float32", speculative_tokens=2)
    assert llm.method == "eagle"
    for params in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}):
        wanted = SamplingParams(max_tokens=8, ignore_eos=True, **params)  # type: ignore[arg-type]
        (output,), (plain,) = (one.generate("the cat sat", wanted) for one in (llm, llm.with_drafter("none")))
        assert output.outputs[0].token_ids == plain.outputs[0].token_ids
        assert output.metrics.stats.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either --draft-model, to initialise the head from, or --init"),
        ({"draft_model": "a", "init": "b"}, "either --draft-model, to initialise the head from, or --init"),
        ({"draft_model": "a", "num_steps": 0}, "--unroll must be at least 1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ForedraftError, match=message):
        Eagle1Kind(**settings)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            LlamaConfig(
                vocab_size=512, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
            ),
            "has 512 ids",
        ),
        (Qwen3Config(vocab_size=4096, hidden_size=16, intermediate_size=24, num_hidden_layers=1), "the family qwen3"),
    ],
)
def test_an_unsuitable_draft_model_is_refused(
    target: LanguageModel, tmp_path: Path, config: PretrainedConfig, message: str
) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ForedraftError, match=message):
        Eagle1Kind(str(tmp_path)).new(target, TEXTS, seed=0)
