"""Medusa heads compared with the original program, in each form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft.heads import HeadCheckpoint, MedusaConfig, MedusaHead, load_head
from foredraft.kernels import WeightFormat, dequantized, load_kernels, quantize_int4, quantize_int8, unquantized
from tests.heads.checkpoints import TARGET, Golden, golden
from tests.heads.formats.medusa_forms import as_joint, as_vllm

NAMES = ["medusa", "medusa_two_blocks"]


def checkpoint_of(case: Golden, folder: Path, form: str) -> HeadCheckpoint:
    if form == "vllm":
        return load_head(str(as_vllm(case).save(folder)), TARGET)
    if form == "joint":
        return load_head(str(as_joint(case).save(folder)), TARGET)
    return load_head(str(case.save(folder, form)), TARGET)


@pytest.mark.parametrize("form", ["medusa_lm_head.pt", "medusa_lm_head.safetensors", "vllm", "joint"])
@pytest.mark.parametrize("name", NAMES)
def test_states_and_logits_are_those_of_the_original_program(name: str, form: str, tmp_path: Path) -> None:
    case = golden(name)
    checkpoint = checkpoint_of(case, tmp_path, form)
    heads = MedusaHead.of(checkpoint, _none)
    hidden = case.inputs["hidden"]
    torch.testing.assert_close(heads.states(hidden), case.expected["states"], atol=1e-4, rtol=0)
    logits = heads(hidden)
    torch.testing.assert_close(logits, case.expected["logits"], atol=1e-4, rtol=0)
    assert heads.on_target(logits[-1]).argmax(-1).tolist() == case.expected["drafted"].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_of_heads_and_blocks_are_those_of_the_weights(name: str, tmp_path: Path) -> None:
    """The configuration says two heads, as published ones do, but there are three."""
    config = checkpoint_of(golden(name), tmp_path, "medusa_lm_head.pt").config
    assert isinstance(config, MedusaConfig)
    assert (config.num_heads, config.num_blocks) == (3, 1 + (name == "medusa_two_blocks"))


def test_a_reduced_vocabulary_drafts_the_ids_of_its_token_map(tmp_path: Path) -> None:
    """vLLM's token_map has ids in any order, and lm_heads of the whole vocabulary are cut to them."""
    case = golden("medusa")
    token_map = torch.tensor([5, 30, 2, 17])
    reduced = as_vllm(case).having({"truncated_vocab_size": 4}, {"token_map": token_map})
    heads = MedusaHead.of(load_head(str(reduced.save(tmp_path)), TARGET), _none)
    logits = heads(case.inputs["hidden"])
    torch.testing.assert_close(logits, case.expected["logits"][..., token_map], atol=1e-4, rtol=0)
    whole = heads.on_target(logits[-1])
    assert torch.equal(whole[:, token_map], logits[-1])
    assert int(whole.isfinite().sum()) == logits[-1].numel()


def test_one_lm_head_may_be_shared_by_all_heads(tmp_path: Path) -> None:
    """vLLM's original_lm_head, from the file or else from the target."""
    case = as_vllm(golden("medusa"))
    weight = case.tensors["lm_heads.0.weight"].float()
    others = ["lm_heads.1.weight", "lm_heads.2.weight"]
    expected = golden("medusa").expected["states"] @ weight.T
    shared = case.having({"original_lm_head": True}).without(others)
    owning = MedusaHead.of(load_head(str(shared.save(tmp_path / "own")), TARGET), _none)
    borrowed = case.without(["lm_heads.0.weight", *others])
    borrowing = MedusaHead.of(load_head(str(borrowed.save(tmp_path / "target")), TARGET), lambda x: x @ weight.T)
    for heads in (owning, borrowing):
        torch.testing.assert_close(heads(case.inputs["hidden"]), expected, atol=1e-4, rtol=0)


def test_logits_are_scaled_as_the_file_says(tmp_path: Path) -> None:
    case = as_vllm(golden("medusa")).having({"logit_scale": 0.5})
    heads = MedusaHead.of(load_head(str(case.save(tmp_path)), TARGET), _none)
    torch.testing.assert_close(heads(case.inputs["hidden"]), case.expected["logits"] / 2, atol=1e-4, rtol=0)


@pytest.mark.skipif(load_kernels() is None, reason="no compiled kernels here")
@pytest.mark.parametrize("weight_format", [unquantized, quantize_int8, quantize_int4])
@pytest.mark.parametrize("form", ["vllm", "medusa_lm_head.pt"])
def test_packed_heads_compute_what_the_module_does_with_the_same_weights(
    form: str, weight_format: WeightFormat, tmp_path: Path
) -> None:
    case = golden("medusa")
    checkpoint, hidden = checkpoint_of(case, tmp_path, form), case.inputs["hidden"].bfloat16()
    packed = MedusaHead.of(checkpoint, _none, torch.bfloat16)
    kernels = load_kernels()
    assert kernels is not None
    packed.pack(kernels, weight_format)
    module = MedusaHead.of(checkpoint, _none)
    for weight in module.parameters():
        if weight.dim() == 2:
            weight.data = dequantized(weight_format(weight.bfloat16())).float()
    assert (packed.dtype, packed.device) == (torch.bfloat16, torch.device("cpu"))
    for got, expected in (
        (packed.states(hidden), module.states(hidden.float())),
        (packed(hidden), module(hidden.float())),
    ):
        assert got.dtype == torch.bfloat16
        error = (got.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < 0.04
    assert packed.states(hidden.float()).dtype == torch.float32  # what an adaptive drafter learns from


def _none(_: Tensor) -> Tensor:
    raise AssertionError("the file has an lm_head of its own")
