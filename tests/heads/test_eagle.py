"""EAGLE heads compared with the programs that their forms come from, and with themselves in other batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft.heads import EagleHead, load_head
from foredraft.heads.module import LMHead
from foredraft.model import Read
from tests.heads.checkpoints import TARGET, Golden, golden
from tests.heads.running import cache_for, run

FORMS = {
    "speculators_llama": "model.safetensors",
    "speculators_qwen3": "model.safetensors",
    "speculators_3_1": "model.safetensors",
    "speculators_norm_before_fc": "model.safetensors",
    "speculators_two_layers": "model.safetensors",
    "safeailab_eagle3": "pytorch_model.bin",
    "safeailab_eagle3_wide_target": "pytorch_model.bin",
    "safeailab_eagle1": "pytorch_model.bin",
    "safeailab_eagle1_no_bias": "pytorch_model.bin",
    "specforge": "model.safetensors",
    "specforge_3_1": "model.safetensors",
    "deepspec": "model.safetensors",
}
"""The name of the file that each form's program writes."""

SETTINGS = {"specforge_3_1": {"norm_output": False}}
"""Settings that a user must give: SpecForge feeds back the state before the norm, whatever its files say."""


def target_of(case: Golden) -> tuple[object, LMHead]:
    """The target's embedding, which these heads do not need, and lm_head."""
    weight = case.inputs.get("lm_head")

    def lm_head(x: Tensor) -> Tensor:
        assert weight is not None
        return x @ weight.to(x.dtype).T

    return None, lm_head


def head_of(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> EagleHead:
    case = golden(name)
    target = TARGET._replace(hidden_size=case.config.get("target_hidden_size") or TARGET.hidden_size)
    checkpoint = load_head(str(case.save(folder, FORMS[name])), target)
    embed, lm_head = target_of(case)
    return EagleHead.of(checkpoint.with_settings(**SETTINGS.get(name, {})), embed, lm_head, dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FORMS)
def test_states_and_logits_are_those_of_the_original_program(name: str, tmp_path: Path) -> None:
    case, head = golden(name), head_of(name, tmp_path)
    got = run(head, case.inputs["ids"].tolist(), case.inputs["features"])
    torch.testing.assert_close(got["states"], case.expected["states"], atol=1e-4, rtol=0)
    torch.testing.assert_close(got["logits"], case.expected["logits"], atol=1e-4, rtol=0)
    assert got["drafted"].tolist() == case.expected["drafted"].tolist()


@pytest.mark.parametrize("name", FORMS)
def test_rows_read_in_pieces_give_the_same_results(name: str, tmp_path: Path) -> None:
    case, head = golden(name), head_of(name, tmp_path)
    whole = run(head, case.inputs["ids"].tolist(), case.inputs["features"])
    pieces = run(head, case.inputs["ids"].tolist(), case.inputs["features"], chunks=[1, 4, 2])
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["speculators_qwen3", "safeailab_eagle1"])
def test_a_batch_gives_what_each_sequence_gives_alone(name: str, tmp_path: Path) -> None:
    """Sequences of different lengths in one pass, one of them drafting from its own state."""
    case, head = golden(name), head_of(name, tmp_path)
    ids, features = case.inputs["ids"].tolist(), case.inputs["features"]
    cache = cache_for(head, [16, 16])
    first = head.read([Read(0, ids[:5], 1)], head.fuse(features[:5]), cache)
    states = torch.cat((first.states, head.fuse(features[:3])))
    both = head.read([Read(0, ids[5:6], 1), Read(1, ids[:3], 2)], states, cache)
    alone = cache_for(head, [16, 16])
    head.read([Read(0, ids[:5], 1)], head.fuse(features[:5]), alone)
    one = head.read([Read(0, ids[5:6], 1)], first.states, alone)
    other = head.read([Read(1, ids[:3], 2)], head.fuse(features[:3]), alone)
    torch.testing.assert_close(both.logits, torch.cat((one.logits, other.logits)), atol=1e-5, rtol=0)
    torch.testing.assert_close(both.states, torch.cat((one.states, other.states)), atol=1e-5, rtol=0)
    assert cache.region(0).tokens == ids[:6]
    assert cache.region(1).tokens == ids[:3]


def test_draft_rows_are_dropped_and_read_again_with_features(tmp_path: Path) -> None:
    """After verification, rows with the head's own states are replaced by rows with features."""
    case, head = golden("safeailab_eagle3"), head_of("safeailab_eagle3", tmp_path)
    ids, features = case.inputs["ids"].tolist(), case.inputs["features"]
    cache = cache_for(head, [16])
    reading = head.read([Read(0, ids[:4], 1)], head.fuse(features[:4]), cache)
    for token in (ids[4], (ids[5] + 1) % 32):
        reading = head.read([Read(0, [token], 1)], reading.states, cache)
    assert cache.keep_prefix_of(0, ids[:7], at_most=4) == 3
    again = head.read([Read(0, ids[4:7], 3)], head.fuse(features[4:7]), cache)
    fresh = head.read([Read(0, ids[:7], 3)], head.fuse(features[:7]), cache_for(head, [16]))
    torch.testing.assert_close(again, fresh, atol=1e-5, rtol=0)


def test_a_window_hides_the_rows_before_it(tmp_path: Path) -> None:
    """A row of a one-layer head with window 3 gives what it gives in a shorter text."""
    case = golden("safeailab_eagle3")
    checkpoint = load_head(str(case.save(tmp_path)), TARGET)
    head = EagleHead.of(checkpoint, *target_of(case), window=3)  # type: ignore[arg-type]
    ids, features = case.inputs["ids"].tolist(), case.inputs["features"]
    long = head.read([Read(0, ids[:7], 1)], head.fuse(features[:7]), cache_for(head, [16]))
    short = head.read([Read(0, ids[4:7], 1)], head.fuse(features[4:7]), cache_for(head, [16]))
    torch.testing.assert_close(long, short, atol=1e-5, rtol=0)
    assert not torch.allclose(run(head, ids, features)["logits"], case.expected["logits"], atol=1e-2)


@pytest.mark.parametrize("name", FORMS)
def test_bfloat16_is_near_float32(name: str, tmp_path: Path) -> None:
    case, head = golden(name), head_of(name, tmp_path, torch.bfloat16)
    got = run(head, case.inputs["ids"].tolist(), case.inputs["features"].bfloat16())
    assert got["logits"].dtype == torch.bfloat16
    error = (got["logits"].float() - case.expected["logits"]).norm() / case.expected["logits"].norm()
    assert error < 0.05


def test_the_targets_lm_head_serves_a_reduced_vocabulary(tmp_path: Path) -> None:
    """Without an lm_head in the file, the rows of the target's lm_head that the table names are used."""
    case = golden("speculators_llama")
    weight = torch.randn(32, 16, generator=torch.Generator().manual_seed(5))
    ids = case.tensors["t2d"].nonzero().flatten()
    explicit = case.having(tensors={"lm_head.weight": weight[ids]})
    checkpoint = load_head(str(case.without(["lm_head.weight"]).save(tmp_path / "without")), TARGET)
    assert not checkpoint.config.owns_lm_head
    borrowing = EagleHead.of(checkpoint, None, lambda x: x @ weight.T)  # type: ignore[arg-type]
    owning = EagleHead.of(load_head(str(explicit.save(tmp_path / "with")), TARGET), None, None)  # type: ignore[arg-type]
    text = case.inputs["ids"].tolist(), case.inputs["features"]
    torch.testing.assert_close(run(borrowing, *text), run(owning, *text), atol=1e-5, rtol=0)


def test_the_targets_embeddings_serve_a_head_without_some(tmp_path: Path) -> None:
    case = golden("safeailab_eagle3")
    table = case.tensors["embed_tokens.weight"].float()
    checkpoint = load_head(str(case.without(["embed_tokens.weight"]).save(tmp_path)), TARGET)
    assert not checkpoint.config.owns_embeddings
    head = EagleHead.of(checkpoint, lambda ids: table[ids], None)  # type: ignore[arg-type]
    assert not any("embed" in name for name in head.state_dict())
    got = run(head, case.inputs["ids"].tolist(), case.inputs["features"])
    torch.testing.assert_close(got["logits"], case.expected["logits"], atol=1e-4, rtol=0)


def test_ids_that_a_head_cannot_draft_have_probability_zero(tmp_path: Path) -> None:
    head = head_of("speculators_llama", tmp_path)
    logits = torch.randn(2, 20, generator=torch.Generator().manual_seed(0))
    whole = head.on_target(logits)
    marked = golden("speculators_llama").tensors["t2d"]
    assert whole.shape == (2, 32)
    assert torch.equal(whole[:, marked], logits)
    assert bool((whole[:, ~marked] == -torch.inf).all())
