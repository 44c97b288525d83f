"""Heads stored in eight bits are unchanged except for the quantisation of their matrices."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft import LLM, SamplingParams
from foredraft.errors import ModelError
from foredraft.heads import MedusaHead, load_head
from foredraft.heads.quantized import quantize_head
from foredraft.heads.saving import save_eagle3, save_medusa
from foredraft.kernels import load_kernels, quantize_int8
from foredraft.model import EMBEDDED
from tests.heads.checkpoints import TARGET, golden
from tests.heads.test_eagle import head_of


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """An EAGLE-3 head with two layers and a reduced vocabulary."""
    head = head_of("speculators_two_layers", tmp_path / "given")
    save_eagle3(head, tmp_path / "saved", "target", ["LlamaForCausalLM"], torch.float32)
    return tmp_path / "saved"


def test_only_matrices_are_quantized(saved: Path) -> None:
    before = load_head(str(saved), TARGET)
    quantize_head(saved)
    after = load_head(str(saved), TARGET)
    assert after.config == before.config
    assert after.tensors.keys() == before.tensors.keys()
    for name, weight in before.tensors.items():
        is_rounded = weight.dim() == 2 and "embed" not in name
        assert torch.equal(after.tensors[name], quantize_int8(weight).dequantized() if is_rounded else weight)


def test_a_matrix_takes_one_byte_per_weight(saved: Path) -> None:
    quantize_head(saved)
    stored = load_file(saved / "model.safetensors")
    assert stored["fc.weight"].dtype == torch.int8
    assert stored["fc.weight_scale"].shape == (len(stored["fc.weight"]), 1)
    scheme = json.loads((saved / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert scheme["weights"]["num_bits"] == 8


def test_other_kinds_of_heads_are_quantized_too(tmp_path: Path) -> None:
    given = load_head(str(golden("medusa").save(tmp_path / "given", "medusa_lm_head.pt")), TARGET)
    head = MedusaHead.of(given, lambda _: torch.empty(0))
    save_medusa(head, tmp_path / "saved", "target", torch.float32)
    quantize_head(tmp_path / "saved")
    for name, weight in load_head(str(tmp_path / "saved"), TARGET).tensors.items():
        given_weight = given.tensors[name]
        assert torch.equal(weight, quantize_int8(given_weight).dequantized() if weight.dim() == 2 else given_weight)


@pytest.mark.skipif(load_kernels() is None, reason="no compiled kernels here")
def test_quantized_heads_run_in_eight_bits(tmp_path: Path) -> None:
    """Also with a target that is not quantised, whose texts do not change."""
    head = tmp_path / "head"
    shutil.copytree(EMBEDDED / "head", head)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    identities, texts = [], []
    for _ in range(2):
        llm = LLM(EMBEDDED / "target", head, dtype="bfloat16", num_threads=1, speculative_tokens=3)
        identities.append(llm.head_identity)
        texts.append(llm.generate("def add(a, b):", params)[0].outputs[0].token_ids)
        if len(texts) == 1:
            quantize_head(head)
    assert [identity.quantization for identity in identities if identity is not None] == [None, "int8"]
    assert texts[0] == texts[1] == llm.with_drafter("none").generate("def add(a, b):", params)[0].outputs[0].token_ids


def test_other_quantizations_are_refused_in_one_line(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ModelError, match="quant_method is 'gptq'; supported: compressed-tensors") as refused:
        load_head(str(saved), TARGET)
    assert "\n" not in str(refused.value)


def test_a_missing_scale_is_named(saved: Path) -> None:
    quantize_head(saved)
    stored = load_file(saved / "model.safetensors")
    del stored["fc.weight_scale"]
    save_file(stored, saved / "model.safetensors")
    with pytest.raises(ModelError, match=r"fc\.weight_scale is missing"):
        load_head(str(saved), TARGET)
