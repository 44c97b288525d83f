"""The floor counts every multiplication, and the timed model is read."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels import prompt_reading
from benchmarks.kernels.prompt_reading import _FORMATS, Prompt, Reader
from foredraft.kernels import load_kernels


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_reading, "_LAYERS", 1)
    monkeypatch.setattr(prompt_reading, "_VOCABULARY", 128)
    monkeypatch.setattr(prompt_reading, "_CHUNK", 16)


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize("precision", _FORMATS)
def test_a_prompt_is_read_in_chunks(precision: str) -> None:
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("no compiled kernels here")
    prompt, reader = Prompt(2, 40, 0), Reader("now", kernels, precision)
    assert list(prompt.chunks()) == [(0, 16), (16, 32), (32, 40)]
    assert all(seconds > 0 for seconds in prompt.split(reader))
    written = prompt.store.abs().sum(-1) > 0  # for each key and value of the cache
    assert written[..., :40].all()
    assert not written[..., 40:].any()


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize("last", [0, 3])
def test_multiplications_are_counted_one_by_one(last: int) -> None:
    prompt = Prompt(2, 40, last)
    rows = range(40 - (last or 40), 40)
    seen = torch.ones(40, 40).tril()[list(rows)].sum()
    assert prompt.attention_pairs() == 2 * seen * 9 * 2 * 64
    weights = 960 * 576 + 576 * 576 + 3072 * 576 + 576 * 1536
    assert prompt.product_pairs() == 2 * (len(rows) * weights + 128 * 576)
