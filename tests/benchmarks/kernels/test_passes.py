"""The bytes and operations of a pass are counted from its matrices, whether or not they are shared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.kernels.limits import Peak
from benchmarks.kernels.passes import Limits, Work, bytes_read, multiplications
from foredraft.kernels import load_kernels, why_none
from foredraft.kernels.start import usable_instructions
from foredraft.model import LoadOptions, load_model
from tests.model import zoo
from tests.model.gguf.writing import write_model

pytestmark = pytest.mark.skipif(load_kernels() is None, reason=f"no kernels: {why_none()}")

V, D, F, H, KV, LAYERS = 128, 64, 96, 4, 2, 2
MATRICES = LAYERS * (2 * D * D + 2 * D * (D // H) * KV + 3 * D * F)
CONFIG = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": H,
    "num_key_value_heads": KV,
}
NORMS_AND_ANGLES = 2048
"""The most bytes of everything that is not a matrix."""


def saved(folder: Path) -> Path:
    zoo.random_model(zoo.Species("llama", CONFIG).config()).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("quantization", "bits", "head_bits"), [(None, 16, 16), ("int8", 8, 8), ("int4-all", 4.5, 4.5), ("int4", 4.5, 8)]
)
def test_every_matrix_is_read_once_with_its_scales_and_no_embedding(
    quantization: str | None, bits: float, head_bits: float, tmp_path: Path
) -> None:
    hf = load_model(saved(tmp_path), LoadOptions(device="cpu", quantization=quantization)).hf
    least = (MATRICES * bits + V * D * head_bits) / 8
    scales = (
        8 * (LAYERS * (4 * D + 2 * F) + V) if head_bits == 8 else 0
    )  # int8 has a scale and a correction for each output
    assert least <= bytes_read(hf) <= least + scales + NORMS_AND_ANGLES
    floats, int8 = multiplications(hf)
    assert floats + int8 == MATRICES + V * D
    assert (floats == 0) is (quantization is not None)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_stored_embedding_is_read_if_it_is_the_lm_head(is_tied: bool, tmp_path: Path) -> None:
    model = zoo.random_model(zoo.Species("llama", CONFIG).config())
    if is_tied:
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    hf = load_model(write_model(model, tmp_path / "model.gguf", "Q8_0"), LoadOptions(device="cpu")).hf
    least = (MATRICES + V * D) * 8.5 / 8
    assert least <= bytes_read(hf) <= least + NORMS_AND_ANGLES


def test_the_floors_follow_from_bytes_and_operations() -> None:
    limits = Limits(bandwidth=2.0, floats=4.0, int8=8.0)
    assert Work(num_bytes=6, floats=4, int8=16).floors(limits) == (3.0, 3.0)


@pytest.mark.slow
def test_the_peak_is_measured_for_both_kinds_of_products() -> None:
    peak = Peak(usable_instructions()[0])
    assert all(peak.pairs_per_second(name) > 1e6 for name in ("bfloat16", "int8"))
