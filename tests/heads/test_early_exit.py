"""Early exits as checkpoints, and attached to a target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from foredraft import LLM, ModelError, SamplingParams
from foredraft.heads import EarlyExit, ExitConfig, TargetShape, attach_head, load_head
from foredraft.heads.early_exit import load_exit, new_exit
from foredraft.heads.saving import save_exit
from foredraft.kernels import load_kernels
from foredraft.model import EMBEDDED, LanguageModel
from foredraft.model.stack import StackBody
from tests.heads.random_heads import embedded_head, save_early_exit

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, speculative_tokens=4)
SEEDED = SamplingParams(max_tokens=24, temperature=0.9, seed=5, speculative_tokens=4)
PROMPTS = ["def add(a, b):", "Once upon a time"]


@pytest.mark.parametrize("adapter_size", [0, 32])
def test_a_saved_exit_is_loaded_again(target: LanguageModel, tmp_path: Path, adapter_size: int) -> None:
    exit = new_exit(target, adapter_size)
    for parameter in exit.parameters():
        torch.nn.init.normal_(parameter)
    save_exit(exit, 5, tmp_path, "a target", ["LlamaForCausalLM"], torch.float32)
    checkpoint = load_head(str(tmp_path), TargetShape.of(target.hf.config))
    assert isinstance(checkpoint.config, ExitConfig)
    assert (checkpoint.config.layer, checkpoint.config.adapter_size) == (5, adapter_size)
    loaded = load_exit(checkpoint.config, checkpoint.tensors, target)
    x = torch.randn(3, 256)
    assert torch.equal(loaded(x), exit(x))
    assert json.loads((tmp_path / "config.json").read_text())["speculators_config"]["algorithm"] == "early_exit"


def test_a_new_exit_gives_what_the_final_norm_gives(target: LanguageModel) -> None:
    x = torch.randn(3, 256)
    assert torch.allclose(new_exit(target, 64)(x), target.hf.model.norm(x), atol=1e-2)  # type: ignore[union-attr, operator]


def test_no_weight_of_the_target_is_copied(target: LanguageModel) -> None:
    whole, shorter = target.body, attach_head(str(embedded_head("early_exit")), target)
    assert isinstance(shorter, EarlyExit)
    if load_kernels() is None:
        pytest.skip("no compiled kernels on this machine")
    assert isinstance(whole, StackBody)
    assert isinstance(shorter.model.body, StackBody)
    all_layers, _, embedding, _, head, *_ = whole._stack.keeps
    layers, _, its_embedding, _, its_head, *_ = shorter.model.body._stack.keeps
    assert its_embedding is embedding
    assert its_head is head
    assert all(a is b for a, b in zip(layers[:3], all_layers[:3], strict=True))
    assert len(layers) == 4  # the last parameter is the adapter's


@pytest.mark.parametrize(
    "settings", [{"exit_layer": 2}, {"exit_layer": 7, "dtype": "float32"}, {"exit_layer": 4, "quantization": "int8"}]
)
@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_an_exit_after_any_layer_changes_no_text(settings: dict[str, object], params: SamplingParams) -> None:
    llm = LLM(**settings)  # type: ignore[arg-type]
    assert llm.method == "early_exit"
    texts, plain = (each.generate(PROMPTS, params) for each in (llm, llm.with_drafter("none")))
    assert [each.outputs[0].token_ids for each in texts] == [each.outputs[0].token_ids for each in plain]
    assert all(each.metrics.stats.num_draft_tokens for each in texts)
    assert not llm.fallbacks


def test_an_exit_and_a_draft_model_can_be_combined() -> None:
    llm = LLM(exit_layer=4, method="early_exit+draft_model")
    assert llm.method == "early_exit+draft_model"
    assert [llm.with_drafter(name).method for name in ("early_exit", "draft_model")] == ["early_exit", "draft_model"]
    llm.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0.8))
    assert not [reason for _, reason in llm.fallbacks if reason == "failed"]


def test_an_exit_takes_no_cache_memory() -> None:
    llm = LLM(EMBEDDED / "target", draft_model=embedded_head("early_exit"))
    assert llm.method == "early_exit"
    assert llm.engine.cache.taps == ()
    assert llm.engine.cache.bytes_per_token == llm.target.traits.bytes_per_token


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"early_exit_layer": 8}, "it exits after layer 8, but the target has 8: it belongs to another target"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': only 'silu' is supported"),
        ({"depth": 1}, "keys that foredraft does not recognize: depth"),
        ({"adapter_size": 32}, "adapter.down_proj.weight has the shape"),
        ({"norm_bias": True}, "tensors are missing: .*norm.bias"),
        ({"target_hidden_size": 128}, "but the target's have width 256"),
    ],
)
def test_an_unsuitable_checkpoint_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(EMBEDDED / "target")
    file = save_early_exit(config, tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ModelError, match=message):
        load_head(str(tmp_path), TargetShape.of(config))
