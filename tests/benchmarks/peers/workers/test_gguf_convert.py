"""Converting checkpoints to GGUF and back gives the same weights, and a model that computes the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from foredraft.model import EMBEDDED

gguf = pytest.importorskip("gguf")

from benchmarks.peers.workers.dequantise import deinterleave, dequantise  # noqa: E402
from benchmarks.peers.workers.gguf_convert import convert, interleave, unwritten_token  # noqa: E402

TARGET = EMBEDDED / "target"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The embedded target, with every weight in bfloat16."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for file in TARGET.iterdir():
        shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize("heads", [1, 4])
def test_rows_are_permuted_to_neighbouring_pairs_and_back(heads: int) -> None:
    weight = torch.arange(8 * 3).reshape(8, 3)
    there = torch.from_numpy(interleave(weight.numpy(), heads).copy())
    assert torch.equal(deinterleave(there, heads), weight)
    if heads == 1:
        assert there[:, 0].tolist() == [0, 12, 3, 15, 6, 18, 9, 21]  # rows 0, 4, 1, 5, ...


@pytest.mark.slow
def test_a_round_trip_gives_the_same_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "model.gguf", "bf16")
    dequantise(tmp_path / "model.gguf", tmp_path / "back")
    before, after = load_file(checkpoint / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_a_converted_checkpoint_computes_the_same(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "model.gguf", "bf16")
    dequantise(tmp_path / "model.gguf", tmp_path / "back")
    ids = AutoTokenizer.from_pretrained(checkpoint)("def area(width, height):", return_tensors="pt")["input_ids"]
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
        for folder in (checkpoint, tmp_path / "back")
    )
    assert torch.allclose(before, after, atol=1e-4)


@pytest.mark.slow
def test_eight_bit_weights_are_close(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "model.gguf", "q8_0")
    dequantise(tmp_path / "model.gguf", tmp_path / "back")
    before, after = load_file(checkpoint / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    for name, weight in before.items():
        blocks = weight.float().view(-1, 32) if weight.ndim == 2 else weight.float().view(-1, 1)
        step = blocks.abs().amax(1, keepdim=True) / 127
        error = (after[name].float().view_as(blocks) - blocks).abs()
        # half a step of eight bits, and the rounding of the scale to float16 and of the result to bfloat16
        assert (error <= 0.5 * step + blocks.abs() * 2**-7).all(), name


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "qwen.gguf", "qwen2")
    writer.add_block_count(1)
    writer.add_token_list(["a"])
    writer.add_tensor("token_embd.weight", np.zeros((1, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="a model of type qwen2; only llama"):
        dequantise(tmp_path / "qwen.gguf", tmp_path / "back")


def test_the_end_id_in_the_file_is_in_no_text() -> None:
    assert unwritten_token({0, 1, 2, 3}, {"bos_token_id": 0, "eos_token_id": 0}) == 3
    assert unwritten_token({0, 1, 2, 3}, {"bos_token_id": 1, "eos_token_id": [2, 3]}) == 0
