"""EAGLE heads run by the compiled kernels, compared with the plain modules."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft.engine.token_tree import ROOT, TreeShape, path_to
from foredraft.heads import CompiledEagle, EagleHead
from foredraft.kernels import (
    DrawSpec,
    InMemory,
    Kernels,
    WeightFormat,
    dequantized,
    load_kernels,
    quantize_int8,
    unquantized,
    why_none,
)
from foredraft.model import Read
from foredraft.model.generation import Generated, generate_step_by_step
from foredraft.sampling.noise import shared_scores
from foredraft.sampling.token_probs import token_probs_under
from tests.heads.checkpoints import golden
from tests.heads.running import cache_for, run
from tests.heads.test_eagle import FORMS, head_of, target_of

KERNELS = load_kernels()
pytestmark = pytest.mark.skipif(KERNELS is None, reason=f"no compiled kernels here: {why_none()}")
SPECS = {
    "greedy": DrawSpec(),
    "seeded": DrawSpec(0.9, keys=[11, -12, 13, 2**62]),
    "drawn": DrawSpec(1.2, uniforms=[0.3, 0.9, 0.1, 0.6]),
    "truncated": DrawSpec(1.2, (5, 0.9, 0.0), uniforms=[0.3, 0.9, 0.1, 0.6]),
}


def kernels() -> Kernels:
    assert KERNELS is not None
    return KERNELS


def compiled(name: str, folder: Path, weight_format: WeightFormat = unquantized) -> tuple[CompiledEagle, EagleHead]:
    """The compiled head, and the plain module in float32 with weights that bfloat16 can represent."""
    plain = head_of(name, folder)
    for parameter in plain.parameters():
        parameter.data = parameter.data.bfloat16().float()
    head = head_of(name, folder, torch.bfloat16)
    table = golden(name).inputs.get("embed", torch.zeros(head.config.layer.vocab_size, head.config.hidden_size))
    weight = golden(name).inputs.get("lm_head", torch.zeros(head.config.vocab_size, head.config.hidden_size))
    lm_head = kernels().pack(InMemory(weight.bfloat16()), None)
    if weight is not None:
        plain._target_lm_head = (lambda x: x @ weight.bfloat16().float().T,)
    return CompiledEagle(head, table.bfloat16(), lm_head, kernels(), weight_format), plain


def test_weights_are_in_memory_only_once(tmp_path: Path) -> None:
    """The packed weights replace those of the module."""
    plain = head_of("safeailab_eagle3", tmp_path, torch.bfloat16)
    original = weakref.ref(plain.layers[0].mlp.gate_proj.weight)  # type: ignore[union-attr,arg-type]
    table = torch.zeros(plain.config.layer.vocab_size, plain.config.hidden_size, dtype=torch.bfloat16)
    head = CompiledEagle(plain, table, kernels().pack(InMemory(table), None), kernels())
    del plain
    gc.collect()
    assert original() is None
    assert head.weight_bytes > 0


@pytest.mark.parametrize("name", FORMS)
def test_states_and_logits_are_those_of_the_module(name: str, tmp_path: Path) -> None:
    head, plain = compiled(name, tmp_path)
    case = golden(name)
    ids, features = case.inputs["ids"].tolist(), case.inputs["features"].bfloat16()
    expected = run(plain, ids, features.float())
    for chunks in (None, [1, 4, 2]):
        got = run(head, ids, features, chunks)  # type: ignore[arg-type]
        for part in ("states", "logits"):
            error = (got[part].float() - expected[part]).norm(dim=-1) / expected[part].norm(dim=-1)
            assert error.max() < 0.04, part


@pytest.mark.parametrize("name", FORMS)
def test_in_int8_states_and_logits_are_near_those_of_the_module(name: str, tmp_path: Path) -> None:
    head, plain = compiled(name, tmp_path, quantize_int8)
    case = golden(name)
    ids, features = case.inputs["ids"].tolist(), case.inputs["features"].bfloat16()
    expected, got = run(plain, ids, features.float()), run(head, ids, features)  # type: ignore[arg-type]
    for part in ("states", "logits"):
        error = (got[part].float() - expected[part]).norm(dim=-1) / expected[part].norm(dim=-1)
        assert error.median() < 0.05, part
        assert error.max() < 0.2, part


@pytest.mark.parametrize("weight_format", [unquantized, quantize_int8])
@pytest.mark.parametrize("name", FORMS)
def test_a_packed_module_computes_what_the_module_does_with_the_same_weights(
    name: str, weight_format: WeightFormat, tmp_path: Path
) -> None:
    """Targets that the kernels do not run in one call have such heads."""
    packed, plain = head_of(name, tmp_path), head_of(name, tmp_path)
    packed.pack(kernels(), weight_format)
    for part in plain.modules():
        if isinstance(part, torch.nn.Linear):
            part.weight.data = dequantized(weight_format(part.weight.bfloat16())).float()
    case = golden(name)
    ids, features = case.inputs["ids"].tolist(), case.inputs["features"]
    expected, got = run(plain, ids, features), run(packed, ids, features)
    for part in ("states", "logits"):
        error = (got[part] - expected[part]).norm(dim=-1) / expected[part].norm(dim=-1)
        assert error.max() < (0.04 if weight_format is unquantized else 0.1), part


def two_reads(head: CompiledEagle, name: str) -> tuple[list[Read], list[Tensor]]:
    """(the reads of two sequences, the states of each)"""
    case = golden(name)
    ids, features = case.inputs["ids"].tolist(), case.inputs["features"].bfloat16()
    end = len(features) - 1
    reads = [Read(0, ids[:end], 1), Read(1, ids[2:4], 1)]
    return reads, [head.fuse(features[:end]), head.fuse(features[2:4])]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", FORMS)
def test_a_draft_in_one_call_equals_one_token_by_token(name: str, spec: str, tmp_path: Path) -> None:
    head, _ = compiled(name, tmp_path)
    reads, parts = two_reads(head, name)
    states = torch.cat(parts)
    lens, specs = [4, 2], [SPECS[spec], DrawSpec()]
    cache = cache_for(head, [32, 32], torch.bfloat16)  # type: ignore[arg-type]
    at_once = head.generate(reads, states, lens, head.config.vocab_size, cache, specs)
    by_step, other = token_by_token(head, reads, states, lens, specs)
    assert at_once.ids == by_step.ids
    assert [cache.region(i).tokens for i in (0, 1)] == [other.region(i).tokens for i in (0, 1)]
    if by_step.token_probs is not None:
        assert at_once.token_probs is not None
        rows = torch.arange(4)
        for token in range(head.config.vocab_size):
            column = torch.full((4, 1), token)
            assert torch.allclose(at_once.token_probs.at(rows, column), by_step.token_probs.at(rows, column), atol=1e-5)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", ["speculators_llama", "safeailab_eagle3"])
def test_ids_beyond_the_vocabulary_are_never_drafted(name: str, spec: str, tmp_path: Path) -> None:
    head, _ = compiled(name, tmp_path)
    assert head.config.target_ids is not None
    reads, states = two_reads(head, name)

    def draft(limit: int) -> Generated:
        cache = cache_for(head, [32, 32], torch.bfloat16)  # type: ignore[arg-type]
        return head.generate(reads, torch.cat(states), [4, 2], limit, cache, [SPECS[spec], DrawSpec()])

    limit = int(head.config.target_ids.median())
    drafted = draft(limit)
    assert drafted.ids[0]
    assert all(token < limit for ids in drafted.ids for token in ids)
    if drafted.token_probs is not None:
        dense = drafted.token_probs.dense(head.config.vocab_size)
        assert float(dense[:, limit:].sum()) == 0.0
        assert dense.sum(-1).tolist() == pytest.approx([1.0] * len(dense))
    lowest = int(head.config.target_ids.min())
    assert lowest > 0
    assert draft(lowest).ids == [[], []]


def two_features(name: str) -> list[Tensor]:
    """The features of each of two_reads, as columns of wider rows."""
    features = golden(name).inputs["features"].bfloat16()
    wider = torch.cat([features, torch.full((len(features), 16), torch.nan, dtype=torch.bfloat16)], dim=1)[
        :, : features.shape[1]
    ]
    return [wider[: len(features) - 1], wider[2:4]]


@pytest.mark.parametrize("weight_format", [unquantized, quantize_int8])
@pytest.mark.parametrize("name", FORMS)
def test_features_are_fused_in_the_call_that_drafts(name: str, weight_format: WeightFormat, tmp_path: Path) -> None:
    head, _ = compiled(name, tmp_path, weight_format)
    reads, states = two_reads(head, name)
    lens, specs, vocab_size = [4, 2], [SPECS["drawn"], DrawSpec()], head.config.vocab_size
    caches = [cache_for(head, [32, 32], torch.bfloat16) for _ in range(2)]  # type: ignore[arg-type]
    expected, got = (
        head.generate(reads, each, lens, vocab_size, cache, specs)
        for each, cache in zip((torch.cat(states), two_features(name)), caches, strict=True)
    )
    assert got.ids == expected.ids
    assert got.token_probs is not None
    assert expected.token_probs is not None
    assert torch.equal(got.token_probs.probs, expected.token_probs.probs)
    shapes, greedy = [*TREES.values()], [DrawSpec()] * 2
    expected_tree, got_tree = (
        head.grow(reads, each, shapes, vocab_size, cache_for(head, [32, 32], torch.bfloat16), greedy)  # type: ignore[arg-type]
        for each in (torch.cat(states), two_features(name))
    )
    assert got_tree == expected_tree


def test_norms_of_features_without_fc_are_left_to_the_module(tmp_path: Path) -> None:
    head = head_of("speculators_norm_before_fc", tmp_path, torch.bfloat16)
    assert CompiledEagle.supports(head)
    head.config = replace(head.config, applies_fc=False)
    assert not CompiledEagle.supports(head)
    head.config = replace(head.config, norm_before_fc=False)
    assert CompiledEagle.supports(head)


def test_features_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """The kernels check nothing beyond this."""
    head, _ = compiled("speculators_llama", tmp_path)
    width = head.config.feature_size
    cache = cache_for(head, [16], torch.bfloat16)  # type: ignore[arg-type]
    bad = {
        "each of 2 rows must have features": torch.zeros(3, width).bfloat16(),
        "bfloat16 with adjacent columns, not .* torch.float32": torch.zeros(2, width),
        f"must be .R, {width}. bfloat16": torch.zeros(2, width + 1).bfloat16(),
        "with adjacent columns": torch.zeros(width, 2).bfloat16().T,
    }
    for message, features in bad.items():
        with pytest.raises(ValueError, match=message):
            head.generate([Read(0, [1, 2], 1)], [features], [1], head.config.vocab_size, cache, [DrawSpec()])
    assert cache.num_held(0) == 0


TREES = {0: TreeShape((ROOT, ROOT, ROOT, 0, 0, 1, 3, 3, 5, 6)), 1: TreeShape((ROOT, 0, 0))}


@pytest.mark.parametrize("spec", ["greedy", "seeded", "seeded and truncated"])
@pytest.mark.parametrize("name", FORMS)
def test_a_tree_in_one_call_equals_one_node_by_node(name: str, spec: str, tmp_path: Path) -> None:
    head, _ = compiled(name, tmp_path)
    reads, parts = two_reads(head, name)
    keys = [11, -12, 13, 2**62]
    specs = [
        {"greedy": DrawSpec(), "seeded": DrawSpec(0.9, keys=keys)}.get(spec, DrawSpec(1.2, (6, 0.95, 0.0), keys=keys)),
        DrawSpec(),
    ]
    cache = cache_for(head, [32, 32], torch.bfloat16)  # type: ignore[arg-type]
    grown = head.grow(reads, torch.cat(parts), [*TREES.values()], head.config.vocab_size, cache, specs)
    for read, states, own_spec, tokens in zip(reads, parts, specs, grown, strict=True):
        shape = TREES[read.seq_id]
        for node, children in shape.children.items():
            path = [tokens[each] for each in path_to(shape.parents, node)]
            if -1 not in path:
                logits = logits_behind(head, read, states, path)
                best = best_ids(logits, own_spec, len(path), len(children))
                assert [tokens[child] for child in children if tokens[child] >= 0] == best
    assert [cache.region(read.seq_id).tokens for read in reads] == [read.tokens for read in reads]
    assert head.generate(
        [Read(read.seq_id, [7], 1) for read in reads],
        torch.cat([part[-1:] for part in parts]),
        [2, 2],
        head.config.vocab_size,
        cache,
        specs,
    ).ids  # the next pass overwrites the slots of the trees


def logits_behind(head: CompiledEagle, read: Read, states: Tensor, path: list[int]) -> Tensor:
    """[V], the logits after a chain."""
    cache = cache_for(head, [32, 32], torch.bfloat16)  # type: ignore[arg-type]
    reading = head.read([read], states, cache)
    for token in path:
        reading = head.read([Read(read.seq_id, [token], 1)], reading.states, cache)
    return head.on_target(reading.logits)[0]


def best_ids(logits: Tensor, spec: DrawSpec, depth: int, count: int) -> list[int]:
    scores = logits.double()
    if spec.temperature > 0:
        probs = token_probs_under(logits[None], [spec.temperature], spec.truncation).dense(len(logits))
        scores = shared_scores(probs, [spec.keys[depth]])[0].log()
    best = scores.sort(descending=True, stable=True)
    possible = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return [token for score, token in possible if score > -torch.inf][:count]


def test_trees_without_room_or_with_draws_are_refused(tmp_path: Path) -> None:
    """The kernels check nothing beyond this."""
    head, _ = compiled("speculators_llama", tmp_path)
    states, reads, shape = torch.zeros(2, 16).bfloat16(), [Read(0, [1, 2], 1)], TreeShape.chain(80)
    vocab_size = head.config.vocab_size
    cache = cache_for(head, [96], torch.bfloat16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="never drawn"):
        head.grow(reads, states, [shape], vocab_size, cache, [DrawSpec(1.0, uniforms=[0.5] * 80)])
    with pytest.raises(RuntimeError, match="no room is reserved"):
        head.grow(reads, states, [shape], vocab_size, cache_for(head, [4], torch.bfloat16), [DrawSpec()])  # type: ignore[arg-type]


def token_by_token(
    head: CompiledEagle, reads: list[Read], states: Tensor, lens: list[int], specs: list[DrawSpec]
) -> tuple[Generated, object]:
    cache = cache_for(head, [32, 32], torch.bfloat16)  # type: ignore[arg-type]
    handed_on = {0: states[: len(reads[0].tokens)], 1: states[len(reads[0].tokens) :]}

    def read(now: list[Read]) -> Tensor:
        reading = head.read(now, torch.cat([handed_on[each.seq_id] for each in now]), cache)
        handed_on.update({each.seq_id: reading.states[i : i + 1] for i, each in enumerate(now)})
        return head.on_target(reading.logits)

    return generate_step_by_step(partial(read), reads, lens, head.config.vocab_size, specs), cache  # type: ignore[arg-type]


def test_states_of_a_wrong_shape_or_dtype_are_refused(tmp_path: Path) -> None:
    """The kernels check nothing beyond this."""
    head, _ = compiled("speculators_llama", tmp_path)
    cache = cache_for(head, [16], torch.bfloat16)  # type: ignore[arg-type]
    for states in (torch.zeros(2, 16), torch.zeros(3, 16).bfloat16(), torch.zeros(2, 8).bfloat16()):
        with pytest.raises(ValueError, match=r"states must be \(2, 16\) bfloat16"):
            head.read([Read(0, [1, 2], 1)], states, cache)
    assert cache.num_held(0) == 0


def test_rows_only_see_their_window(tmp_path: Path) -> None:
    """In a head that is limited to its training length."""
    case = golden("speculators_llama")
    ids, features = case.inputs["ids"].tolist(), case.inputs["features"].bfloat16()
    whole = head_of("speculators_llama", tmp_path, torch.bfloat16)
    embed, lm_head = target_of(case)
    capped = EagleHead(whole.config, embed, lm_head, window=3)  # type: ignore[arg-type]
    capped.load_state_dict(whole.state_dict(), assign=True)
    expected = run(capped.eval(), ids, features)
    zeros = torch.zeros(head_rows := capped.config.layer.vocab_size, capped.config.hidden_size, dtype=torch.bfloat16)
    assert head_rows > 0
    got = run(CompiledEagle(capped, zeros, kernels().pack(InMemory(zeros), None), kernels()), ids, features)  # type: ignore[arg-type]
    error = (got["states"].float() - expected["states"].float()).norm(dim=-1) / expected["states"].float().norm(dim=-1)
    assert error.max() < 0.04
