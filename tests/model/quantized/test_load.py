"""Quantized checkpoints as models: they have the stored numbers and the same text with every drafter, or are refused by name."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, LlamaConfig, PreTrainedModel

from foredraft.errors import ModelError
from foredraft.kernels import load_kernels, weights
from foredraft.llm import LLM
from foredraft.model import EMBEDDED, LanguageModel, LoadOptions, Read, load_model, memory
from foredraft.model.formats import open_checkpoint
from foredraft.model.library import LibraryBody
from foredraft.model.packed import NativeLinear
from foredraft.model.quantized import hub, is_stored_quantized
from foredraft.model.stack import StackBody
from foredraft.model.stored import PermutedLinear, StoredExperts, StoredLinear
from foredraft.sampling import SamplingParams
from tests.command_line import assert_refused, run
from tests.model.quantized.conftest import MakeCheckpoint
from tests.model.quantized.packers import (
    KINDS,
    gptq,
    save_mxfp4,
    save_quantized,
    save_quantized_experts,
)
from tests.model.zoo import SPECIES, random_model, saved

FLOAT32 = LoadOptions(dtype="float32", device="cpu")
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
WHOLE_BITS = ["gptq, act-order, asymmetric", "awq", "W4A16, asymmetric", "W8A8", "nf4, nested"]
"""One kind for each module that reads a format."""


def opened(path: Path, options: LoadOptions = FLOAT32) -> PreTrainedModel:
    """The model before a body takes it over."""
    checkpoint = open_checkpoint(str(path), options)
    config = checkpoint.config()
    return checkpoint.model(config, options.torch_dtype(config))


@torch.inference_mode()
def logits(model: Any) -> Tensor:
    result: Tensor = model(input_ids=IDS, use_cache=False).logits
    return result


def assert_same(path: Path, expected: PreTrainedModel) -> None:
    """Assert that the model, stored and in memory, computes what the dequantised one does."""
    assert torch.allclose(logits(opened(path)), logits(expected), atol=1e-4, rtol=1e-5)
    model = load_model(path, FLOAT32)
    assert not [module for module in model.hf.modules() if isinstance(module, StoredLinear | StoredExperts)]
    assert torch.allclose(logits(model.hf), logits(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_computes_what_its_dequantized_model_does(kind: str, quantized: MakeCheckpoint) -> None:
    assert_same(*quantized(kind))


@pytest.mark.parametrize("kind", WHOLE_BITS)
@pytest.mark.parametrize("species", ["gpt2", "qwen2", "gemma3"])
def test_other_families_compute_what_their_dequantized_models_do(
    species: str, kind: str, quantized: MakeCheckpoint
) -> None:
    """With transposed layers, biases and scaled embeddings."""
    assert_same(*quantized(kind, species))


@pytest.mark.parametrize("kind", ["gptq", *WHOLE_BITS[1:]])
@pytest.mark.parametrize("species", ["mixtral", "qwen3_moe"])
def test_a_mixtures_experts_compute_what_dequantized_ones_do(species: str, kind: str, tmp_path: Path) -> None:
    config = SPECIES[species].config()
    config.moe_intermediate_size = 64
    expected = save_quantized_experts(random_model(config), tmp_path, KINDS[kind])
    assert [module for module in opened(tmp_path).modules() if isinstance(module, StoredExperts)]
    assert_same(tmp_path, expected)


def test_the_experts_of_gpt_oss_compute_what_dequantized_ones_do(tmp_path: Path) -> None:
    config = SPECIES["gpt_oss"].config()
    expected = save_mxfp4(random_model(config), tmp_path)
    assert_same(tmp_path, expected)


def test_weights_stay_stored_until_a_body_takes_over(quantized: MakeCheckpoint) -> None:
    hf = opened(quantized("gptq")[0])
    stored = [module for module in hf.modules() if isinstance(module, StoredLinear)]
    assert len(stored) == 2 * 7
    assert {name for name, parameter in hf.named_parameters() if parameter.dim() > 1} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
    }
    assert type(hf).__name__ == "LlamaForCausalLM"
    assert stored[0].weight is None
    assert getattr(hf.config, "quantization_config", None) is None


def test_inputs_are_permuted_for_act_order(quantized: MakeCheckpoint) -> None:
    hf = opened(quantized("gptq, act-order")[0])
    assert len([module for module in hf.modules() if isinstance(module, PermutedLinear)]) == 2 * 7


@pytest.mark.parametrize("kind", WHOLE_BITS)
def test_the_text_is_plain_decodings_with_every_drafter(kind: str, quantized: MakeCheckpoint) -> None:
    path, expected = quantized(kind)
    prompt = [5, 9, 14, 3]
    plain = expected.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=0)[
        0, 4:
    ].tolist()
    params = SamplingParams(temperature=0.0, max_tokens=16)
    llm = LLM(path, path, method="none", dtype="float32", device="cpu")
    for method in ("none", "ngram", "suffix", "draft_model"):
        (output,) = llm.with_drafter(method, None if method == "none" else 3).generate(prompt, params)
        assert output.outputs[0].token_ids == plain, method


def difference(model: LanguageModel, expected: PreTrainedModel) -> float:
    """The relative difference of the median row of logits."""
    with torch.inference_mode():
        actual = model.read([Read(0, IDS[0].tolist(), IDS.shape[1])], model.scratch_cache([IDS.shape[1]]))
    rows = (actual.float() - logits(expected)[0]).norm(dim=-1) / logits(expected)[0].norm(dim=-1)
    return float(rows.median())


needs_kernels = pytest.mark.skipif(load_kernels() is None, reason="no compiled kernels on this machine")


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_the_compiled_kernels_run_stored_weights(kind: str, quantized: MakeCheckpoint) -> None:
    path, expected = quantized(kind)
    model = load_model(path, LoadOptions(dtype="bfloat16", device="cpu"))
    assert isinstance(model.body, LibraryBody if "act-order" in kind else StackBody)
    assert model.traits.row_exact
    assert difference(model, expected) < 0.05
    prompt, params = [5, 9, 14, 3], SamplingParams(temperature=0.0, max_tokens=16)
    llm = LLM(path, method="none", dtype="bfloat16", device="cpu")
    (plain,) = llm.generate(prompt, params)
    (drafted,) = llm.with_drafter("suffix", 3).generate(prompt, params)
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids


def saved_mixture(species: str, kind: str, folder: Path) -> PreTrainedModel:
    config = SPECIES[species].config()
    if kind == "mxfp4":
        return save_mxfp4(random_model(config), folder)
    config.moe_intermediate_size = 64
    return save_quantized_experts(random_model(config), folder, KINDS[kind])


@needs_kernels
@pytest.mark.parametrize(
    ("species", "kind", "layout"),
    [
        ("mixtral", "gptq", weights.INT4_GROUPS),
        ("qwen3_moe", "awq", weights.INT4_GROUPS),
        ("gpt_oss", "mxfp4", weights.LEVEL_GROUPS),
    ],
)
def test_experts_are_packed_as_they_are_stored(species: str, kind: str, layout: int, tmp_path: Path) -> None:
    expected = saved_mixture(species, kind, tmp_path)
    model = load_model(tmp_path, LoadOptions(dtype="bfloat16", device="cpu"))
    assert isinstance(model.body, StackBody)
    packed = [module for module in model.hf.modules() if isinstance(module, NativeLinear)]
    assert sum(linear.matrix.layout.kind == layout for linear in packed) >= 2 * 2 * 4
    assert difference(model, expected) < 0.05


def test_layers_excluded_from_quantization_are_loaded_unchanged(tmp_path: Path) -> None:
    skip = ("lm_head", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")
    settings = {"modules_to_not_convert": [skip[1], "layers.1.mlp.down_proj"]}
    expected = save_quantized(random_model(SPECIES["llama"].config()), tmp_path, KINDS["awq"], skip=skip, **settings)
    hf = opened(tmp_path)
    assert type(hf.get_submodule(skip[1])) is nn.Linear
    assert_same(tmp_path, expected)


def test_a_quantized_lm_head_is_not_tied_to_the_embedding(tmp_path: Path) -> None:
    expected = save_quantized(random_model(SPECIES["llama"].config()), tmp_path, gptq(), skip=())
    edit(tmp_path, tie_word_embeddings=True)
    assert isinstance(opened(tmp_path).lm_head, StoredLinear)
    assert_same(tmp_path, expected)


def test_biases_that_a_model_does_not_have_are_ignored_if_zero_else_added(tmp_path: Path) -> None:
    """Old quantizers write a bias for every layer."""
    expected = save_quantized(random_model(SPECIES["llama"].config()), tmp_path, gptq(act_order=True))
    zero, other = "model.layers.0.self_attn.k_proj", "model.layers.0.mlp.up_proj"
    bias = torch.linspace(-1, 1, 96)
    change(tmp_path, lambda state: state.update({f"{zero}.bias": torch.zeros(32), f"{other}.bias": bias}))
    expected.get_submodule(other).bias = nn.Parameter(bias)
    assert opened(tmp_path).get_submodule(zero).linear.bias is None
    assert_same(tmp_path, expected)


def test_shards_are_read_by_their_index(quantized: MakeCheckpoint, tmp_path: Path) -> None:
    path, expected = quantized("gptq")
    copy = sharded(path, tmp_path)
    assert not (copy / "model.safetensors").exists()
    assert_same(copy, expected)


def test_the_checkpoints_generation_settings_are_kept(quantized: MakeCheckpoint, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(quantized("gptq")[0], tmp_path / "copy"))
    GenerationConfig(do_sample=True, temperature=0.25, eos_token_id=7).save_pretrained(copy)
    config = opened(copy).generation_config
    assert (config.temperature, config.eos_token_id) == (0.25, 7)


def test_a_hub_id_is_fetched_at_its_revision(quantized: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    path, expected = quantized("gptq")
    calls = []

    def snapshot_download(name: str, **kwargs: Any) -> str:
        calls.append((name, kwargs))
        return str(path)

    from_pretrained = AutoConfig.from_pretrained
    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda name, **_: from_pretrained(path))
    model = load_model("someone/some-model", LoadOptions(dtype="float32", device="cpu", revision="v2"))
    assert torch.allclose(logits(model.hf), logits(expected), atol=1e-5)
    ((name, kwargs),) = calls
    assert (name, kwargs["revision"]) == ("someone/some-model", "v2")


def test_an_unreachable_hub_is_reported(quantized: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = quantized("gptq")
    config = AutoConfig.from_pretrained(path)

    def fail(name: str, **_: Any) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(hub, "snapshot_download", fail)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda name, **_: config)
    with pytest.raises(
        ModelError, match="someone/some-model: no directory here has that name, the cache does not hold"
    ):
        load_model("someone/some-model", FLOAT32)


def test_on_a_gpu_and_for_other_formats_transformers_loads() -> None:
    def config(method: str) -> LlamaConfig:
        return LlamaConfig(quantization_config={"quant_method": method})

    assert is_stored_quantized(config("gptq"), torch.device("cpu"))
    assert not is_stored_quantized(config("gptq"), torch.device("cuda"))
    assert not is_stored_quantized(config("torchao"), torch.device("cpu"))
    assert not is_stored_quantized(LlamaConfig(), torch.device("cpu"))


# Refusals

Q_PROJ = "model.layers.0.self_attn.q_proj"


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change(directory: Path, spoil: Callable[[dict[str, Tensor]], object]) -> None:
    state = load_file(directory / "model.safetensors")
    spoil(state)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


def sharded(path: Path, directory: Path) -> Path:
    """A copy of a checkpoint in two files."""
    copy = Path(shutil.copytree(path, directory / "sharded"))
    state = load_file(copy / "model.safetensors")
    names = sorted(state)
    files = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: state[name] for name in names if files[name] == file}, copy / file, metadata={"format": "pt"})
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (copy / "model.safetensors").unlink()
    return copy


SPOILT: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "a missing tensor": (lambda state: state.pop(f"{Q_PROJ}.scales"), f"{Q_PROJ}.scales is missing"),
    "a lying shape": (
        lambda state: state.update({f"{Q_PROJ}.qweight": state[f"{Q_PROJ}.qweight"][:, :-1].contiguous()}),
        f"{Q_PROJ}.qweight is [8, 63] I32 in the file but should be [8, 64] I32",
    ),
    "a lying type": (
        lambda state: state.update({f"{Q_PROJ}.qweight": state[f"{Q_PROJ}.qweight"].float()}),
        f"{Q_PROJ}.qweight is [8, 64] F32",
    ),
    "groups that nobody has": (
        lambda state: state.update({f"{Q_PROJ}.g_idx": torch.zeros(64, dtype=torch.int32)}),
        f"{Q_PROJ}: its g_idx does not assign 32 inputs to each of 2 groups",
    ),
    "an unknown tensor": (
        lambda state: state.update({f"{Q_PROJ}.perm": torch.arange(64)}),
        f"{Q_PROJ}.perm (I64) is neither part of its quantization format nor a weight of the model",
    ),
    "an unknown number": (
        lambda state: state.update({f"{Q_PROJ}.input_scale": torch.ones(1)}),
        f"{Q_PROJ}.input_scale (F32) is neither part of its quantization format",
    ),
    "an unknown layer": (
        lambda state: state.update({"model.layers.9.mlp.qweight": torch.zeros(1, dtype=torch.int32)}),
        "model.layers.9.mlp.weight is quantized, but the model that config.json describes has no such weight",
    ),
    "an embedding": (
        lambda state: state.update({"model.embed_tokens.qweight": torch.zeros(1, dtype=torch.int32)}),
        "belongs to a Embedding; only linear layers and experts may be quantized",
    ),
    "a missing norm": (lambda state: state.pop("model.norm.weight"), "the checkpoint lacks 1 of the model's weights"),
    "no quantized layer": (
        lambda state: [state.pop(name) for name in list(state) if "layers" in name],
        "no weight in the files is quantized",
    ),
}


@pytest.fixture
def copied(quantized: MakeCheckpoint, tmp_path: Path) -> Path:
    """A checkpoint in GPTQ for a test to damage."""
    return Path(shutil.copytree(quantized("gptq")[0], tmp_path / "copy"))


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(path, FLOAT32)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message


@pytest.mark.parametrize("what", SPOILT)
def test_a_damaged_checkpoint_is_refused_by_name(what: str, copied: Path) -> None:
    spoil, reason = SPOILT[what]
    change(copied, spoil)
    assert reason in refusal(copied)


def test_a_layer_that_the_settings_exclude_is_refused(quantized: MakeCheckpoint, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(quantized("awq")[0], tmp_path / "copy"))
    edit(copy, quantization_config=KINDS["awq"].settings | {"modules_to_not_convert": ["q_proj"]})
    assert f"{Q_PROJ} is quantized, but quantization_config lists it among those that are not" in refusal(copy)


def test_a_truncated_file_is_refused(copied: Path) -> None:
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors cannot be read" in refusal(copied)


def test_weights_that_are_not_safetensors_are_refused(copied: Path) -> None:
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    assert "model.safetensors is missing: quantized weights are read from safetensors files" in refusal(copied)


def test_an_incomplete_set_of_shards_is_refused(quantized: MakeCheckpoint, tmp_path: Path) -> None:
    copy = sharded(quantized("gptq")[0], tmp_path)
    shards = sorted(copy.glob("*.safetensors"))
    shutil.copy(shards[0], shards[1])
    assert "model-00002-of-00002.safetensors lacks" in refusal(copy)
    shards[1].unlink()
    assert "model-00002-of-00002.safetensors is missing" in refusal(copy)
    (copy / "model.safetensors.index.json").write_text("[]")
    assert "model.safetensors.index.json is not an index of tensors" in refusal(copy)


def test_the_command_line_refuses_in_one_line(copied: Path) -> None:
    change(copied, SPOILT["a missing tensor"][0])
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / "target" / file, copied)
    assert_refused(run("inspect", "--model", copied, "--device", "cpu"), f"{Q_PROJ}.scales is missing")


def test_weights_that_do_not_fit_once_dequantized_are_refused(
    quantized: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = quantized("gptq")
    monkeypatch.setattr(memory, "available_memory", lambda device: 150_000)
    with pytest.raises(ModelError, match=r"its quantized weights take .* in float32, but only .* are free"):
        load_model(path, FLOAT32)


def test_a_quantized_checkpoint_can_be_inspected(quantized: MakeCheckpoint, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        result = run("inspect", "--model", quantized("W8A8")[0], "--device", "cpu", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["target"]["measured"]["weight_bytes"] > 0


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantized_checkpoint_is_not_quantized_again(quantization: str, quantized: MakeCheckpoint) -> None:
    directory, _ = quantized("gptq")
    with pytest.raises(
        ModelError, match=rf"quantized already \(gptq\).* rounded to {quantization}; leave quantization"
    ):
        load_model(directory, LoadOptions(quantization=quantization))


def test_a_draft_keeps_its_own_precision_unless_another_is_given(quantized: MakeCheckpoint, tmp_path: Path) -> None:
    draft, _ = quantized("gptq")
    target = saved(SPECIES["llama"].config(), tmp_path / "target")
    llm = LLM(target, draft, quantization="int8")
    assert (llm.options.quantization, llm.draft_options.quantization) == ("int8", None)
    with pytest.raises(ModelError, match="quantized already"):
        LLM(target, draft, draft_quantization="int4")


@pytest.mark.parametrize("method", ["self-int8", "self-int4"])
def test_a_quantized_target_makes_no_quantized_copy_of_itself(method: str, quantized: MakeCheckpoint) -> None:
    directory, _ = quantized("gptq")
    with pytest.raises(ModelError, match=f"{method} drafts with a rounded copy of the target"):
        LLM(directory, method=method)
