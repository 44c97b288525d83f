"""Quantise a GGUF file with llama.cpp's own quantiser, in its default mixture of types. Needs cyllama and gguf.

python -m benchmarks.peers.workers.gguf_quantise EXACT.gguf FILE.gguf q4_0|q4_1|q4_k_m
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import gguf
from cyllama.llama.llama_cpp import LlamaModelQuantizeParams, model_quantize


def quantise(exact: Path, file: Path, precision: str) -> None:
    parameters = LlamaModelQuantizeParams()
    parameters.ftype = int(gguf.LlamaFileType[f"MOSTLY_{precision.upper()}"])
    parameters.nthread = os.cpu_count() or 1
    model_quantize(str(exact), str(file), parameters)


if __name__ == "__main__":
    quantise(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
