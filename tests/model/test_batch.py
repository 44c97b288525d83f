"""Ragged batches: how reads are flattened, and that logits do not depend on the slots of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foredraft.engine.cache import KVCache
from foredraft.gpu import at_once
from foredraft.kernels import load_kernels, why_none
from foredraft.model import LanguageModel, LoadOptions, RaggedBatch, Read, load_model
from foredraft.model.batch import Span, flatten
from foredraft.model.device_stack import DeviceStackBody
from foredraft.model.language_model import Traits
from foredraft.model.library import LibraryBody
from foredraft.model.stack import StackBody
from tests.model.zoo import DEVICE_FORMS, SPECIES, STACK_FORMS, VOCAB_SIZE, Maker, random_model, saved

CAPACITY, START, LENGTH = 96, 15, 26


def random_tokens(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def library(name: str, checkpoint: Maker, dtype: str, kernels: str) -> LanguageModel:
    model = load_model(checkpoint(name), LoadOptions(dtype=dtype, device="cpu", kernels=kernels))
    assert isinstance(model.body, LibraryBody)
    assert (model.body.kernels is not None) == (kernels == "auto")
    return model


def compiled(name: str, directory: str) -> LanguageModel:
    model = load_model(saved(STACK_FORMS[name].config(), directory), LoadOptions(dtype="bfloat16", device="cpu"))
    assert isinstance(model.body, StackBody)
    return model


def device(name: str) -> LanguageModel:
    pytest.importorskip("triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hf = random_model(DEVICE_FORMS[name].config()).to(device)
    body = DeviceStackBody(hf, 128, at_once, is_batch_invariant=False)
    return LanguageModel(hf, Traits(name, VOCAB_SIZE, 128, 0, row_exact=False), body)


SLOTS = {
    "a hole": [list(range(START + 9, LENGTH + 9)), list(range(5))],
    "backwards": [list(range(LENGTH - 1, START - 1, -1)), [4, 3, 2, 1, 0]],
    "anywhere": [[START + (7 * i) % (CAPACITY - START) for i in range(LENGTH - START)], [90, 0, 50, 17, 1]],
}

native = pytest.mark.skipif(load_kernels() is None, reason=f"no compiled kernels here: {why_none()}")
MODELS: dict[str, Callable[..., LanguageModel]] = {
    "library, float32": lambda checkpoint, _: library("llama", checkpoint, "float32", "torch"),
    "library, sliding window": lambda checkpoint, _: library("mistral", checkpoint, "bfloat16", "torch"),
    "library, compiled attention": lambda checkpoint, _: library("gpt2", checkpoint, "bfloat16", "auto"),
    "compiled": lambda _, directory: compiled("qwen3", directory),
    "compiled, sliding window": lambda _, directory: compiled("mistral", directory),
    "device": lambda *_: device("two heads"),
    "device, sliding window": lambda *_: device("mistral"),
}
PARAMS = [
    pytest.param(name, where, marks=[native] * ("compiled" in name) + [pytest.mark.slow] * is_slow)
    for name in MODELS
    for where in SLOTS
    for is_slow in ["device" in name]
]
"""In Triton's interpreter the device's kernels take a minute."""


def half_read(model: LanguageModel, texts: list[list[int]]) -> KVCache:
    """A cache with the first START tokens of the first text, and nothing of the others."""
    cache = model.scratch_cache([CAPACITY] * len(texts))
    model.read([Read(0, texts[0][:START], 0)], cache)
    return cache


def contiguous(model: LanguageModel, texts: list[list[int]]) -> tuple[Tensor, KVCache]:
    cache = half_read(model, texts)
    reads = [Read(0, texts[0][START:], LENGTH - START), Read(1, texts[1], 2)]
    return model.read(reads, cache), cache


def scattered(model: LanguageModel, texts: list[list[int]], slots: list[list[int]]) -> tuple[Tensor, KVCache]:
    """The same pass, with its new rows in these slots of each text."""
    cache = half_read(model, texts)
    batch = flatten([Read(0, texts[0][START:], LENGTH - START), Read(1, texts[1], 2)], cache)
    spans = [
        replace(span, paths=[own[: row + 1] for row in range(len(own))])
        for span, own in zip(batch.spans, slots, strict=True)
    ]
    with torch.inference_mode():
        return model.body(batch._replace(slots=[slot for each in slots for slot in each], spans=spans)).logits, cache


def keys_and_values(cache: KVCache, seq_id: int, slots: list[int]) -> Tensor:
    region = cache.region(seq_id)
    region.tokens = [0] * CAPACITY
    return torch.cat([part[:, slots] for layer in region.layers for part in region.layer(layer)])


@pytest.mark.parametrize(("name", "where"), PARAMS)
def test_logits_do_not_depend_on_slots(name: str, where: str, checkpoint: Maker, tmp_path: object) -> None:
    """Bit for bit: only positions determine angles, masks and the order of sums."""
    model, slots = MODELS[name](checkpoint, tmp_path), SLOTS[where]
    texts = [random_tokens(LENGTH, 1), random_tokens(5, 2)]
    expected, plain = contiguous(model, texts)
    logits, cache = scattered(model, texts, slots)
    assert torch.equal(logits, expected)
    places = [list(range(START, LENGTH)), list(range(5))]
    for seq_id in (0, 1):
        ours, theirs = keys_and_values(cache, seq_id, slots[seq_id]), keys_and_values(plain, seq_id, places[seq_id])
        assert torch.equal(ours, theirs)


@native
def test_invalid_slots_are_refused(tmp_path: object) -> None:
    """Kernels write to raw addresses, so slots must exist. Slots that are in use must not be overwritten either."""
    model = compiled("llama", tmp_path)
    cache = model.scratch_cache([16])
    model.read([Read(0, [1, 2, 3], 0)], cache)
    spans = [Span(cache.region(0), 0, 2, 3)]
    for slots in ([3, 16], [2, 3], [-1, 4]):
        with pytest.raises(ValueError, match="new slots must be from 3 to 15"):
            model.body(RaggedBatch([4, 5], [3, 4], slots, spans, [1]))
    with pytest.raises(ValueError, match="slots must equal positions"):
        model.body.generate(RaggedBatch([4, 5], [3, 4], [4, 3], spans, [1]), [1], VOCAB_SIZE, [])  # type: ignore[attr-defined]


def test_reads_are_flattened_into_a_batch() -> None:
    model = LanguageModel(random_model(SPECIES["llama"].config()), Traits("toy", VOCAB_SIZE, 64, 0, row_exact=False))
    cache = model.scratch_cache([16, 16])
    cache.region(1).tokens = [7, 8, 9]
    batch = flatten([Read(0, [1, 2, 3], 2), Read(1, [4, 5], 1)], cache)
    assert batch.ids == [1, 2, 3, 4, 5]
    assert batch.positions == batch.slots == [0, 1, 2, 3, 4]
    assert batch.wanted == [1, 2, 4]
    assert batch.spans == [Span(cache.region(0), 0, 3, 0), Span(cache.region(1), 3, 2, 3)]
    assert batch.is_contiguous
    assert batch._replace(slots=[0, 1, 2, 3, 4]).is_contiguous
    assert not batch._replace(slots=[0, 2, 1, 3, 4]).is_contiguous
