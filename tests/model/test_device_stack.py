"""A decoder over static memory: it gives transformers' logits, and generates tokens in one call. Without a GPU it runs in Triton's
interpreter and without graphs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")


from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.engine.cache import KVCache
from foredraft.engine.engine import Engine
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.token_tree import ROOT, TreeShape, path_to
from foredraft.gpu import Graphs, at_once
from foredraft.kernels import DrawSpec
from foredraft.model import LanguageModel, Read, WarmUpSizes
from foredraft.model.batch import flatten
from foredraft.model.device_stack import DeviceStackBody
from foredraft.model.generation import Generated, generate_step_by_step
from foredraft.model.probe import probe
from foredraft.model.taps import FINAL_NORM
from foredraft.policy import FixedPolicy
from foredraft.sampling import SamplingParams
from tests.host_copies import copied
from tests.model.reference import hidden_states
from tests.model.zoo import DEVICE_FORMS, STACK_FORMS, VOCAB_SIZE, WINDOW, random_model

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
PIECES = (7, 1, 2, 8)
"""The chunks in which a text is read, past the window. The interpreter takes about 50 ms for each row and layer, and a pass has as many
rows as its bucket, a power of two."""
CONTEXT, DEALT_OUT = 64, 128
"""Attention runs one program for each 64 positions, and the interpreter is slow for each."""
GREEDY = DrawSpec()


def drawn(temperature: float, *uniforms: float) -> DrawSpec:
    return DrawSpec(temperature, uniforms=list(uniforms))


def new_body(hf: Any, is_batch_invariant: bool = False, context_len: int = CONTEXT) -> DeviceStackBody:
    runner = Graphs(DEVICE) if HAS_GPU else at_once
    return DeviceStackBody(hf, context_len, runner, is_batch_invariant=is_batch_invariant)


@cache
def loaded(name: str, is_batch_invariant: bool = False, context_len: int = CONTEXT) -> LanguageModel:
    """A model that was checked by the probe, as every model is: two ragged passes are compared with transformers' forward pass."""
    hf = random_model(DEVICE_FORMS[name].config()).to(DEVICE)
    return probe(hf, name, context_len, lambda ours: new_body(ours, is_batch_invariant, context_len))


def random_tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def room_for(model: LanguageModel, *lengths: int) -> KVCache:
    cache = model.new_cache(MemoryPool(1 << 30))
    for seq_id, length in enumerate(lengths):
        assert cache.reserve(seq_id, length)
    return cache


@torch.inference_mode()
def reference(name: str, tokens: Sequence[int]) -> Tensor:
    model = random_model(DEVICE_FORMS[name].config())
    logits: Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("name", ["two heads", *(pytest.param(n, marks=pytest.mark.slow) for n in STACK_FORMS)])
@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_logits_and_features_are_those_of_transformers(name: str, is_batch_invariant: bool) -> None:
    model, tokens = loaded(name, context_len=DEALT_OUT), random_tokens(sum(PIECES))
    hf = random_model(DEVICE_FORMS[name].config())
    if is_batch_invariant:
        ours = random_model(DEVICE_FORMS[name].config()).to(DEVICE)
        model = LanguageModel(ours, model.traits, new_body(ours, True, DEALT_OUT))
    taps = (1, FINAL_NORM, hf.config.num_hidden_layers, 0)
    cache, parts, done = model.new_cache(MemoryPool(1 << 30), taps), [], 0
    assert cache.reserve(0, len(tokens))
    for size in PIECES:
        piece = tokens[done : done + size]
        parts.append(model.read([Read(0, piece, len(piece))], cache).cpu())
        done += size
    expected = reference(name, tokens)
    error = (torch.cat(parts) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 1e-4
    assert cache.region(0).tokens == tokens
    tokens += [5, 6]
    model.read([Read(0, tokens[-2:], 1)], cache)  # the features of rows without logits are kept, too
    features = cache.features(0)
    assert features is not None
    assert torch.allclose(features.cpu(), hidden_states(hf, tokens, taps), atol=1e-3)


@pytest.fixture
def rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply row by row in Triton's interpreter. It multiplies with NumPy, where on some processors a row's bits depend on its place
    in the block; on a GPU they do not."""
    product = np.matmul

    def by_rows(a: Any, b: Any, **options: Any) -> Any:
        return np.concatenate([product(a[..., i : i + 1, :], b, **options) for i in range(a.shape[-2])], axis=-2)

    monkeypatch.setattr(np, "matmul", by_rows)


@pytest.mark.usefixtures("rows_alone")
@pytest.mark.parametrize("name", ["two heads", pytest.param("mistral", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "parents",
    [
        pytest.param([-1, 0, 0, 1, 2], id="two branches"),
        pytest.param([-1, 0, 1, 1, 2, 2, 3], id="behind a stem", marks=pytest.mark.slow),
    ],
)
def test_a_tree_row_has_the_bits_of_its_chain(name: str, parents: list[int]) -> None:
    """Also beside another sequence's chain. The cache keeps the path of the text, from which the next pass continues."""
    model, history = loaded(name, True), random_tokens(WINDOW + 1)
    tokens, other = [*range(1, len(parents) + 1)], random_tokens(3, 1)
    ends = [node for node in range(len(parents)) if node not in parents]
    for end in ends:
        path = path_to(parents, end)
        cache, plain = (room_for(model, len(history) + len(parents) + 1, len(other)) for _ in range(2))
        for each in (cache, plain):
            model.read([Read(0, history, 0)], each)
        reads = [Read(0, tokens, len(tokens), parents), Read(1, other, len(other))]
        logits = model.read(reads, cache)
        chain = [tokens[node] for node in path]
        expected = model.read([Read(0, chain, len(chain)), Read(1, other, len(other))], plain)
        assert torch.equal(logits[path], expected[: len(chain)])
        assert torch.equal(logits[len(tokens) :], expected[len(chain) :])
        assert cache.keep_prefix_of(0, [*history, *chain, 9]) == 1
        for layer in cache.region(0).layers:
            for ours, theirs in zip(cache.region(0).layer(layer), plain.region(0).layer(layer), strict=True):
                assert torch.equal(ours, theirs)
        assert torch.equal(model.read([Read(0, [9], 1)], cache), model.read([Read(0, [9], 1)], plain))


def generated(
    model: LanguageModel,
    lens: Sequence[int],
    specs: Sequence[DrawSpec],
    *,
    at_once: bool,
    vocab_size: int = VOCAB_SIZE - 3,
) -> tuple[Generated, KVCache]:
    """Generate after histories of several lengths, the first of which is half read."""
    histories = [random_tokens(9, 1), random_tokens(1, 2), random_tokens(WINDOW + 1, 3)][: len(lens)]
    cache = room_for(model, *(len(history) + length for history, length in zip(histories, lens, strict=True)))
    model.read([Read(0, histories[0][:7], 0)], cache)
    reads = [Read(0, histories[0][7:], 1), *(Read(i, own, 1) for i, own in enumerate(histories) if i)]
    if at_once:
        return model.generate(reads, lens, vocab_size, cache, specs), cache
    return generate_step_by_step(partial(model.read, cache=cache), reads, lens, vocab_size, specs), cache


SEEDED = DrawSpec(0.8, keys=[11, -12, 13, 2**62])
SPECS = {
    "greedy": [GREEDY] * 3,
    "of every kind": [SEEDED, GREEDY, drawn(1.5, 0.7, 0.2)],
    "drawn": [drawn(0.8, 0.1, 0.9, 0.4, 0.5), drawn(1.5, 0.7), drawn(0.5, 0.99, 0.01)],
    "drawn and greedy": [GREEDY, drawn(2.0, 0.7), GREEDY],
    "seeded": [SEEDED, SEEDED, GREEDY],
}
PAIRS = [
    ("two heads", "greedy"),
    *product(("two heads", "qwen3", "mistral"), ["of every kind"]),
    *product(["llama"], SPECS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "specs"), PAIRS)
def test_generating_in_one_call_equals_step_by_step(name: str, specs: str) -> None:
    model, lens = loaded(name), [4, 1, 2]
    assert model.body.can_generate(SPECS[specs])  # type: ignore[attr-defined]
    ours, our_cache = generated(model, lens, SPECS[specs], at_once=True)
    theirs, their_cache = generated(model, lens, SPECS[specs], at_once=False)
    assert ours.ids == theirs.ids
    assert (ours.token_probs is None) == (theirs.token_probs is None)
    if ours.token_probs is not None and theirs.token_probs is not None:
        assert torch.allclose(ours.token_probs.probs, theirs.token_probs.probs, atol=1e-5)
        assert ours.token_probs.probs.shape == theirs.token_probs.probs.shape
    for seq_id in range(3):
        assert our_cache.region(seq_id).tokens == their_cache.region(seq_id).tokens
        for layer in (0, 1):
            pairs = zip(our_cache.region(seq_id).layer(layer), their_cache.region(seq_id).layer(layer), strict=True)
            assert all(torch.allclose(a, b, atol=1e-4) for a, b in pairs)


def test_distributions_are_as_wide_as_the_targets_vocabulary() -> None:
    """A draft model may know fewer ids."""
    model, specs = loaded("two heads"), [GREEDY, drawn(0.8, 0.3)]
    ours, theirs = (
        generated(model, [1, 1], specs, at_once=once, vocab_size=VOCAB_SIZE + 4)[0] for once in (True, False)
    )
    assert ours.token_probs is not None
    assert theirs.token_probs is not None
    assert ours.token_probs.probs.shape == (1, VOCAB_SIZE + 4)
    assert torch.allclose(ours.token_probs.probs, theirs.token_probs.probs, atol=1e-5)


@pytest.mark.slow
def test_truncated_sampling_takes_a_pass_for_each_token() -> None:
    model = loaded("two heads")
    for spec in (DrawSpec(0.8, (10, 1.0, 0.0), uniforms=[0.3, 0.6]), DrawSpec(0.8, (10, 1.0, 0.0), keys=[1, 2])):
        assert not model.body.can_generate([GREEDY, spec])  # type: ignore[attr-defined]
        ours, _ = generated(model, [2, 2], [GREEDY, spec], at_once=True)
        theirs, _ = generated(model, [2, 2], [GREEDY, spec], at_once=False)
        assert ours.ids == theirs.ids


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", [GREEDY, drawn(1.0, 0.5, 0.5, 0.5), DrawSpec(1.0, keys=[1, 2, 3])], ids=["greedy", "drawn", "seeded"]
)
def test_generation_ends_where_the_model_gives_nan(spec: DrawSpec) -> None:
    hf = random_model(DEVICE_FORMS["two heads"].config()).to(DEVICE)
    model = probe(hf, "llama", CONTEXT, new_body)
    sound, _ = generated(model, [3, 3], [GREEDY, spec], at_once=True)
    poisoned = sound.ids[1][0]
    hf.model.embed_tokens.weight.data[poisoned] = torch.nan
    ours, _ = generated(model, [3, 3], [GREEDY, spec], at_once=True)
    assert ours.ids[1] == [poisoned]
    assert ours.ids[0] == sound.ids[0][: sound.ids[0].index(poisoned) + 1 if poisoned in sound.ids[0] else None]


def test_a_launched_pass_has_the_bits_of_one_over_known_tokens() -> None:
    """Beside a text without a draft. It serves only reads of the tokens that it has read."""
    model = loaded("two heads")
    launched_cache, cache = room_for(model, 8, 8), room_for(model, 8, 8)
    ids = copied(torch.tensor([[31, 32], [33, -1]], device=DEVICE))
    known = [Read(0, [1, 2, 32, 33], 3), Read(1, [5], 1)]
    launched = model.launch_read([Read(0, [1, 2, -2, -3], 3), Read(1, [5], 1)], launched_cache, ids)
    assert launched is not None
    assert launched_cache.num_held(0) == 0
    expected = model.read(known, cache)
    assert torch.equal(model.read(known, launched_cache, launched), expected)
    assert launched_cache.region(0).tokens == [1, 2, 32, 33]
    assert not launched.is_of([Read(0, [1, 2, 32], 2), Read(1, [5], 1)])
    ended = model.launch_read([Read(0, [31, -4], 2)], launched_cache, ids)
    assert ended is not None
    assert not ended.is_of([Read(0, [31, 0], 2)])


def test_placeholders_of_another_device_start_no_pass() -> None:
    model = loaded("two heads")
    batch = flatten([Read(0, [-1], 1)], room_for(model, 4))
    elsewhere = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    assert model.body.launch(batch, elsewhere) is None  # type: ignore[attr-defined]


def test_a_sequence_can_move_in_memory() -> None:
    """A region that grows is copied elsewhere, so graphs must not contain addresses of a sequence's memory."""
    model, tokens = loaded("two heads"), random_tokens(12)
    cache = room_for(model, 4)
    first = model.read([Read(0, tokens[:4], 4)], cache)
    assert cache.reserve(0, 200)
    second = model.read([Read(0, tokens[4:8], 4)], cache)
    assert torch.allclose(torch.cat([first, second]).cpu(), reference("two heads", tokens[:8]), atol=1e-3)


@pytest.mark.slow
def test_warming_up_changes_no_result() -> None:
    hf = random_model(DEVICE_FORMS["two heads"].config()).to(DEVICE)
    model = probe(hf, "llama", CONTEXT, new_body)
    before, _ = generated(model, [4, 1, 2], SPECS["greedy"], at_once=True)
    for drafts in (False, True):
        model.warm_up(WarmUpSizes(max_num_seqs=2, max_tokens=2, vocab_size=VOCAB_SIZE - 3, drafts=drafts))
    after, _ = generated(model, [4, 1, 2], SPECS["greedy"], at_once=True)
    assert before.ids == after.ids


@torch.inference_mode()
def test_warming_up_writes_to_no_sequence() -> None:
    """The inputs of a pass still have the addresses of the last sequence that it read."""
    model = probe(random_model(DEVICE_FORMS["two heads"].config()).to(DEVICE), "llama", CONTEXT, new_body)
    cache = room_for(model, 8)
    model.read([Read(0, [1, 2], 2)], cache)
    region = cache.region(0)
    for layer in region.layers:
        blank = [torch.zeros_like(part) for part in region.along(layer, 0, [0, 1])]
        region.write_to(layer, *(part[:, :2] for part in blank), [0, 1])
    model.warm_up(WarmUpSizes(max_num_seqs=1, max_tokens=2, vocab_size=VOCAB_SIZE, drafts=False))
    assert not any(part.any() for layer in region.layers for part in region.along(layer, 0, [0, 1]))


PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=5),
    "seeded": SamplingParams(temperature=1.0, seed=3, max_tokens=5),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [None, TreeShape((ROOT, ROOT, 0))], ids=["chains", "trees"])
@pytest.mark.parametrize("params", list(PARAMS))
def test_drafts_do_not_change_the_text(params: str, shape: TreeShape | None) -> None:
    """Through the engine, two texts at a time, with another model of the same form as draft model."""
    target, draft = loaded("two heads"), loaded("two heads, biases")
    texts = []
    for draft_len in (0, 3):
        pool = MemoryPool(1 << 26)
        drafter = DraftModelDrafter(draft, VOCAB_SIZE, pool)
        policy = FixedPolicy("DraftModelDrafter", shape)
        engine = Engine(target, drafter, pool, speculative_tokens=draft_len, policy=policy)
        sequences = [engine.add(random_tokens(length, length), PARAMS[params]) for length in (2, 5)]
        while engine.has_work:
            engine.step()
        texts.append([sequence.tokens for sequence in sequences])
        assert (engine.stats.num_draft_tokens > 0) == (draft_len > 0)
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_sampled_drafts_are_verified_by_ratio() -> None:
    target, draft, pool = loaded("two heads"), loaded("two heads, biases"), MemoryPool(1 << 26)
    engine = Engine(target, DraftModelDrafter(draft, VOCAB_SIZE, pool), pool, speculative_tokens=2, seed=0)
    sequence = engine.add(random_tokens(5), SamplingParams(temperature=1.0, max_tokens=6))
    while engine.has_work:
        engine.step()
    assert sequence.num_output == 6
    assert sequence.error is None
    assert engine.stats.num_draft_tokens > 0
