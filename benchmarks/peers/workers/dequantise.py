"""Convert a Llama model in a GGUF file to a bfloat16 checkpoint in Hugging Face format, from which every program makes its own
precisions. Needs torch, transformers and gguf.

    python -m benchmarks.peers.workers.dequantise FILE.gguf FOLDER

`transformers` reads the configuration and the tokenizer from the file (`gguf_file=`); the `gguf` package decodes the weights,
which are rounded to bfloat16.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import torch
from gguf.quants import dequantize
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, LlamaConfig

from benchmarks.peers.workers.gguf_names import HEADS, PERMUTED, checkpoint_name


def dequantise(file: Path, folder: Path) -> None:
    """Raises ValueError for a file with an architecture other than Llama."""
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    if config.model_type != "llama":
        raise ValueError(f"{file.name} holds a model of type {config.model_type}; only llama can be dequantised here")
    config.dtype = torch.bfloat16
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    save_file(dict(_weights(file, config)), folder / "model.safetensors", metadata={"format": "pt"})


def _weights(file: Path, config: LlamaConfig) -> Iterator[tuple[str, Tensor]]:
    for tensor in gguf.GGUFReader(file).tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        name = checkpoint_name(tensor.name)
        if name.endswith(PERMUTED):
            weight = deinterleave(weight, getattr(config, HEADS[name.split(".")[-2]]))
        yield name, weight.to(torch.bfloat16)


def deinterleave(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of heads from llama.cpp's order (it rotates 2i with 2i + 1) to transformers' (i with i + half). [rows, cols]"""
    rows, cols = weight.shape
    return weight.view(heads, rows // heads // 2, 2, cols).transpose(1, 2).reshape(rows, cols)


if __name__ == "__main__":
    dequantise(Path(sys.argv[1]), Path(sys.argv[2]))
