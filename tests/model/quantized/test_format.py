"""The reader of every format returns the numbers that its packer stored."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft.kernels import QuantizedWeight, dequantized, read_all
from foredraft.model.quantized.format import check_setting, is_listed
from foredraft.model.quantized.load import FORMATS
from foredraft.model.quantized.plan import StoredMatrix
from foredraft.model.quantized.tensors import UnreadableError
from tests.model.quantized.conftest import MakeLayer, weight_of
from tests.model.quantized.packers import KINDS

DEQUANTIZED = ("nf4", "fp4")
"""Formats whose values are not integers times a scale."""


def stored(kind: str, layer: MakeLayer) -> tuple[StoredMatrix, torch.Tensor]:
    """A layer in this format, and its dequantised weight in the order of its columns."""
    weight = weight_of()
    parts, numbers = KINDS[kind].pack(weight)
    settings = KINDS[kind].settings
    matrix = FORMATS[settings["quant_method"]](settings).matrix(layer(parts), tuple(weight.shape))
    return matrix, numbers if matrix.order is None else numbers[:, matrix.order]


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_are_the_numbers_that_were_stored(kind: str, layer: MakeLayer) -> None:
    matrix, numbers = stored(kind, layer)
    assert matrix.source.shape == numbers.shape
    assert (matrix.order is not None) == ("act-order" in kind)
    tolerance = 1e-6 if "int8()" in kind else 0  # a scale divided by 127
    torch.testing.assert_close(dequantized(read_all(matrix.source)), numbers, rtol=tolerance, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_any_range_of_rows_can_be_read(kind: str, layer: MakeLayer) -> None:
    matrix, _ = stored(kind, layer)
    whole = dequantized(read_all(matrix.source))
    for first, end in ((0, 1), (3, 12), (31, 33), (40, 48), (7, 7)):
        assert torch.equal(dequantized(matrix.source.rows(first, end)), whole[first:end])


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_have_a_consistent_form(kind: str, layer: MakeLayer) -> None:
    """All rows have the same form, four-bit codes are in -8 .. 7, and a symmetric weight has no offsets."""
    matrix, _ = stored(kind, layer)
    blocks = [matrix.source.rows(first, first + 16) for first in (0, 16, 32)]
    if kind.startswith(DEQUANTIZED):
        assert all(isinstance(block, torch.Tensor) for block in blocks)
        return
    for block in blocks:
        assert isinstance(block, QuantizedWeight)
        assert block.codes.dtype == torch.int8
        assert block.codes.is_contiguous()
        assert (block.offsets is not None) == ("asymmetric" in kind or kind == "awq")
        assert block.scales.shape == (16, 64 // block.group)
        if block.bits == 4:
            assert int(block.codes.min()) >= -8
            assert int(block.codes.max()) <= 7


@given(st.lists(st.sampled_from(["a", "b", "10", "1"]), min_size=1, max_size=4))
def test_listed_layers_match_by_the_beginning_or_end_of_their_name(parts: list[str]) -> None:
    layer = ".".join(parts)
    assert is_listed(layer, [parts[-1]])
    assert is_listed(layer, [parts[0]])
    assert is_listed(layer, [layer])
    assert not is_listed(layer, [])
    assert not is_listed(layer, ["c"])


def test_listed_layers_match_whole_name_parts_only() -> None:
    assert is_listed("model.layers.10.mlp", ["model.layers.*.mlp"])
    assert not is_listed("model.layers.10.mlp", ["model.layers.1", "lp", "mod"])


def test_an_unsupported_setting_is_named() -> None:
    assert check_setting({"bits": 4}, "bits", (4, 8)) == 4
    assert check_setting({}, "bits", (4, 8), 8) == 8
    with pytest.raises(UnreadableError, match="bits is 3; supported: 4, 8"):
        check_setting({"bits": 3}, "bits", (4, 8))
