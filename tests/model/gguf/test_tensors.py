"""Reading rows: any part of a tensor equals that part of the whole, in the right order."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from foredraft.errors import ModelError
from foredraft.kernels import blocks_of, dequantized, read_all
from foredraft.model.gguf.blocks import BLOCK_TYPES
from foredraft.model.gguf.container import GGUFFile
from foredraft.model.gguf.tensors import GGUFRows, order_of_heads, read_floats
from tests.model.gguf.writing import add_tensor, finish

MATRIX = np.random.default_rng(0).normal(size=(48, 512)).astype(np.float32)


def file_of(path: Path, kind: str, matrix: np.ndarray = MATRIX) -> GGUFFile:
    writer = gguf.GGUFWriter(path / "matrix.gguf", "llama")
    add_tensor(writer, "matrix", matrix, kind)
    finish(writer)
    return GGUFFile(path / "matrix.gguf")


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *BLOCK_TYPES])
def test_any_rows_equal_those_of_the_whole_tensor(kind: str, tmp_path: Path) -> None:
    file = file_of(tmp_path, kind)
    entry = file.tensors["matrix"]
    source = GGUFRows(file, entry)
    whole = dequantized(read_all(source)).float()
    theirs = gguf.quants.dequantize(file.rows(entry), gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(whole.numpy(), theirs)
    assert source.shape == (48, 512)
    for first, end in ((0, 1), (5, 5), (17, 48), (47, 48)):
        assert torch.equal(dequantized(source.rows(first, end)).float(), whole[first:end])
    assert torch.equal(torch.cat([dequantized(block).float() for _, block in blocks_of(source)]), whole)
    assert torch.equal(read_floats(file, entry).float(), whole)


@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
def test_rows_in_another_order(kind: str, tmp_path: Path) -> None:
    file = file_of(tmp_path, kind)
    order = np.random.default_rng(1).permutation(48)
    entry = file.tensors["matrix"]
    whole = dequantized(read_all(GGUFRows(file, entry)))
    shuffled = GGUFRows(file, entry, order)
    assert torch.equal(dequantized(shuffled.rows(3, 20)), whole[torch.from_numpy(order[3:20])])
    assert torch.equal(read_floats(file, entry, order), whole[torch.from_numpy(order)])


def test_released_pages_are_read_again(tmp_path: Path) -> None:
    matrix = np.random.default_rng(2).normal(size=(2048, 1024)).astype(np.float32)
    file = file_of(tmp_path, "Q8_0", matrix)
    source = GGUFRows(file, file.tensors["matrix"])
    assert torch.equal(read_all(source).codes, read_all(source).codes)


def test_rotary_pairs_are_reordered_into_halves() -> None:
    """Two heads of 6: the file rotates the pairs (0, 1), (2, 3), (4, 5) together, the model class (0, 3), (1, 4), (2, 5)."""
    assert order_of_heads(12, 2).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


@pytest.mark.parametrize("scale", [np.inf, np.nan])
def test_scales_that_are_not_finite_are_refused(scale: float, tmp_path: Path) -> None:
    file_of(tmp_path, "Q8_0")
    path = tmp_path / "matrix.gguf"
    data = bytearray(path.read_bytes())
    start = GGUFFile(path).tensors["matrix"].start
    data[start : start + 2] = np.float16(scale).tobytes()
    path.write_bytes(data)
    file = GGUFFile(path)
    with pytest.raises(ModelError, match="'matrix' contains NaN or infinity"):
        GGUFRows(file, file.tensors["matrix"]).rows(0, 1)


def test_an_unsupported_type_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "matrix.gguf", "llama")
    kind = gguf.GGMLQuantizationType.Q2_K
    writer.add_tensor("matrix", np.zeros((4, 84), np.uint8), raw_dtype=kind)
    finish(writer)
    file = GGUFFile(tmp_path / "matrix.gguf")
    with pytest.raises(ModelError, match=r"'matrix' is of type Q2_K; F32, .*Q4_K.* can be read"):
        GGUFRows(file, file.tensors["matrix"])
