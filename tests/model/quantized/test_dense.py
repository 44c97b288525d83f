"""Quantized checkpoints read as floating point: every form of compressed-tensors is dequantised correctly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from foredraft.model.quantized.dense import read_dense
from foredraft.model.quantized.tensors import UnreadableError
from tests.model.quantized.conftest import weight_of
from tests.model.quantized.packers import KINDS

FORMS = [name for name, kind in KINDS.items() if kind.settings["quant_method"] == "compressed-tensors"]


@pytest.mark.parametrize("name", FORMS)
def test_matrices_are_dequantized(name: str, tmp_path: Path) -> None:
    parts, numbers = KINDS[name].pack(weight_of())
    others = {"norm.weight": torch.rand(7), "fc.bias": torch.rand(48).bfloat16(), "d2t": torch.arange(5)}
    save_file({f"fc.{part}": tensor for part, tensor in parts.items()} | others, tmp_path / "model.safetensors")
    tensors = read_dense(tmp_path, KINDS[name].settings)
    assert tensors.keys() == {"fc.weight", *others}
    assert torch.allclose(tensors["fc.weight"], numbers, rtol=1e-6, atol=1e-7)
    assert all(torch.equal(tensors[key], tensor) for key, tensor in others.items())


def test_other_methods_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="quant_method is 'gptq'; supported: compressed-tensors"):
        read_dense(tmp_path, KINDS["gptq"].settings)


def test_scales_of_a_wrong_shape_are_refused(tmp_path: Path) -> None:
    parts, _ = KINDS["W8A8"].pack(weight_of())
    parts["weight_scale"] = parts["weight_scale"][:5]
    save_file({f"fc.{part}": tensor.contiguous() for part, tensor in parts.items()}, tmp_path / "model.safetensors")
    with pytest.raises(UnreadableError, match=r"fc\.weight_scale is \[5, 1\] BF16 in the file but should be \[48, 1\]"):
        read_dense(tmp_path, KINDS["W8A8"].settings)
