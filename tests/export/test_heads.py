"""Heads are exported in the form that an engine loads, with the same meaning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from foredraft import ForedraftError
from foredraft.export import ENGINES, Choice
from foredraft.export.choice import head_of
from foredraft.heads import EagleConfig, EagleHead, load_head
from foredraft.heads.quantized import quantize_head
from foredraft.heads.saving import save_eagle3, save_safeailab_eagle3
from tests.export.exporting import TARGET, choice, options_of
from tests.heads.checkpoints import TARGET as TOY
from tests.heads.test_eagle import head_of as golden_head


def with_head(draft: str) -> Choice:
    return Choice(TARGET, draft, ("eagle",), 3, head=head_of(TARGET, draft))


@pytest.fixture
def trained(tmp_path: Path) -> str:
    """A head in the form that training writes, speculators', with random weights."""
    exported = ENGINES["vllm"].export(choice("eagle", 3), tmp_path / "trained")
    assert str(tmp_path / "trained") in exported.text
    return str(tmp_path / "trained")


def test_a_trained_head_loads_in_vllm_unchanged(trained: str) -> None:
    given = options_of(ENGINES["vllm"].export(with_head(trained)).text)["speculative_config"]
    assert given == {
        "method": "eagle3",
        "model": trained,
        "draft_sample_method": "probabilistic",
        "num_speculative_tokens": 3,
    }


@pytest.mark.parametrize("name", ["sglang", "tensorrt-llm", "max"])
def test_for_other_engines_a_head_is_written_in_their_form(name: str, trained: str, tmp_path: Path) -> None:
    engine, folder = ENGINES[name], tmp_path / "theirs"
    with pytest.raises(ForedraftError, match="in that of speculators: give --head-output DIR"):
        engine.export(with_head(trained))
    exported = engine.export(with_head(trained), folder)
    assert str(folder) in exported.text
    given, written = head_of(TARGET, trained), head_of(TARGET, str(folder))
    assert written.form == "SafeAILab EAGLE-3"
    assert written.config.taps == given.config.taps
    assert written.tensors.keys() == given.tensors.keys()
    assert all(torch.equal(written.tensors[key], given.tensors[key]) for key in given.tensors)
    with pytest.raises(ForedraftError, match="is not empty: give another --head-output"):
        engine.export(with_head(trained), folder)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ForedraftError, match="file is a file: give --head-output a folder"):
        engine.export(with_head(trained), file)
    with pytest.raises(ForedraftError, match=r"cannot be written .*: give another --head-output"):
        engine.export(with_head(trained), file / "folder")


def test_a_head_in_eight_bits_is_written_in_floating_point(trained: str, tmp_path: Path) -> None:
    rounded, theirs = tmp_path / "rounded", tmp_path / "theirs"
    shutil.copytree(trained, rounded)
    quantize_head(rounded)
    with pytest.raises(ForedraftError, match="in that of speculators, quantized: give --head-output DIR"):
        ENGINES["vllm"].export(with_head(str(rounded)))
    assert str(theirs) in ENGINES["vllm"].export(with_head(str(rounded)), theirs).text
    given, written = head_of(TARGET, str(rounded)), head_of(TARGET, str(theirs))
    assert not written.is_quantized
    assert written.tensors.keys() == given.tensors.keys()
    for key, weight in given.tensors.items():
        assert torch.allclose(written.tensors[key].float(), weight.float(), rtol=2**-8, atol=0)  # the nearest bfloat16


def test_layers_are_numbered_as_the_engine_numbers_them(trained: str, tmp_path: Path) -> None:
    """As layer outputs, while a tap is a layer's input."""
    text = ENGINES["tensorrt-llm"].export(with_head(trained), tmp_path / "theirs").text
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    taps = head_of(TARGET, trained).config.taps
    captured = yaml.safe_load(text)["speculative_config"]["eagle3_layers_to_capture"]
    assert captured == config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [tap - 1 for tap in taps]
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert any(name.startswith("midlayer.") for name in load_file(tmp_path / "theirs" / "model.safetensors"))


@pytest.mark.parametrize("name", ["safeailab_eagle3", "specforge"])
def test_a_written_head_is_read_again(name: str, tmp_path: Path) -> None:
    head = golden_head(name, tmp_path / "given")
    save_safeailab_eagle3(head, tmp_path / "saved", torch.float32)
    loaded = load_head(str(tmp_path / "saved"), TOY._replace(hidden_size=head.config.target_hidden_size))
    assert isinstance(loaded.config, EagleConfig)
    assert loaded.tensors.keys() == head.state_dict().keys()
    assert all(torch.equal(loaded.tensors[key], weight) for key, weight in head.state_dict().items())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("safeailab_eagle1", "not eagle1"),
        ("speculators_two_layers", "2 layers of the qwen3 family"),
        ("speculators_qwen3", "family qwen3|norm_before"),
        ("speculators_norm_before_fc", "norm_before_fc"),
        ("speculators_3_1", "fc_norm"),
    ],
)
def test_heads_that_an_engine_would_compute_differently_are_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        save_safeailab_eagle3(golden_head(name, tmp_path / "given"), tmp_path / "saved")


@pytest.mark.parametrize("taps", [(1, 4, 6), (2, 4, 7), (3, 4, 5)])
def test_the_captured_layers_are_those_of_the_taps(taps: tuple[int, ...], tmp_path: Path) -> None:
    """However the engine would number them."""
    given = head_of(TARGET, str(choice("eagle").draft)).with_settings(taps=taps)
    save_eagle3(EagleHead.of(given, _none, _none), tmp_path / "given", TARGET, [], torch.float32)
    text = ENGINES["tensorrt-llm"].export(with_head(str(tmp_path / "given")), tmp_path / "theirs").text
    captured = yaml.safe_load(text)["speculative_config"]["eagle3_layers_to_capture"]
    assert captured == [tap - 1 for tap in taps]


def test_max_takes_heads_on_its_own_layers_only(tmp_path: Path) -> None:
    given = head_of(TARGET, str(choice("eagle").draft))
    moved = given.with_settings(taps=(1, 4, 6))
    save_eagle3(EagleHead.of(moved, _none, _none), tmp_path / "moved", TARGET, ["LlamaForCausalLM"], torch.float32)
    with pytest.raises(ForedraftError, match=r"layers \[1, 4, 6\], but MAX provides"):
        ENGINES["max"].export(with_head(str(tmp_path / "moved")), tmp_path / "theirs")


def test_a_head_that_uses_rows_of_the_targets_lm_head_is_refused(tmp_path: Path) -> None:
    given = head_of(TARGET, str(choice("eagle").draft))
    head = EagleHead.of(given, _none, _none)
    save_eagle3(head, tmp_path / "small", TARGET, ["LlamaForCausalLM"], torch.float32, without=["lm_head.weight"])
    for folder in (tmp_path / "theirs", None):
        with pytest.raises(ForedraftError, match="train it without --share-lm-head"):
            ENGINES["sglang"].export(with_head(str(tmp_path / "small")), folder)


def test_no_option_is_advised_for_a_head_that_the_engines_form_cannot_hold(tmp_path: Path) -> None:
    given = head_of(TARGET, str(choice("eagle").draft))
    save_eagle3(EagleHead.of(given, _none, _none), tmp_path / "given", TARGET, [], torch.float32)
    config = json.loads((tmp_path / "given" / "config.json").read_text())
    (tmp_path / "given" / "config.json").write_text(json.dumps(config | {"norm_before_residual": True}))
    for folder in (tmp_path / "theirs", None):
        with pytest.raises(
            ForedraftError, match=r"cannot be written as SafeAILab EAGLE-3: .* this head has norm_before_residual"
        ):
            ENGINES["sglang"].export(with_head(str(tmp_path / "given")), folder)


def test_vllm_drafts_no_more_tokens_than_there_are_medusa_heads(tmp_path: Path) -> None:
    with pytest.raises(
        ForedraftError, match=r"cannot draft 9 tokens with \d Medusa heads: give --speculative-tokens \d"
    ):
        ENGINES["vllm"].export(choice("medusa", 9), tmp_path / "theirs")


def test_without_a_head_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ForedraftError, match="--head-output is for heads"):
        ENGINES["vllm"].export(choice("suffix"), tmp_path / "head")


def _none(_: object) -> object:
    raise AssertionError("a head is written without its target")
