"""Loading takes hardly more memory than the file: measured in a process of its own, on files of some 100 MB."""

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

SPECIES = Species(
    "llama",
    {
        "vocab_size": 4096,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
)
KEYS_AND_VALUES = 2 * 240 * 8 * 2 * 4 * 64 * 2
"""Bytes that the probe's two sequences hold in the cache: they do not count."""

MOST = 1.15

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux measures a peak"),
    pytest.mark.skipif(load_kernels() is None, reason=f"no kernels: {why_none()}"),
]


def gguf_file(model: PreTrainedModel, folder: Path) -> Path:
    return write_model(model, folder / "model.gguf", "Q8_0")


def safetensors(model: PreTrainedModel, folder: Path) -> Path:
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("save", "quantization"), [(gguf_file, None), (safetensors, "int4")])
def test_the_peak_is_near_the_size_of_the_file(
    save: Callable[[PreTrainedModel, Path], Path], quantization: str | None, tmp_path: Path
) -> None:
    load = measured(save(random_model(SPECIES.config()), tmp_path), quantization)
    assert load.file_bytes > 80e6
    assert load.peak_bytes <= MOST * load.file_bytes + KEYS_AND_VALUES, load
    assert load.resident_bytes > load.file_bytes / 5
