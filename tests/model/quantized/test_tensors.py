"""Tensors by name, from one file or several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from foredraft.model.quantized.tensors import LayerTensors, TensorFiles, UnreadableError, read_values


@pytest.fixture
def files(tmp_path: Path) -> TensorFiles:
    tensors = {"a.weight": torch.ones(2, 3), "a.codes": torch.arange(4, dtype=torch.int32), "b": torch.zeros(1).half()}
    save_file(tensors, tmp_path / "model.safetensors")
    return TensorFiles(tmp_path)


def test_tensors_are_known_by_name_shape_and_type(files: TensorFiles) -> None:
    assert sorted(files) == ["a.codes", "a.weight", "b"]
    assert "a.weight" in files
    assert "a" not in files
    assert (files.shape("a.weight"), files.dtype("a.weight")) == ((2, 3), "F32")
    assert files.dtype("a.codes") == "I32"
    assert [files.is_floating(name) for name in ("a.codes", "a.weight", "b")] == [False, True, True]
    assert torch.equal(files.read("a.weight"), torch.ones(2, 3))
    assert read_values(files.read("a.codes")) == [0, 1, 2, 3]


def test_a_layers_tensors_are_checked(files: TensorFiles) -> None:
    layer = LayerTensors(files, "a")
    layer.check("weight", (2, 3))
    layer.check("codes", (4,), "I64", "I32")
    with pytest.raises(UnreadableError, match=r"a.weight is \[2, 3\] F32 in the file but should be \[3, 2\] floating"):
        layer.check("weight", (3, 2))
    with pytest.raises(UnreadableError, match=r"a.codes is \[4\] I32 in the file but should be \[4\] I64 or U8"):
        layer.check("codes", (4,), "I64", "U8")
    with pytest.raises(UnreadableError, match=r"a.scales is missing"):
        layer.check("scales", (1,))


@pytest.mark.parametrize("content", [b"", b"12345678", b"\xff" * 64, (2**62).to_bytes(8, "little") + b"{}"])
def test_files_that_are_not_safetensors_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UnreadableError, match=r"model.safetensors cannot be read") as caught:
        TensorFiles(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("index", ["", "{}", "[]", '{"weight_map": 3}', "\x00"])
def test_an_invalid_index_is_refused(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UnreadableError, match="is not an index of tensors"):
        TensorFiles(tmp_path)
