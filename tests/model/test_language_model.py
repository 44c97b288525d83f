"""The promises of LanguageModel with any body, mostly tested on a small random model with transformers' code."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from foredraft.engine.cache import KVCache
from foredraft.engine.memory_pool import MemoryPool
from foredraft.errors import ModelError
from foredraft.kernels import DrawSpec
from foredraft.model import Generated, LanguageModel, Read, WarmUpSizes
from foredraft.model.language_model import Traits
from foredraft.model.library import LibraryBody
from foredraft.model.taps import FINAL_NORM
from tests.model.reference import greedy, hidden_states
from tests.model.zoo import SPECIES, VOCAB_SIZE, random_model

CONTEXT, BYTES_PER_TOKEN = 64, 10
FIRST, SECOND = [3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]


@pytest.fixture
def model() -> LanguageModel:
    hf = random_model(SPECIES["llama"].config())
    return LanguageModel(hf, Traits("toy", VOCAB_SIZE, CONTEXT, BYTES_PER_TOKEN, row_exact=False))


@torch.inference_mode()
def reference(model: LanguageModel, tokens: Sequence[int]) -> Tensor:
    """transformers' own logits of one text, [T, V]."""
    logits: Tensor = model.hf(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def test_reading_gives_the_last_rows_of_each_read_and_fills_the_cache(model: LanguageModel) -> None:
    cache = model.scratch_cache([8, 8])
    first = model.read([Read(0, FIRST[:5], 0), Read(1, SECOND[:1], 1)], cache)
    assert torch.allclose(first, reference(model, SECOND)[:1], atol=1e-3)
    assert [cache.region(i).tokens for i in (0, 1)] == [FIRST[:5], SECOND[:1]]
    second = model.read([Read(1, SECOND[1:], 2), Read(0, FIRST[5:], 1)], cache)
    expected = torch.cat([reference(model, SECOND)[1:], reference(model, FIRST)[-1:]])
    assert torch.allclose(second, expected, atol=1e-3)
    assert [cache.region(i).tokens for i in (0, 1)] == [FIRST, SECOND]


def test_bad_reads_are_refused_and_leave_no_trace(model: LanguageModel) -> None:
    cache = model.new_cache(MemoryPool(1 << 20))
    with pytest.raises(RuntimeError, match="sequence 0: no room is reserved for 8 more tokens"):
        model.read([Read(0, FIRST, 1)], cache)
    assert cache.reserve(0, 8)
    with pytest.raises(RuntimeError, match="sequence 0: 9 rows of logits were requested for 8 tokens"):
        model.read([Read(0, FIRST, 9)], cache)
    with pytest.raises(RuntimeError, match="sequence 1: no room is reserved"):
        model.read([Read(0, FIRST, 1), Read(1, SECOND, 1)], cache)
    assert cache.num_held(0) == 0


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_features_are_the_hidden_states_of_transformers(name: str) -> None:
    """For all rows of ragged batches, read in two passes, with taps in the requested order."""
    hf = random_model(SPECIES[name].config())
    model = LanguageModel(hf, Traits(name, VOCAB_SIZE, CONTEXT, BYTES_PER_TOKEN, row_exact=False))
    taps = (hf.config.num_hidden_layers, 0, FINAL_NORM, 1)
    cache = room_with_taps(model, taps)
    model.read([Read(0, FIRST[:5], 1)], cache)
    model.read([Read(0, FIRST[5:], 0), Read(1, SECOND, 2)], cache)
    for seq_id, tokens in enumerate((FIRST, SECOND)):
        features = cache.features(seq_id)
        assert features is not None
        assert torch.allclose(features, hidden_states(hf, tokens, taps), atol=1e-3)


def test_features_are_dropped_moved_and_copied_with_their_tokens(model: LanguageModel) -> None:
    taps = (1, FINAL_NORM)
    cache = room_with_taps(model, taps)
    model.read([Read(0, FIRST, 0)], cache)
    before = features_of(cache, 0).clone()
    cache.keep_prefix_of(0, [*FIRST[:3], 99])
    assert torch.equal(features_of(cache, 0), before[:3])
    cache.region(0).resize(32)
    cache.region(1).copy_prefix(cache.region(0), 2)
    assert torch.equal(features_of(cache, 0), before[:3])
    assert torch.equal(features_of(cache, 1), before[:2])
    model.read([Read(0, FIRST[3:], 0)], cache)
    assert torch.allclose(features_of(cache, 0), before, atol=1e-4)


def test_features_count_in_the_memory_per_token(model: LanguageModel) -> None:
    width = model.hf.config.hidden_size
    assert model.bytes_per_token((0, 1, FINAL_NORM)) == BYTES_PER_TOKEN + 3 * width * 4
    assert model.new_cache(MemoryPool(1), (0, 1)).bytes_per_token == BYTES_PER_TOKEN + 2 * width * 4


def test_without_taps_there_are_no_features(model: LanguageModel) -> None:
    cache = model.scratch_cache([8])
    model.read([Read(0, SECOND, 1)], cache)
    assert cache.features(0) is None


@pytest.mark.parametrize("tap", [-2, 3])
def test_a_nonexistent_tap_is_refused(model: LanguageModel, tap: int) -> None:
    with pytest.raises(
        ModelError,
        match=r"toy has 2 layers, but hidden states .* 0 to 1 are the inputs of its layers, 2 is the output of the last",
    ):
        model.new_cache(MemoryPool(1), (1, tap))


def room_with_taps(model: LanguageModel, taps: Sequence[int]) -> KVCache:
    cache = model.new_cache(MemoryPool(1 << 20), taps)
    assert cache.reserve(0, 16)
    assert cache.reserve(1, 16)
    return cache


def features_of(cache: KVCache, seq_id: int) -> Tensor:
    features = cache.features(seq_id)
    assert features is not None
    return features


def test_generated_text_is_that_of_transformers(model: LanguageModel) -> None:
    """The last token is not in the cache, the others are."""
    cache = model.scratch_cache([32, 32])
    model.read([Read(0, FIRST[:4], 0)], cache)
    reads, lens = [Read(0, FIRST[4:], 1), Read(1, SECOND, 1)], [6, 3]
    generated = model.generate(reads, lens, VOCAB_SIZE, cache, [DrawSpec()] * 2)
    expected = [text[:n] for text, n in zip(greedy(model.hf, [FIRST, SECOND], 6), lens, strict=True)]
    assert generated == Generated(expected)
    assert cache.region(0).tokens == [*FIRST, *expected[0][:-1]]
    assert cache.region(1).tokens == [*SECOND, *expected[1][:-1]]


def test_generated_ids_are_within_the_given_vocabulary_size(model: LanguageModel) -> None:
    spec = DrawSpec(1.0, uniforms=[0.5, 0.999])
    ids, token_probs = model.generate([Read(0, FIRST, 1)], [2], 5, model.scratch_cache([32]), [spec])
    assert len(ids[0]) == 2
    assert max(ids[0]) < 5
    assert token_probs is not None
    assert token_probs.probs.shape == (2, 5)
    assert torch.allclose(token_probs.probs.sum(1), torch.ones(2))


def test_generating_without_reads_gives_nothing(model: LanguageModel) -> None:
    assert model.generate([], [], VOCAB_SIZE, model.scratch_cache([]), []) == Generated([])


def test_the_users_model_is_not_changed_until_take_over(model: LanguageModel) -> None:
    before = model.hf.config._attn_implementation
    cache = model.scratch_cache([16])
    plain = model.read([Read(0, FIRST, 8)], cache)
    assert model.hf.config._attn_implementation == before
    model.take_over()
    assert model.hf.config._attn_implementation == "foredraft"
    assert torch.equal(model.read([Read(0, FIRST, 8)], model.scratch_cache([16])), plain)


def test_new_and_scratch_caches_have_the_right_sizes(model: LanguageModel) -> None:
    pool = MemoryPool(BYTES_PER_TOKEN * 64)
    cache = model.new_cache(pool)
    assert cache.reserve(0, 64)
    assert (pool.free, cache.max_len) == (0, CONTEXT)
    assert not cache.reserve(1, 1)
    scratch = model.scratch_cache([3, 40])
    assert [scratch.region(i).capacity for i in (0, 1)] == [16, 48]
    assert scratch.pool.total == 0


def test_warm_up_passes_the_sizes_to_the_body(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[WarmUpSizes] = []
    monkeypatch.setattr(LibraryBody, "warm_up", lambda body, given: sizes.append(given))
    model.warm_up(WarmUpSizes(4, 5, VOCAB_SIZE, drafts=False))
    assert sizes == [WarmUpSizes(4, 5, VOCAB_SIZE, drafts=False)]


def test_on_a_cpu_passes_are_synchronous(model: LanguageModel) -> None:
    assert model.device == torch.device("cpu")
    assert not model.runs_ahead
