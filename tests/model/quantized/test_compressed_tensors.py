"""Schemes, targets and shapes of compressed-tensors. test_format.py tests what its reader reads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from foredraft.model.quantized.compressed_tensors import CompressedTensors
from foredraft.model.quantized.tensors import UnreadableError
from tests.model.quantized.conftest import LAYER, MakeLayer, weight_of
from tests.model.quantized.packers import integers, packed

SETTINGS = packed().settings


def changed(**changes: Any) -> dict[str, Any]:
    """The settings of a packed checkpoint, with changes. A name with "__" is a path in its only group."""
    settings = copy.deepcopy(SETTINGS)
    for name, value in changes.items():
        place = settings
        *path, last = name.split("__")
        for part in ["config_groups", "group_0", *path] if path else []:
            place = place[part]
        place[last] = value
    return settings


ACTIVATIONS = {"num_bits": 8, "type": "int", "dynamic": True}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "float-quantized"}, "quantization_config.format is 'float-quantized'; supported: pack-quantized"),
        ({"format": "marlin-24"}, "format is 'marlin-24'"),
        ({"format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized'"),
        ({"weights__type": "float"}, "config_groups.group_0.weights.type is 'float'; supported: int"),
        ({"weights__num_bits": 3}, "config_groups.group_0.weights.num_bits is 3; supported: 4, 8"),
        ({"weights__strategy": "block"}, "weights.strategy is 'block'; supported: group, channel, tensor"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is set"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config is set"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is set"),
        ({"config_groups": None}, "config_groups should map names to schemes"),
        ({"config_groups": {"W4A16": ["Linear"]}}, "config_groups should map names to schemes"),
    ],
)
def test_unsupported_settings_are_named(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnreadableError, match=reason):
        CompressedTensors(changed(**changes))


@pytest.mark.parametrize(
    ("activations", "reason"),
    [
        ({**ACTIVATIONS, "dynamic": False}, "input_activations.dynamic is False; supported: True"),
        ({**ACTIVATIONS, "num_bits": 4}, "input_activations.num_bits is 4; supported: 8"),
        ({**ACTIVATIONS, "type": "float"}, "input_activations.type is 'float'; supported: int"),
    ],
)
def test_unsupported_activations_are_named(activations: dict[str, Any], reason: str) -> None:
    settings = changed()
    settings["config_groups"]["group_0"]["input_activations"] = activations
    with pytest.raises(UnreadableError, match=reason):
        CompressedTensors(settings)


def test_a_scheme_is_chosen_by_name_before_class(layer: MakeLayer) -> None:
    """Targets name layers, match them with a regular expression, or name the class of all linear layers."""
    everything, few = copy.deepcopy(SETTINGS["config_groups"]["group_0"]), copy.deepcopy(integers().settings)
    few = few["config_groups"]["group_0"] | {"format": "int-quantized"}
    parts, _ = integers().pack(weight_of())
    for target in (LAYER, "re:lay.*"):
        settings = changed(
            config_groups={"all": everything | {"format": "pack-quantized"}, "few": few | {"targets": [target]}}
        )
        matrix = CompressedTensors(settings | {"format": "mixed-precision"}).matrix(layer(parts), (48, 64))
        assert matrix.source.rows(0, 48).bits == 8


def test_a_layer_that_no_group_targets_is_refused(layer: MakeLayer) -> None:
    settings = changed()
    settings["config_groups"]["group_0"]["targets"] = ["re:model.*"]
    with pytest.raises(UnreadableError, match=r"layer is quantized, but no group of .* targets it"):
        CompressedTensors(settings).matrix(layer(packed().pack(weight_of())[0]), (48, 64))


def test_ignored_layers_are_named_or_matched() -> None:
    reader = CompressedTensors(changed(ignore=["lm_head", "re:.*gate$"]))
    assert reader.is_excluded("lm_head")
    assert reader.is_excluded("model.layers.3.mlp.gate")
    assert not reader.is_excluded("model.layers.3.mlp.gate_proj")


@pytest.mark.parametrize("part", ["weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"])
def test_wrong_shapes_of_any_tensor_are_refused(part: str, layer: MakeLayer) -> None:
    kind = packed(symmetric=False, act_order=True)
    parts, _ = kind.pack(weight_of())
    parts[part] = parts[part][:-1]
    with pytest.raises(UnreadableError, match=f"layer.{part} is"):
        CompressedTensors(kind.settings).matrix(layer(parts), (48, 64))


def test_zero_points_of_a_symmetric_scheme_are_zero(layer: MakeLayer) -> None:
    parts, numbers = packed().pack(weight_of())
    parts["weight_zero_point"] = torch.zeros(48, 2, dtype=torch.int8)
    assert torch.equal(
        CompressedTensors(SETTINGS).matrix(layer(parts), (48, 64)).source.rows(0, 48).dequantized(), numbers
    )
    parts["weight_zero_point"][3, 1] = 1
    with pytest.raises(UnreadableError, match=r"layer.weight_zero_point is not zero, but its scheme says symmetric"):
        CompressedTensors(SETTINGS).matrix(layer(parts), (48, 64))


def test_a_false_weight_shape_is_refused(layer: MakeLayer) -> None:
    parts, _ = packed().pack(weight_of())
    parts["weight_shape"] = torch.tensor([48, 63])
    with pytest.raises(UnreadableError, match=r"weight_shape says \[48, 63\], but the model needs \[48, 64\]"):
        CompressedTensors(SETTINGS).matrix(layer(parts), (48, 64))


@pytest.mark.parametrize("bits", [4, 8])
def test_widths_that_do_not_fill_whole_words_are_read(bits: int, layer: MakeLayer) -> None:
    kind = packed(bits, strategy="channel", symmetric=False)
    parts, numbers = kind.pack(weight_of(50, 61))
    source = CompressedTensors(kind.settings).matrix(layer(parts), (50, 61)).source
    assert torch.equal(source.rows(0, 50).dequantized(), numbers)
