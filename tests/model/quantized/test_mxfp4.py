"""Experts in MXFP4, value by value."""

from __future__ import annotations

import pytest
import torch

from foredraft.kernels import QuantizedWeight
from foredraft.model.quantized.mxfp4 import Mxfp4, _experts
from foredraft.model.quantized.tensors import TensorFiles, UnreadableError
from tests.model.quantized.conftest import LAYER, MakeLayer
from tests.model.quantized.packers import MXFP4_VALUES, mxfp4


def files_of(layer: MakeLayer, num_experts: int = 2) -> tuple[TensorFiles, torch.Tensor]:
    weight = torch.randn(num_experts, 48, 64, generator=torch.Generator().manual_seed(0))
    parts, numbers = mxfp4(weight)
    return layer({f"experts{part}": tensor for part, tensor in parts.items()}).files, numbers


def test_each_expert_is_read_separately(layer: MakeLayer) -> None:
    files, numbers = files_of(layer)
    sources = _experts(files, f"{LAYER}.experts", (2, 48, 64))
    for expert, source in enumerate(sources):
        for first, end in ((0, 48), (5, 9), (7, 7)):
            block = source.rows(first, end)
            assert isinstance(block, QuantizedWeight)
            assert (block.bits, block.group, block.offsets) == (4, 32, None)
            assert block.levels is not None
            assert torch.isin(block.codes, block.levels).all()
            assert torch.equal(block.dequantized(), numbers[expert, first:end])


def test_every_byte_and_scale_is_read(layer: MakeLayer) -> None:
    """All pairs of values with all powers of two except the largest, which is NaN."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16).contiguous()
    files = layer({"experts_blocks": blocks, "experts_scales": scales}).files
    block = _experts(files, f"{LAYER}.experts", (1, 255, 512))[0].rows(0, 255)
    assert isinstance(block, QuantizedWeight)
    signed = [*MXFP4_VALUES, *(-value for value in MXFP4_VALUES)]
    pairs = torch.tensor([[signed[byte % 16], signed[byte // 16]] for byte in range(256)]).double().flatten()
    powers = 2.0 ** (torch.arange(255).double() - 127)
    actual = block.codes.double() * block.scales.double().repeat_interleave(32, 1)
    assert torch.equal(actual, pairs * powers[:, None])


@pytest.mark.parametrize("shape", [(2, 48, 96), (2, 47, 64), (3, 48, 64)])
def test_a_wrong_shape_is_refused(shape: tuple[int, int, int], layer: MakeLayer) -> None:
    files, _ = files_of(layer)
    with pytest.raises(UnreadableError, match=r"layer.experts_blocks is \[2, 48, 2, 16\] U8 in the file but should be"):
        _experts(files, f"{LAYER}.experts", shape)


def test_widths_that_are_not_whole_groups_are_refused(layer: MakeLayer) -> None:
    files, _ = files_of(layer)
    with pytest.raises(
        UnreadableError, match=r"layer.experts has 80 inputs, which cannot be divided into groups of 32"
    ):
        _experts(files, f"{LAYER}.experts", (2, 48, 80))


def test_missing_scales_are_refused(layer: MakeLayer) -> None:
    files = layer({"experts_blocks": torch.zeros(1, 4, 1, 16, dtype=torch.uint8)}).files
    with pytest.raises(UnreadableError, match=r"layer.experts_scales is missing"):
        _experts(files, f"{LAYER}.experts", (1, 4, 32))


def test_layers_are_recognised_by_their_tensors() -> None:
    reader = Mxfp4({"modules_to_not_convert": ["lm_head", "model.layers.*.mlp.router"]})
    assert reader.layer_of("a.experts.down_proj_blocks", "U8") == "a.experts.down_proj"
    assert reader.layer_of("a.experts.down_proj_scales", "U8") == "a.experts.down_proj"
    assert reader.layer_of("a.experts.down_proj_bias", "BF16") is None
    assert reader.is_excluded("model.layers.3.mlp.router")
    assert not reader.is_excluded("model.layers.3.mlp.experts.down_proj")
