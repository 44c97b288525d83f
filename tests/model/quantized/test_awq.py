"""Settings and shapes that AWQ's reader refuses. test_format.py tests what it reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foredraft.kernels import dequantized, read_all
from foredraft.model.quantized.awq import Awq
from foredraft.model.quantized.tensors import UnreadableError
from tests.model.quantized.conftest import MakeLayer, weight_of
from tests.model.quantized.packers import awq

SETTINGS = awq().settings


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bits": 8}, "quantization_config.bits is 8; supported: 4"),
        ({"version": "gemv"}, "version is 'gemv'; supported: gemm"),
        ({"version": None, "format": "llm-awq"}, "format is 'llm-awq'; supported: gemm"),
        ({"zero_point": False}, "zero_point is False; supported: True"),
    ],
)
def test_unsupported_settings_are_named(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnreadableError, match=reason):
        Awq({**SETTINGS, **changes})


def test_the_version_is_named_in_any_case(layer: MakeLayer) -> None:
    parts, _ = awq().pack(weight_of())
    expected, *others = (
        Awq({**SETTINGS, "version": version}).matrix(layer(parts), (48, 64)) for version in ("gemm", "GEMM", "Gemm")
    )
    weight = dequantized(read_all(expected.source))
    assert all(torch.equal(dequantized(read_all(other.source)), weight) for other in others)


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
def test_wrong_shapes_of_any_tensor_are_refused(part: str, layer: MakeLayer) -> None:
    parts, _ = awq().pack(weight_of())
    parts[part] = parts[part][:-1]
    with pytest.raises(UnreadableError, match="layer"):
        Awq(SETTINGS).matrix(layer(parts), (48, 64))


def test_groups_are_those_of_the_settings(layer: MakeLayer) -> None:
    parts, _ = awq().pack(weight_of())
    with pytest.raises(UnreadableError, match=r"groups of 32 inputs but quantization_config.group_size is 128"):
        Awq({**SETTINGS, "group_size": 128}).matrix(layer(parts), (48, 64))
