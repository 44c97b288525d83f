"""Loading takes hardly more memory than the file, measured in a process of its own with files of some 100 MB."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.engine.loading import measured
from foredraft.kernels import load_kernels, why_none
from tests.model.gguf.writing import write_model
from tests.model.zoo import Species, random_model

_SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
SMALL_VOCABULARY = Species("llama", {**_SHAPE, "vocab_size": 4096})
LARGE_VOCABULARY = Species("llama", {**_SHAPE, "vocab_size": 65_536, "num_hidden_layers": 6})
KEYS_AND_VALUES = 2 * 240 * 8 * 2 * 4 * 64 * 2
"""The cache of the probe's two sequences in eight layers, in bytes, which is subtracted."""

MOST = 1.15

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux measures a peak"),
    pytest.mark.skipif(load_kernels() is None, reason=f"no kernels: {why_none()}"),
]


def q8_0(model: PreTrainedModel, folder: Path) -> Path:
    return write_model(model, folder / "model.gguf", "Q8_0")


def float16_gguf(model: PreTrainedModel, folder: Path) -> Path:
    return write_model(model, folder / "model.gguf", "F16")


def k_quants(model: PreTrainedModel, folder: Path) -> Path:
    """Types as llama.cpp mixes them, with the embedding in six bits."""
    return write_model(model, folder / "model.gguf", lambda name: "Q6_K" if name.startswith("token_embd") else "Q4_K")


def bfloat16(model: PreTrainedModel, folder: Path) -> Path:
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def float16(model: PreTrainedModel, folder: Path) -> Path:
    model.to(torch.float16).save_pretrained(folder)
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("save", "species", "quantization"),
    [
        (q8_0, SMALL_VOCABULARY, None),
        (float16_gguf, SMALL_VOCABULARY, None),
        (k_quants, LARGE_VOCABULARY, None),
        (bfloat16, SMALL_VOCABULARY, None),
        (bfloat16, SMALL_VOCABULARY, "int8"),
        (bfloat16, SMALL_VOCABULARY, "int4"),
        (float16, SMALL_VOCABULARY, None),
    ],
)
def test_the_peak_is_near_the_size_of_the_weights(
    save: Callable[[PreTrainedModel, Path], Path], species: Species, quantization: str | None, tmp_path: Path
) -> None:
    """Those of the file, or the packed ones if they take more."""
    load = measured(save(random_model(species.config()), tmp_path), quantization)
    assert load.file_bytes > 80e6
    assert load.peak_bytes <= MOST * max(load.file_bytes, load.weight_bytes) + KEYS_AND_VALUES, load
    assert load.resident_bytes > load.file_bytes / 5
