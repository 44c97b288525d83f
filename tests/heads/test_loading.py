"""Which heads load and how, and which are refused with which message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from foredraft.errors import ModelError
from foredraft.heads import EagleConfig, HeadCheckpoint, MedusaConfig, TargetShape, load_head
from foredraft.heads import files as files_module
from foredraft.model.taps import FINAL_NORM
from tests.heads.checkpoints import TARGET, Golden, golden
from tests.heads.formats.medusa_forms import as_vllm


def load(case: Golden, folder: Path, target: TargetShape = TARGET, file: str = "model.safetensors") -> HeadCheckpoint:
    return load_head(str(case.save(folder, file)), target)


def refusal(case: Golden, folder: Path, target: TargetShape = TARGET) -> str:
    """The message of the ModelError; asserts that it is one line and names the head."""
    with pytest.raises(ModelError) as caught:
        load(case, folder, target)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{folder}: ")
    return message


def eagle(name: str, folder: Path, **config: Any) -> EagleConfig:
    checkpoint = load(golden(name).having(config), folder)
    assert isinstance(checkpoint.config, EagleConfig)
    return checkpoint.config


def candidates(config: EagleConfig, field: str) -> tuple[Any, ...]:
    return next((ambiguity.candidates for ambiguity in config.ambiguities if ambiguity.field == field), ())


# What loads


@pytest.mark.parametrize(
    ("name", "kind", "family", "num_layers"),
    [
        ("speculators_llama", "eagle3", "llama", 1),
        ("speculators_qwen3", "eagle3", "qwen3", 1),
        ("speculators_two_layers", "eagle3", "qwen3", 2),
        ("safeailab_eagle3", "eagle3", "llama", 1),
        ("safeailab_eagle1", "eagle1", "llama", 1),
        ("specforge", "eagle3", "llama", 1),
        ("deepspec", "eagle3", "qwen3", 1),
    ],
)
def test_the_kind_of_a_head_is_detected_from_the_files(
    name: str, kind: str, family: str, num_layers: int, tmp_path: Path
) -> None:
    config = eagle(name, tmp_path)
    assert (config.kind, config.family, config.num_layers) == (kind, family, num_layers)
    assert config.feature_size == golden(name).inputs["features"].shape[1]
    assert config.draft_vocab_size == golden(name).expected["logits"].shape[1]


@pytest.mark.parametrize(
    "file",
    ["model.safetensors", "pytorch_model.bin"],
)
def test_files_of_either_format_load_the_same(file: str, tmp_path: Path) -> None:
    checkpoint = load(golden("safeailab_eagle3"), tmp_path, file=file)
    assert torch.equal(checkpoint.tensors["fc.weight"], golden("safeailab_eagle3").tensors["fc.weight"])


def test_sharded_weights_are_loaded(tmp_path: Path) -> None:
    case = golden("safeailab_eagle3")
    folder = case.save(tmp_path)
    (folder / "model.safetensors").unlink()
    names = sorted(case.tensors)
    parts = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, held in parts.items():
        save_file({name: case.tensors[name].contiguous() for name in held}, folder / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    whole = load(case, tmp_path / "whole").tensors
    assert load_head(str(folder), TARGET).tensors.keys() == whole.keys()
    torch.save({}, folder / "pytorch_model.bin")  # safetensors are preferred, also in parts
    assert load_head(str(folder), TARGET).tensors.keys() == whole.keys()
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors, which its index lists, is missing"):
        load_head(str(folder), TARGET)


def test_of_a_hub_id_only_needed_files_are_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    def fetch(name: str, **options: Any) -> str:
        calls.append({"name": name, **options})
        return str(golden("safeailab_eagle3").save(tmp_path))

    monkeypatch.setattr(files_module, "snapshot_download", fetch)
    load_head("someone/some-head", TARGET, "v2")
    assert calls[0]["name"] == "someone/some-head"
    assert calls[0]["revision"] == "v2"
    assert "config.json" in calls[0]["allow_patterns"]


def test_nemos_prefix_is_removed(tmp_path: Path) -> None:
    case = golden("safeailab_eagle3").renamed(midlayer="layers.0")
    case = case.renamed(fc="model.fc", norm="model.norm", layers="model.layers", embed_tokens="model.embed_tokens")
    checkpoint = load(case, tmp_path)
    expected = load(golden("safeailab_eagle3"), tmp_path / "plain")
    assert checkpoint.tensors.keys() == expected.tensors.keys()
    assert checkpoint.config == expected.config


@pytest.mark.parametrize("name", ["safeailab_eagle1", "safeailab_eagle3"])
def test_vllms_wrapper_is_opened(name: str, tmp_path: Path) -> None:
    case = golden(name)
    wrapper = {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": case.config}
    checkpoint = load(Golden(wrapper, case.tensors), tmp_path)
    assert checkpoint.config == load(case, tmp_path / "plain").config


def test_vllms_token_map_is_a_reduced_vocabulary(tmp_path: Path) -> None:
    case = golden("safeailab_eagle1")
    wrapper = {"model_type": "eagle", "model": case.config, "truncated_vocab_size": 4}
    tensors = {**case.tensors, "token_map": torch.tensor([7, 3, 31, 0]), "lm_head.weight": case.inputs["lm_head"]}
    checkpoint = load(Golden(wrapper, tensors), tmp_path)
    assert torch.equal(checkpoint.tensors["lm_head.weight"], case.inputs["lm_head"][[7, 3, 31, 0]])
    assert checkpoint.config.target_ids is not None
    assert checkpoint.config.target_ids.tolist() == [7, 3, 31, 0]
    del tensors["token_map"]
    assert "no token_map" in refusal(Golden(wrapper, tensors), tmp_path / "without")


def test_the_number_of_layers_is_that_of_the_weights(tmp_path: Path) -> None:
    assert eagle("safeailab_eagle3", tmp_path, num_hidden_layers=40).num_layers == 1


def test_old_files_may_contain_rotary_frequencies(tmp_path: Path) -> None:
    angles = {"midlayer.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    assert load(golden("safeailab_eagle3").having(tensors=angles), tmp_path).tensors


def test_only_sliding_layers_have_a_window(tmp_path: Path) -> None:
    layer = golden("speculators_two_layers").config["transformer_layer_config"]
    layer = {
        **layer,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 6,
        "use_sliding_window": True,
    }
    config = eagle("speculators_two_layers", tmp_path, transformer_layer_config=layer)
    assert [config.window(0), config.window(1)] == [None, 6]


def test_the_training_length_does_not_limit_positions(tmp_path: Path) -> None:
    config = eagle("safeailab_eagle3", tmp_path)
    assert config.training_len == 128


# Taps


def test_taps_are_the_targets_final_state_for_eagle1_and_medusa(tmp_path: Path) -> None:
    assert eagle("safeailab_eagle1", tmp_path / "eagle").taps == (FINAL_NORM,)
    config = load(golden("medusa"), tmp_path / "medusa", file="medusa_lm_head.pt").config
    assert isinstance(config, MedusaConfig)
    assert config.taps == (FINAL_NORM,)


@pytest.mark.parametrize(
    ("ids", "taps", "others"),
    [
        (None, (2, 4, 5), [(3, 5, 6), (1, 3, 4)]),
        ([2, 4, 5], (2, 4, 5), [(3, 5, 6), (1, 3, 4)]),
        ([1, 3, 4], (2, 4, 5), [(3, 5, 6), (1, 3, 4)]),  # numbers of layer outputs, as in SGLang
        ([0, 4, 7], (0, 4, 7), [(1, 5, 8)]),
        ([2, 5, 8], (2, 5, 8), [(1, 4, 7)]),  # 8: the raw output of the last layer
    ],
)
def test_safeailabs_taps_are_read(
    ids: list[int] | None, taps: tuple[int, ...], others: list[Any], tmp_path: Path
) -> None:
    nested = None if ids is None else {"eagle_aux_hidden_state_layer_ids": ids}
    config = eagle("safeailab_eagle3", tmp_path, eagle_config=nested)
    assert config.taps == taps
    assert candidates(config, "taps") == (taps, *others)


def test_speculators_numbers_layer_inputs_and_deepspec_layer_outputs(tmp_path: Path) -> None:
    assert eagle("speculators_llama", tmp_path / "speculators").taps == (1, 2, 4)
    assert eagle("deepspec", tmp_path / "deepspec").taps == (1, 2, 4, 6, 7)


def test_one_tap_as_wide_as_the_head_skips_fc(tmp_path: Path) -> None:
    """As in SafeAILab's and SGLang's code, whatever is in the file, but not in speculators'."""
    square = {"fc.weight": golden("safeailab_eagle3").tensors["fc.weight"][:, :16]}
    case = golden("safeailab_eagle3").having({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4]}}, square)
    config = load(case, tmp_path / "safeailab").config
    assert isinstance(config, EagleConfig)
    assert not config.applies_fc
    assert candidates(config, "applies_fc") == (False, True)
    one = golden("speculators_llama").having({"eagle_aux_hidden_state_layer_ids": [4]}, square)
    config = load(one, tmp_path / "speculators").config
    assert isinstance(config, EagleConfig)
    assert config.applies_fc


# Ambiguous settings


@pytest.mark.parametrize("name", ["speculators_llama", "safeailab_eagle3"])
def test_a_missing_norm_before_residual_is_ambiguous(name: str, tmp_path: Path) -> None:
    missing = eagle(name, tmp_path / "missing", norm_before_residual=None)
    assert not missing.norm_before_residual
    assert candidates(missing, "norm_before_residual") == (False, True)
    given = eagle(name, tmp_path / "given", norm_before_residual=True)
    assert given.norm_before_residual
    assert candidates(given, "norm_before_residual") == ()


def test_norm_output_is_unambiguous_only_in_speculators_form(tmp_path: Path) -> None:
    assert candidates(eagle("speculators_3_1", tmp_path / "speculators"), "norm_output") == ()
    config = eagle("specforge_3_1", tmp_path / "specforge", norm_output=True)
    assert config.norm_output
    assert candidates(config, "norm_output") == (True, False)


def test_a_candidate_changes_only_its_setting(tmp_path: Path) -> None:
    checkpoint = load(golden("safeailab_eagle3"), tmp_path)
    other = checkpoint.with_settings(norm_before_residual=True)
    assert isinstance(other.config, EagleConfig)
    assert other.config.norm_before_residual
    assert other.tensors is checkpoint.tensors
    assert other.config.taps == checkpoint.config.taps


def test_a_table_of_ids_is_noted(tmp_path: Path) -> None:
    case = golden("safeailab_eagle3")
    ids = case.tensors["t2d"].nonzero().flatten()
    checkpoint = load(case.having(tensors={"d2t": ids}), tmp_path)
    assert checkpoint.notes == ("d2t holds ids of the target, not offsets",)
    assert checkpoint.config.target_ids is not None
    assert torch.equal(checkpoint.config.target_ids, ids)


# Refusals


SAFEAILAB, SPECULATORS, MEDUSA = "safeailab_eagle3", "speculators_llama", "medusa"


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        (SAFEAILAB, {"attention_gate": True}, "keys that foredraft does not recognize: attention_gate"),
        (SAFEAILAB, {"eagle_config": {"use_magic": 1}}, "eagle_config.use_magic"),
        (SAFEAILAB, {"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm is True: only False"),
        (SAFEAILAB, {"eagle_config": 3}, "eagle_config must be an object"),
        (SAFEAILAB, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (SAFEAILAB, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rotary embedding is of type 'dynamic'"),
        (SAFEAILAB, {"model_type": "gemma"}, "to the family 'gemma': only llama, qwen3"),
        (SAFEAILAB, {"num_aux_hidden_states": 5}, "give eagle_aux_hidden_state_layer_ids"),
        (SAFEAILAB, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}}, "the target has 8 layers"),
        (SAFEAILAB, {"norm_output": "yes"}, "norm_output must be true or false"),
        (SAFEAILAB, {"draft_vocab_size": 1.5}, "draft_vocab_size must be a whole number"),
        (SAFEAILAB, {"fc_norm": True}, "tensors are missing: fc_norm.0.weight"),
        (
            SAFEAILAB,
            {"intermediate_size": 32},
            "down_proj.weight has the shape [16, 24] in the file, but should have [16, 32]",
        ),
        (
            SPECULATORS,
            {"speculators_model_type": "hydra"},
            "'hydra': only early_exit, eagle1, dflash, dflash2, dspark, xpress, peagle, eagle3 are",
        ),
        (SPECULATORS, {"fc_norm": True, "norm_before_fc": True}, "at most one of them"),
        (SPECULATORS, {"draft_head": 1}, "draft_head"),
        (SPECULATORS, {"eagle_aux_hidden_state_layer_ids": "all"}, "must be a list of whole numbers"),
        ("deepspec", {"target_layer_ids": None}, "does not give target_layer_ids"),
        ("deepspec", {"num_target_layers": 36}, "belongs to another target"),
        ("safeailab_eagle1", {"add_para_norm": True}, "add_para_norm"),
        (SAFEAILAB, {"hidden_act": "nope"}, "the head cannot be read: KeyError: 'nope'"),
        (SAFEAILAB, {"num_attention_heads": 3}, "the head cannot be read: StrictDataclass"),
        (SAFEAILAB, {"num_attention_heads": 0, "head_dim": None}, "the head cannot be read"),
        (SAFEAILAB, {"rope_theta": "x"}, "the head cannot be read"),
        (SAFEAILAB, {"rope_scaling": {"rope_type": "yarn"}}, "the head cannot be read"),
    ],
)
def test_an_unsupported_configuration_is_refused_by_name(
    name: str, config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert words in refusal(golden(name).having(config), tmp_path)


@pytest.mark.parametrize(
    ("name", "tensors", "words"),
    [
        (SAFEAILAB, {"midlayer.gate.weight": torch.zeros(2)}, "does not use: layers.0.gate.weight"),
        (SAFEAILAB, {"midlayer.self_attn.q_proj.bias": torch.zeros(16)}, "layers.0.self_attn.q_proj.bias"),
        (SAFEAILAB, {"layers.2.mlp.up_proj.weight": torch.zeros(2)}, "layers 0, 1, .."),
        (SAFEAILAB, {"norm.weight": torch.zeros(16, dtype=torch.int8)}, "norm.weight holds int8"),
        (SAFEAILAB, {"lm_head.weight": torch.zeros(9, 16)}, "[9, 16] in the file, but should have [20, 16]"),
        (SPECULATORS, {"verifier_gate.weight": torch.zeros(2)}, "verifier_gate.weight"),
        (MEDUSA, {"3.0.linear.weight": torch.zeros(16, 16)}, "tensors are missing: blocks.3.0.bias, lm_heads.3.weight"),
        (MEDUSA, {"gate": torch.zeros(16, 16)}, "does not use: gate"),
    ],
)
def test_unsuitable_tensors_are_refused_by_name(name: str, tensors: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in refusal(golden(name).having(tensors=tensors), tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    assert "layers.0.hidden_norm" not in refusal(golden(SAFEAILAB).without(["norm.weight"]), tmp_path / "norm")
    assert "missing: norm.weight" in refusal(golden(SAFEAILAB).without(["norm.weight"]), tmp_path / "norm")


def test_a_reduced_vocabulary_without_its_table_is_refused(tmp_path: Path) -> None:
    assert "drafts 20 of 32 ids" in refusal(golden(SPECULATORS).without(["d2t", "t2d"]), tmp_path)
    truncated = as_vllm(golden(MEDUSA)).having({"truncated_vocab_size": 8})
    assert "no token_map" in refusal(truncated, tmp_path / "medusa")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (TARGET._replace(hidden_size=24), "belongs to another target"),
        (TARGET._replace(vocab_size=24), "the target has only 24 ids"),
        (TARGET._replace(vocab_size=48), "embeddings cover 32 ids, but the target has 48"),
        (TARGET._replace(num_layers=3), "the target has 3 layers"),
    ],
)
def test_a_head_for_another_target_is_refused(target: TargetShape, words: str, tmp_path: Path) -> None:
    assert words in refusal(golden(SPECULATORS), tmp_path, target)


def test_a_narrower_head_needs_embeddings_of_its_own(tmp_path: Path) -> None:
    case = golden("safeailab_eagle3_wide_target").without(["embed_tokens.weight"])
    assert "it has no embeddings" in refusal(case, tmp_path, TARGET._replace(hidden_size=24))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no config.json"),
        ({"config.json": "[]"}, "not a JSON object"),
        ({"config.json": "{"}, "cannot be read: JSONDecodeError"),
        ({"config.json": "{}"}, "no weights in this directory"),
        ({"config.json": "{}", "model.safetensors": "no"}, "cannot be read"),
        ({"config.json": "{}", "pytorch_model.bin": "no"}, "cannot be read"),
    ],
)
def test_a_folder_without_a_head_is_refused(files: dict[str, str], words: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=words) as caught:
        load_head(str(tmp_path), TARGET)
    assert "\n" not in str(caught.value)


def test_a_missing_path_is_refused() -> None:
    with pytest.raises(ModelError, match="no such directory"):
        load_head("./nowhere", TARGET)


def test_other_models_are_refused(tmp_path: Path) -> None:
    case = Golden({"model_type": "llama"}, {"model.embed_tokens.weight": torch.zeros(4, 4)})
    assert "not a head in a supported format (early exit, foredraft's EAGLE-1, speculators' DFlash, " in refusal(
        case, tmp_path
    )


class Payload:
    """An object that runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("unpickled",))


def test_code_in_a_pickle_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"0.0.linear.weight": Payload()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ModelError, match="cannot be read"):
        load_head(str(tmp_path), TARGET)
    assert "unpickled" not in capsys.readouterr().out


def test_a_pickle_of_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"0.0.linear.weight": [1.0]}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ModelError, match="not a state dict"):
        load_head(str(tmp_path), TARGET)
