"""Settings and shapes that GPTQ's reader refuses. test_format.py tests what it reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foredraft.kernels import dequantized, read_all
from foredraft.model.quantized.gptq import Gptq
from foredraft.model.quantized.tensors import UnreadableError
from tests.model.quantized.conftest import MakeLayer, weight_of
from tests.model.quantized.packers import gptq

SETTINGS = gptq().settings


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bits": 3}, "quantization_config.bits is 3; supported: 4, 8"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; supported: gptq, gptq_v2"),
        ({"checkpoint_format": None, "format": "bitblas"}, "format is 'bitblas'; supported: gptq, gptq_v2"),
    ],
)
def test_unsupported_settings_are_named(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnreadableError, match=reason):
        Gptq({**SETTINGS, **changes})


def test_groups_are_those_of_the_settings(layer: MakeLayer) -> None:
    parts, _ = gptq().pack(weight_of())
    with pytest.raises(
        UnreadableError, match=r"scales has groups of 32 inputs but quantization_config.group_size is 64"
    ):
        Gptq({**SETTINGS, "group_size": 64}).matrix(layer(parts), (48, 64))


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales", "g_idx"])
def test_wrong_shapes_of_any_tensor_are_refused(part: str, layer: MakeLayer) -> None:
    parts, _ = gptq().pack(weight_of())
    parts[part] = parts[part][:-1]
    with pytest.raises(UnreadableError, match="layer"):
        Gptq(SETTINGS).matrix(layer(parts), (48, 64))


def test_layers_of_a_dynamic_checkpoint_have_their_own_bits_and_groups(layer: MakeLayer) -> None:
    parts, numbers = gptq(8, group=16).pack(weight_of())
    matrix = Gptq({**SETTINGS, "dynamic": {"+:.*": {"bits": 8, "group_size": 16}}}).matrix(layer(parts), (48, 64))
    assert torch.equal(dequantized(read_all(matrix.source)), numbers)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_a_zero_point_of_zero_is_read(bits: int, version: int, layer: MakeLayer) -> None:
    """Version 1 stores zero points minus 1, so that 0 becomes the largest value."""
    kind = gptq(bits, symmetric=False, version=version)
    parts, numbers = kind.pack(weight_of().abs())
    source = Gptq(kind.settings).matrix(layer(parts), (48, 64)).source
    assert torch.equal(dequantized(read_all(source)), numbers)
    assert float(numbers.min()) >= 0


def test_without_g_idx_the_inputs_are_in_order(layer: MakeLayer) -> None:
    parts, numbers = gptq().pack(weight_of())
    del parts["g_idx"]
    matrix = Gptq(SETTINGS).matrix(layer(parts), (48, 64))
    assert matrix.order is None
    assert torch.equal(dequantized(read_all(matrix.source)), numbers)
