"""What inspect predicts before loading must be what loading finds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from foredraft import ModelError
from foredraft.cli.render.inspection import inspection_lines
from foredraft.engine.cache import KVCache
from foredraft.engine.memory_pool import MemoryPool
from foredraft.heads import MedusaConfig, head_format
from foredraft.heads.quantized import quantize_head
from foredraft.kernels import load_kernels
from foredraft.model import EMBEDDED, LoadOptions
from foredraft.model.packed import packs
from foredraft.tools.inspection import inspect_models
from foredraft.tools.inspection.heads import coverage_of
from foredraft.utils.machine import process_memory
from tests.heads.mtp_targets import saved
from tests.heads.random_heads import HEAD_METHODS, embedded_head
from tests.vocabulary.permuted import permuted_draft

TARGET, DRAFT = EMBEDDED / "target", EMBEDDED / "draft"

# architectures with an unusual cache or vocabulary: grouped heads, sliding windows, routed experts,
# latent attention, an odd head size
SHAPES = {
    "llama": {"num_key_value_heads": 2},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 8},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1},
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1, "moe_intermediate_size": 32,
    },
}  # fmt: skip


def test_the_embedded_pair_fits() -> None:
    found = inspect_models(TARGET, DRAFT, LoadOptions(device="cpu"))
    assert found.fits
    assert found.reason is None
    assert found.draft is not None
    assert found.target.num_tokens == found.draft.num_tokens == 4096
    assert found.memory.cache_bytes_per_token == 8192 + 1024
    assert found.memory.full_context_bytes == (8192 + 1024) * 2048
    assert json.loads(json.dumps(found.as_dict()))["target"]["context_len"] == 2048


@pytest.mark.parametrize("path", [TARGET, DRAFT], ids=["target", "draft"])
def test_predictions_are_what_loading_finds(path: Path) -> None:
    report = inspect_models(path, None, LoadOptions(device="cpu")).target
    assert report.measured is not None
    assert report.measured.cache_bytes_per_token == report.predicted.cache_bytes_per_token
    # norms may be stored in another dtype, in addition to the model
    assert report.measured.weight_bytes == pytest.approx(report.predicted.weight_bytes, rel=1e-3)
    is_compiled = load_kernels() is not None
    is_apart = path == TARGET and packs(torch.bfloat16, torch.device("cpu"), is_compiled=is_compiled)
    head = 4096 * 256 * 2 if is_apart else 0  # the target's lm_head is tied to the embedding in the file
    on_disk = (path / "model.safetensors").stat().st_size
    assert report.predicted.weight_bytes == pytest.approx(on_disk + head, rel=0.01)


@pytest.mark.parametrize("kind", SHAPES)
def test_predictions_for_other_architectures_are_what_loading_finds(kind: str, tmp_path: Path) -> None:
    small = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
             "num_attention_heads": 4, "max_position_embeddings": 128}  # fmt: skip
    shape = ({"vocab_size": 96} if kind == "gpt2" else small) | SHAPES[kind]
    config = AutoConfig.for_model(kind, bos_token_id=0, eos_token_id=1, pad_token_id=2, **shape)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    report = inspect_models(tmp_path, None, LoadOptions(device="cpu")).target
    assert report.measured is not None
    assert report.predicted == report.measured
    assert report.logit_width == 96
    assert sum(report.attention.values()) == 3


def test_without_loading_nothing_is_measured() -> None:
    found = inspect_models(TARGET, DRAFT, LoadOptions(device="cpu"), load=False)
    assert found.fits
    assert found.target.measured is None
    assert found.target.row_exact is None
    assert found.target.logit_width == 4096
    assert "unknown" in found.exactness


def test_predictions_need_no_weights(tmp_path: Path) -> None:
    shutil.copy(TARGET / "config.json", tmp_path)
    report = inspect_models(tmp_path, None, LoadOptions(device="cpu"), load=False).target
    assert report.predicted == inspect_models(TARGET, None, LoadOptions(device="cpu"), load=False).target.predicted


def test_float32_is_promised_up_to_near_ties_only() -> None:
    found = inspect_models(DRAFT, None, LoadOptions(dtype="float32", device="cpu"))
    assert found.target.row_exact is False
    assert "0.0001" in found.exactness


def test_sliding_windows_are_named(tmp_path: Path) -> None:
    shape = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "sliding_window": 8}
    AutoConfig.for_model("gemma2", **shape).save_pretrained(tmp_path)
    report = inspect_models(tmp_path, None, LoadOptions(device="cpu"), load=False).target
    assert report.attention == {"sliding (8)": 2, "full": 2}


def test_with_heterogeneous_vocab_none_another_vocabulary_does_not_fit() -> None:
    found = inspect_models(TARGET, permuted_draft(), LoadOptions(device="cpu"), heterogeneous_vocab="none")
    assert not found.fits
    assert "the draft model's vocabulary differs from the target's" in str(found.reason)
    assert found.vocabularies is None
    assert found.target.measured is None


def test_two_vocabularies_are_compared_without_the_weights(tmp_path: Path) -> None:
    for file in permuted_draft().iterdir():
        if file.suffix == ".json":
            shutil.copy(file, tmp_path)
    found = inspect_models(TARGET, tmp_path, LoadOptions(device="cpu"), load=False).vocabularies
    assert found is not None
    assert (found.method, found.agreement, found.text, found.is_chosen) == ("tli", 1.0, "built-in", True)
    assert found.target_bytes_per_id == found.draft_bytes_per_id
    options = LoadOptions(device="cpu")
    forced = inspect_models(TARGET, tmp_path, options, load=False, heterogeneous_vocab="slem", text="a b").vocabularies
    assert forced is not None
    assert (forced.method, forced.text, forced.is_chosen) == ("slem", "given", False)


def test_one_vocabulary_is_the_same_and_agrees_with_itself() -> None:
    found = inspect_models(TARGET, DRAFT, LoadOptions(device="cpu"), load=False).vocabularies
    assert found is not None
    assert (found.method, found.agreement) == ("same", 1.0)
    assert inspect_models(TARGET, None, LoadOptions(device="cpu"), load=False).vocabularies is None


def test_a_model_larger_than_memory_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.tools.inspection.memory.available_memory", lambda device: 18 * 2**20)
    assert inspect_models(TARGET, None, LoadOptions(device="cpu"), load=False).fits
    found = inspect_models(TARGET, DRAFT, LoadOptions(device="cpu"))
    assert not found.fits
    assert "free" in str(found.reason)
    assert found.target.measured is None


def test_unusable_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        inspect_models(tmp_path / "nothing", None, LoadOptions(device="cpu"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError):
        inspect_models(tmp_path, None, LoadOptions(device="cpu"))


def test_int8_is_predicted_from_the_shapes() -> None:
    """A byte per weight and eight per output, in every linear layer and in the lm_head's own copy; the rest in bfloat16."""
    config = json.loads((TARGET / "config.json").read_text())
    hidden, wide, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    # (outputs, inputs)
    layer = [
        (hidden, hidden),
        (keys, hidden),
        (keys, hidden),
        (hidden, hidden),
        (wide, hidden),
        (wide, hidden),
        (hidden, wide),
    ]
    matrices = [*layer * config["num_hidden_layers"], (vocab, hidden)]
    rest = vocab * hidden + (2 * config["num_hidden_layers"] + 1) * hidden
    expected = sum(n * k + 8 * n for n, k in matrices) + 2 * rest
    for dtype in ("bfloat16", "float32"):  # the dtype of the file is not that in memory
        options = LoadOptions(dtype=dtype, device="cpu", quantization="int8")
        report = inspect_models(TARGET, None, options, load=False).target
        assert report.predicted.weight_bytes == pytest.approx(expected, rel=1e-4)  # and rotary frequencies
        assert (report.dtype, report.quantization) == ("bfloat16", "int8")
        assert report.predicted.cache_bytes_per_token == 8192


@pytest.mark.parametrize("quantization", ["int8", "int4", "int4-all"])
def test_predicted_quantized_weights_are_what_loading_finds(quantization: str) -> None:
    report = inspect_models(TARGET, None, LoadOptions(device="cpu", quantization=quantization)).target
    assert report.measured is not None
    assert report.measured.weight_bytes == pytest.approx(report.predicted.weight_bytes, rel=1e-2)
    assert report.measured.cache_bytes_per_token == report.predicted.cache_bytes_per_token


def test_the_peak_is_process_weights_and_a_growing_cache() -> None:
    found = inspect_models(TARGET, DRAFT, LoadOptions(device="cpu"), load=False)
    memory, process = found.memory, process_memory()
    assert memory.weight_bytes is not None
    assert process is not None
    assert memory.process_bytes == pytest.approx(process.resident, rel=0.2)
    # when the cache grows from half the context to all of it, both copies exist while it is copied
    assert memory.peak_bytes == memory.process_bytes + memory.weight_bytes + (8192 + 1024) * (2048 + 1024)


@pytest.mark.parametrize("context_len", [512, 1100, 2048])
def test_a_cache_grows_as_predicted(context_len: int, tmp_path: Path) -> None:
    shape = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    AutoConfig.for_model("llama", **shape, max_position_embeddings=context_len).save_pretrained(tmp_path)
    found = inspect_models(tmp_path, None, LoadOptions(dtype="float32", device="cpu"), load=False)
    memory = found.memory
    cache = KVCache(MemoryPool(1 << 40), memory.cache_bytes_per_token, context_len)
    most, held = 0, 0
    for length in range(1, context_len + 1):
        cache.reserve(0, length)
        if cache.bytes_held != held:
            most, held = max(most, held + cache.bytes_held), cache.bytes_held
    predicted = memory.peak_bytes - memory.process_bytes - memory.weight_bytes
    assert predicted == pytest.approx(most, rel=0.05)  # a context is rounded up to a multiple of 64


def test_the_peak_while_converting_includes_the_file() -> None:
    same = inspect_models(DRAFT, None, LoadOptions(dtype="bfloat16", device="cpu"), load=False).target
    wide = inspect_models(DRAFT, None, LoadOptions(dtype="float32", device="cpu"), load=False).target
    file = (DRAFT / "model.safetensors").stat().st_size
    assert wide.load_bytes == pytest.approx(3 * file, rel=0.02)
    # at the end the lm_head, which is wider than a layer, exists in both forms
    assert same.load_bytes == pytest.approx(same.predicted.weight_bytes + 4096 * 256 * 2, rel=0.02)


def test_gate_and_up_exist_in_both_forms_while_they_are_packed(tmp_path: Path) -> None:
    """In addition to the layers that are already packed. In int8 what was read before takes more."""
    hidden, wide = 64, 1024
    shape = {"vocab_size": 96, "hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": 3}
    AutoConfig.for_model("llama", **shape, num_attention_heads=4).save_pretrained(tmp_path)
    head, gate_and_up, down = 96 * hidden, 2 * hidden * wide, hidden * wide
    for quantization, more in ((None, 2 * (gate_and_up - down - head)), ("int8", 0)):
        options = LoadOptions(dtype="bfloat16", device="cpu", quantization=quantization)
        report = inspect_models(tmp_path, None, options, load=False).target
        file = 2 * report.num_parameters
        if load_kernels() is not None or quantization:
            assert report.load_bytes == pytest.approx(file + more, rel=0.04)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("method", HEAD_METHODS)
def test_predictions_for_a_head_are_what_loading_finds(method: str, quantization: str | None) -> None:
    options = LoadOptions(dtype="bfloat16", device="cpu", quantization=quantization)
    found = inspect_models(TARGET, embedded_head(method), options)
    head = found.head
    assert head is not None
    assert found.draft is None
    assert head.measured is not None
    assert head.measured.weight_bytes == pytest.approx(head.predicted.weight_bytes, rel=1e-3)
    assert head.measured.cache_bytes_per_token == head.predicted.cache_bytes_per_token
    assert found.memory.cache_bytes_per_token == 8192 + head.predicted.cache_bytes_per_token
    assert found.memory.weight_bytes == found.target.measured.weight_bytes + head.measured.weight_bytes


@pytest.mark.skipif(load_kernels() is None, reason="only the kernels round a head")
@pytest.mark.parametrize(("large_head", "precision"), [(100_000, "int4"), (100_000_000, "int8")])
def test_a_rounded_head_is_predicted_in_the_precision_of_its_size(
    large_head: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_format, "LARGE_HEAD", large_head)
    head = inspect_models(TARGET, embedded_head("eagle"), LoadOptions(device="cpu", quantization="int8")).head
    assert head is not None
    assert head.measured is not None
    assert head.precision == precision
    assert head.measured.weight_bytes == pytest.approx(head.predicted.weight_bytes, rel=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_head_in_eight_bits_is_predicted_as_it_runs(dtype: str, tmp_path: Path) -> None:
    """In int8 by the kernels, if the target is in bfloat16."""
    head = tmp_path / "head"
    shutil.copytree(EMBEDDED / "head", head)
    quantize_head(head)
    found = inspect_models(TARGET, head, LoadOptions(dtype=dtype, device="cpu")).head
    assert found is not None
    assert found.measured is not None
    assert found.measured.weight_bytes == pytest.approx(found.predicted.weight_bytes, rel=1e-3)


def test_a_head_is_described_from_its_files() -> None:
    found = inspect_models(TARGET, embedded_head("eagle"), LoadOptions(device="cpu"), load=False, text="def add(a, b):")
    head, width = found.head, 256
    assert head is not None
    assert (head.kind, head.form, head.num_layers) == ("eagle3", "SafeAILab EAGLE-3", 1)
    assert head.reads == ["input of layer 2", "input of layer 4", "input of layer 5"]
    assert (head.draft_vocab_size, head.vocab_size, head.borrows) == (1024, 4096, ["embeddings"])
    assert head.open_settings["norm_before_residual"] == [False, True]
    assert head.feature_bytes_per_token == 3 * width * 2
    # queries, keys and values of 2 * width; two key-value heads; and an MLP of 2 * width
    keys = head.own_cache_bytes_per_token // 4
    layer = width * 2 * width + 2 * keys * 2 * width + width * width + 3 * 2 * width * width
    assert head.step_bytes["bfloat16"] == 2 * (layer + 1024 * width)
    assert head.step_bytes["int8"] == pytest.approx(layer + 1024 * width, rel=0.05)
    assert head.step_bytes["int4"] == (layer + 1024 * width) * (1 / 2 + 2 / 32)  # with a float16 scale for 32 inputs
    assert head.target_pass_bytes == found.target.pass_bytes
    assert head.step_share("bfloat16") == head.step_bytes["bfloat16"] / found.target.pass_bytes["bfloat16"]
    json.dumps(found.as_dict())


def test_mtp_layers_of_a_target_are_reported() -> None:
    options = LoadOptions(device="cpu")
    for folder, count in ((saved("glm"), 1), (saved("deepseek", 3), 3), (TARGET, 0)):
        found = inspect_models(folder, None, options, load=False)
        assert found.target.num_mtp_layers == count
        lines = [line for line in inspection_lines(found) if line.startswith("MTP layers")]
        drafts = {0: [], 1: ["it"], 3: ["them"]}[count]
        assert lines == [
            f"MTP layers: {count} in the target's checkpoint; --method mtp drafts with {it}" for it in drafts
        ]


def test_a_medusa_draft_reads_every_lm_head() -> None:
    head = inspect_models(TARGET, embedded_head("medusa"), LoadOptions(device="cpu"), load=False).head
    assert head is not None
    assert head.step_bytes["bfloat16"] == 4 * 2 * (256 * 256 + 4096 * 256)
    assert head.own_cache_bytes_per_token == 0


def test_the_covered_share_of_a_text_is_that_of_ids_in_the_heads_vocabulary() -> None:
    ids = torch.tensor([0, 3, 7])
    config = MedusaConfig(
        num_heads=1, target_hidden_size=8, vocab_size=9, draft_vocab_size=3, target_ids=ids, owns_lm_head=True
    )
    assert coverage_of(config, [0, 3, 4, 7, 7]) == 0.8
    assert coverage_of(replace(config, target_ids=None), [0, 1, 2, 3]) == 0.75
    assert coverage_of(config, []) is None


def test_a_pass_reads_every_matrix_once() -> None:
    report = inspect_models(TARGET, None, LoadOptions(device="cpu"), load=False).target
    assert report.pass_bytes is not None
    # all weights except the norms; the embedding is read as the lm_head
    assert report.pass_bytes["bfloat16"] == pytest.approx(2 * report.num_parameters, rel=1e-3)
    num_in_lm_head = 4096 * 256  # which keeps eight bits
    expected = num_in_lm_head + (report.num_parameters - num_in_lm_head) * (1 / 2 + 2 / 32)
    assert report.pass_bytes["int4"] == pytest.approx(expected, rel=0.01)


# The peak since this program started. ru_maxrss would also count what its parent held at the fork.
MEASURE = """
import sys
from foredraft import LLM, SamplingParams
llm = LLM(sys.argv[1], method="none", device="cpu", num_threads=1, dtype=sys.argv[2], quantization=sys.argv[3] or None)
params = SamplingParams(max_tokens=500, temperature=0, ignore_eos=True)
assert len(llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids) == 500
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def python(*args: str | Path) -> str:
    """The output of a new interpreter."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, args)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of 230 MB in bfloat16, with few and wide layers and a context of 512 tokens."""
    path = tmp_path_factory.mktemp("checkpoint")
    config = AutoConfig.for_model(
        "llama", vocab_size=4096, hidden_size=1024, intermediate_size=8192, num_hidden_layers=4, num_attention_heads=8,
        max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DRAFT / name, path)
    assert (path / "model.safetensors").stat().st_size > 200e6
    return path


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says what a process held at its peak")
@pytest.mark.parametrize(("dtype", "quantization"), [("auto", ""), ("auto", "int8"), ("float32", "")])
def test_the_peak_is_what_a_process_reaches(checkpoint: Path, dtype: str, quantization: str) -> None:
    options = ["--dtype", dtype, *(["--quantization", quantization] if quantization else [])]
    inspect = ("inspect", "--model", checkpoint, "--device", "cpu", "--no-load", "--json")
    predicted: dict[str, Any] = json.loads(python("-m", "foredraft.cli", *inspect, *options))["memory"]
    measured = 1024 * int(python("-c", MEASURE, checkpoint, dtype, quantization))
    assert predicted["peak_bytes"] == pytest.approx(measured, rel=0.06)
