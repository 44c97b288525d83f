"""Heads with matrices stored in eight bits, in files half as large as in bfloat16.

The format is int-quantized of compressed-tensors: symmetric, with one scale per output channel.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.heads.files import QUANTIZATION
from foredraft.heads.saving import WEIGHTS
from foredraft.kernels import quantize_int8
from foredraft.model.checkpoint import CONFIG
from foredraft.model.quantized.compressed_tensors import COMPRESSED_TENSORS

_WEIGHT = ".weight"
_TABLE = "embed_tokens.weight"
_SETTINGS: dict[str, Any] = {
    "quant_method": COMPRESSED_TENSORS,
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": [],
}


def quantize_head(folder: Path) -> None:
    """Quantise the matrices of a saved head in place; embeddings, norms and tables stay as they are. folder: of a head that is not
    quantised yet, in one safetensors file."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        tensors |= _rounded(name, tensor) if _is_matrix(name, tensor) else {name: tensor}
    config = json.loads((folder / CONFIG).read_bytes())
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config | {QUANTIZATION: _SETTINGS}, indent=2) + "\n", encoding="utf-8")


def _is_matrix(name: str, tensor: Tensor) -> bool:
    return name.endswith(_WEIGHT) and tensor.dim() == 2 and not name.endswith(_TABLE)


def _rounded(name: str, weight: Tensor) -> dict[str, Tensor]:
    rounded = quantize_int8(weight)
    return {name: rounded.codes, f"{name}_scale": rounded.scales}
