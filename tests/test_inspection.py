"""What inspect promises before anything is loaded must be what loading finds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from foredraft import ModelError
from foredraft.inspection import inspect_models
from foredraft.model import EMBEDDED, LoadOptions
from foredraft.model.packed import packs

TARGET, DRAFT = EMBEDDED / "target", EMBEDDED / "draft"
BABYLLAMA = Path(__file__).parents[2] / "shared" / "models" / "babyllama105"

# architectures whose cache or vocabulary is unlike the plain case: grouped heads, sliding windows, routed experts,
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
def test_prediction_is_what_loading_finds(path: Path) -> None:
    report = inspect_models(path, None, LoadOptions(device="cpu")).target
    assert report.measured == report.predicted
    head = 4096 * 256 * 2 if packs(torch.bfloat16, torch.device("cpu")) else 0  # tied to the embedding in the file
    on_disk = (path / "model.safetensors").stat().st_size
    assert report.predicted.weight_bytes == pytest.approx(on_disk + head, rel=0.01)


@pytest.mark.parametrize("kind", SHAPES)
def test_prediction_on_other_architectures(kind: str, tmp_path: Path) -> None:
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


def test_prediction_needs_no_weights(tmp_path: Path) -> None:
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


def test_another_vocabulary_does_not_fit_and_is_not_loaded() -> None:
    if not BABYLLAMA.is_dir():
        pytest.skip("needs ../shared/models/babyllama105, a draft of another vocabulary")
    found = inspect_models(TARGET, BABYLLAMA, LoadOptions(device="cpu"))
    assert not found.fits
    assert "105 tokens against 4096" in str(found.reason)
    assert found.target.measured is None


def test_what_is_bigger_than_memory_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.inspection.available_memory", lambda device: 18 * 2**20)
    assert inspect_models(TARGET, None, LoadOptions(device="cpu"), load=False).fits
    found = inspect_models(TARGET, DRAFT, LoadOptions(device="cpu"))
    assert not found.fits
    assert "free" in str(found.reason)
    assert found.target.measured is None


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        inspect_models(tmp_path / "nothing", None, LoadOptions(device="cpu"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError):
        inspect_models(tmp_path, None, LoadOptions(device="cpu"))
