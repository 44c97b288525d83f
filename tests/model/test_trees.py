"""Trees in one pass: a row equals that row of its chain, and the cache keeps the path that the text takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from foredraft.engine.cache import KVCache
from foredraft.engine.token_tree import path_to
from foredraft.kernels import load_kernels, why_none
from foredraft.model import LanguageModel, LoadOptions, Read, load_model
from foredraft.model.batch import branches_of, paths_of
from foredraft.model.taps import FINAL_NORM
from tests.model.zoo import COMPILED_FORMS, Maker, saved

native = pytest.mark.skipif(load_kernels() is None, reason=f"no compiled kernels here: {why_none()}")
TREES: dict[str, list[int]] = {
    "a chain": [-1, 0, 1, 2],
    "siblings": [-1, 0, 0, 0],
    "two branches": [-1, 0, 0, 1, 2, 3, 4],
    "deep and wide": [-1, 0, 0, 0, 1, 1, 2, 4, 4, 7, 8, 6, 11, 12],
    "behind nothing": [-1, -1, 0, 1, 1],
    "behind a stem": [-1, 0, 1, 2, 2, 3, 4, 5, 5],
}
MODELS: dict[str, tuple[bool, Callable[..., LanguageModel]]] = {
    "library, float32": (False, lambda checkpoint, _: library("llama", checkpoint, "float32", "torch")),
    "library, sliding window": (False, lambda checkpoint, _: library("mistral", checkpoint, "float32", "torch")),
    "library, compiled attention": (False, lambda checkpoint, _: library("gpt2", checkpoint, "bfloat16", "auto")),
    "compiled": (True, lambda _, directory: compiled("qwen3", directory)),
    "compiled, sliding window": (True, lambda _, directory: compiled("mistral", directory)),
    "compiled, caps and windows": (True, lambda _, directory: compiled("gemma2", directory)),
    "compiled, heads of 64": (True, lambda _, directory: compiled("heads of 64", directory)),
    "compiled, heads of 64 and a window": (True, lambda _, directory: compiled("heads of 64 and a window", directory)),
    "compiled, sinks": (True, lambda _, directory: compiled("gpt_oss", directory)),
    "compiled, int8": (True, lambda _, directory: compiled("llama", directory, "int8")),
}
"""By name: whether rows have the same bits in any batch, and a function that makes the model."""


def library(name: str, checkpoint: Maker, dtype: str, kernels: str) -> LanguageModel:
    return load_model(checkpoint(name), LoadOptions(dtype=dtype, device="cpu", kernels=kernels))


def compiled(name: str, directory: str, quantization: str | None = None) -> LanguageModel:
    options = LoadOptions(dtype="bfloat16", device="cpu", quantization=quantization)
    return load_model(saved(COMPILED_FORMS[name].config(), directory), options)


def tokens_of(model: LanguageModel, length: int, seed: int = 0) -> list[int]:
    """Distinct tokens, so that siblings differ."""
    order = torch.randperm(model.traits.vocab_size - 1, generator=torch.Generator().manual_seed(seed))
    return [int(token) for token in order[:length]]


def begun(model: LanguageModel, history: Sequence[int], taps: Sequence[int] = ()) -> KVCache:
    cache = model.scratch_cache([len(history) + 32], taps)
    if history:
        model.read([Read(0, history, 0)], cache)
    return cache


def assert_same(ours: Tensor, theirs: Tensor, is_exact: bool) -> None:
    if is_exact:
        assert torch.equal(ours, theirs)
    else:
        torch.testing.assert_close(ours, theirs, atol=1e-4 if ours.dtype == torch.float32 else 0.02, rtol=0)


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[native] if "compiled" in n else []) for n in MODELS])
def test_a_tree_row_equals_that_of_its_chain(name: str, shape: str, checkpoint: Maker, tmp_path: object) -> None:
    (is_exact, make), parents = MODELS[name], TREES[shape]
    model = make(checkpoint, tmp_path)
    for length in (0, 5, 21, 40):
        history, tokens = tokens_of(model, length), tokens_of(model, length + len(parents))[length:]
        logits = model.read([Read(0, tokens, len(tokens), parents)], begun(model, history))
        for node in range(len(parents)):
            chain = [tokens[i] for i in path_to(parents, node)]
            expected = model.read([Read(0, chain, 1)], begun(model, history))
            assert_same(logits[node], expected[0], is_exact)


@native
@pytest.mark.parametrize("name", ["compiled, heads of 64", "compiled, heads of 64 and a window", "compiled, sinks"])
def test_a_tree_row_after_a_long_text_equals_that_of_its_chain(name: str, checkpoint: Maker, tmp_path: object) -> None:
    """Keys are read in chunks of 256: the tree begins before, in or after the second one's first keys."""
    model, parents = MODELS[name][1](checkpoint, tmp_path), TREES["deep and wide"]
    tokens = tokens_of(model, len(parents))
    for length in (250, 257, 517):
        history = torch.randint(
            model.traits.vocab_size, (length,), generator=torch.Generator().manual_seed(length)
        ).tolist()
        logits = model.read([Read(0, tokens, len(tokens), parents)], begun(model, history))
        for node in range(len(parents)):
            chain = [tokens[i] for i in path_to(parents, node)]
            assert torch.equal(logits[node], model.read([Read(0, chain, 1)], begun(model, history))[0])


@native
def test_trees_and_chains_share_a_pass(tmp_path: object) -> None:
    """They do not affect each other, nor chunked prompts."""
    model = compiled("qwen3", tmp_path)
    parents, history = TREES["deep and wide"], tokens_of(model, 33)
    tokens = tokens_of(model, 33 + len(parents), seed=1)[33:]
    cache = model.scratch_cache([80, 80, 80])
    reads = [Read(0, history, 2), Read(1, tokens, len(tokens), parents), Read(2, history[:7], 1)]
    together = model.read(reads, cache)
    apart = [model.read([read], model.scratch_cache([80, 80, 80])) for read in reads]
    assert torch.equal(together, torch.cat(apart))


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize(
    "name", ["library, float32", *(pytest.param(n, marks=native) for n in ("compiled", "compiled, sliding window"))]
)
def test_the_cache_keeps_the_path_of_the_text(name: str, shape: str, checkpoint: Maker, tmp_path: object) -> None:
    """Keys, values and features of the accepted nodes are where a chain would have them, and the next pass continues from there."""
    (is_exact, make), parents, taps = MODELS[name], TREES[shape], (1, FINAL_NORM)
    model = make(checkpoint, tmp_path)
    history = tokens_of(model, 21)
    tokens = tokens_of(model, 21 + len(parents), seed=2)[21:]
    for node in range(len(parents)):
        cache, plain = begun(model, history, taps), begun(model, history, taps)
        model.read([Read(0, tokens, len(tokens), parents)], cache)
        text = [*history, *(tokens[i] for i in path_to(parents, node))]
        assert cache.keep_prefix_of(0, [*text, 3]) == 1
        assert cache.region(0).tokens == text
        model.read([Read(0, text[21:], 0)], plain)
        for layer in cache.region(0).layers:
            for ours, theirs in zip(cache.region(0).layer(layer), plain.region(0).layer(layer), strict=True):
                assert_same(ours, theirs, is_exact)
        ours, theirs = cache.features(0), plain.features(0)
        assert ours is not None
        assert theirs is not None
        assert_same(ours, theirs, is_exact)
        assert_same(*(model.read([Read(0, [3], 1)], each) for each in (cache, plain)), is_exact)


def test_a_text_that_leaves_the_tree_keeps_its_common_path(checkpoint: Maker, tmp_path: object) -> None:
    model = MODELS["library, float32"][1](checkpoint, tmp_path)
    history, parents = [5, 6, 7], [-1, 0, 0, 1, 2]
    for wanted, kept in (([8, 9, 11], 3 + 3), ([8, 10, 12, 4], 3 + 3), ([8, 4], 3 + 1), ([4], 3), ([8, 10], 3 + 2)):
        cache = begun(model, history)
        model.read([Read(0, [8, 9, 10, 11, 12], 5, parents)], cache)
        text = [*history, *wanted]
        assert len(text) - cache.keep_prefix_of(0, text) == kept
        assert cache.region(0).tokens == text[:kept]
        assert cache.keep_prefix_of(0, text) == len(text) - kept


def test_paths_and_branches_of_a_tree() -> None:
    assert paths_of([-1, 0, 0, 2], 7) == [[7], [7, 8], [7, 9], [7, 9, 10]]
    for parents in ([0], [-1, 2, 0], [-2]):
        with pytest.raises(ValueError, match="must be an earlier row"):
            paths_of(parents, 0)
    branches = branches_of(paths_of(TREES["deep and wide"], 3))
    assert sorted(row for branch in branches for row in branch.rows) == list(range(14))
    for branch in branches:
        assert [slot - 3 for slot in branch.slots[-len(branch.rows) :]] == branch.rows
