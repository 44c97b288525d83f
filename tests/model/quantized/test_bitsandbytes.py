"""Layers that bitsandbytes' reader refuses. test_format.py tests what it reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from foredraft.model.quantized.bitsandbytes import BitsAndBytes
from foredraft.model.quantized.tensors import UnreadableError
from tests.model.quantized.conftest import MakeLayer, weight_of
from tests.model.quantized.packers import NF4, Parts, bitsandbytes, int8_rows

STATE = "weight.quant_state.bitsandbytes__nf4"


def described(**changes: Any) -> Parts:
    """A layer with nested scales and a changed description."""
    parts, _ = bitsandbytes(nested=True).pack(weight_of())
    state = json.loads(bytes(parts[STATE].tolist())) | changes
    return parts | {STATE: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}


def test_storage_other_than_bytes_is_refused() -> None:
    with pytest.raises(UnreadableError, match="bnb_4bit_quant_storage is 'bfloat16'; supported: uint8"):
        BitsAndBytes({"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"shape": [64, 48]}, r"layer is \[64, 48\] according to its quant_state but \[48, 64\] in the model"),
        ({"blocksize": 0}, "layer: blocksize is 0 in its quant_state"),
        ({"blocksize": 128}, r"layer.weight.nested_absmax|layer.weight.absmax is \[48\]"),
        ({"nested_blocksize": None}, "layer: nested_blocksize is None in its quant_state"),
    ],
)
def test_a_false_description_is_refused(changes: dict[str, Any], reason: str, layer: MakeLayer) -> None:
    with pytest.raises(UnreadableError, match=reason):
        BitsAndBytes({}).matrix(layer(described(**changes)), (48, 64))


def test_a_description_that_is_not_json_is_refused(layer: MakeLayer) -> None:
    parts = described() | {STATE: torch.tensor([123, 255], dtype=torch.uint8)}
    with pytest.raises(UnreadableError, match="is not a JSON object"):
        BitsAndBytes({}).matrix(layer(parts), (48, 64))


def test_a_layer_without_a_description_is_refused(layer: MakeLayer) -> None:
    parts = described()
    del parts[STATE]
    with pytest.raises(UnreadableError, match=f"layer.{STATE} is missing"):
        BitsAndBytes({}).matrix(layer(parts), (48, 64))


@pytest.mark.parametrize("part", ["weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax"])
def test_wrong_shapes_of_any_tensor_are_refused(part: str, layer: MakeLayer) -> None:
    parts = described()
    parts[part] = torch.cat([parts[part], parts[part]])
    with pytest.raises(UnreadableError, match=f"layer.{part} is"):
        BitsAndBytes({}).matrix(layer(parts), (48, 64))


def test_eight_bits_need_a_scale_for_each_output(layer: MakeLayer) -> None:
    parts, _ = int8_rows().pack(weight_of())
    parts["SCB"] = parts["SCB"][:-1]
    with pytest.raises(UnreadableError, match=r"layer.SCB is \[47\]"):
        BitsAndBytes({}).matrix(layer(parts), (48, 64))


def test_nf4_is_dequantized_since_int8_would_be_inexact(layer: MakeLayer) -> None:
    """On a grid of 127 steps NF4's values would be off by up to 0.4 % of a block's largest weight, eight times the average rounding
    error of bfloat16."""
    levels = torch.tensor(NF4)
    on_a_grid = (levels * 127).round() / 127
    assert 0.003 < float((on_a_grid - levels).abs().max()) < 0.004
    parts, numbers = bitsandbytes().pack(weight_of())
    rows = BitsAndBytes({}).matrix(layer(parts), (48, 64)).source.rows(0, 48)
    assert torch.equal(rows, numbers)
