"""A small decoder over the target's own encoder as draft model: it changes no text, and reads the output of the target's encoder."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from foredraft import LLM, ModelError
from foredraft.engine.models import head_format
from foredraft.engine.sources import TokenSource
from foredraft.heads.decoder_draft import load_decoder_draft, new_decoder, num_decoder_layers, own_weights, save_decoder
from foredraft.model import LoadOptions, Read
from foredraft.model.prepare import prepare, rounded_groups
from foredraft.model.source_probe import probe_encoder_decoder
from foredraft.model.source_stack import DecoderStackBody
from foredraft.train.decoder_head import DecoderKind
from tests.model.zoo import ENCODER_DECODERS, random_model
from tests.test_encoder_decoders import (
    KINDS,
    assert_preempted_texts_are_plain_decodings,
    made,
    plain_texts,
    sources,
    texts,
)

NAMES = ("t5", "bart", "m2m_100", "marian")
TREE = [(0,), (1,), (0, 0), (0, 0, 0)]


@cache
def draft(name: str, num_layers: int) -> Path:
    """A draft with this many of the target's layers: the first ones, and the last if there is more than one."""
    target = LLM(made(name), method="none").target
    folder = Path(mkdtemp())
    save_decoder(DecoderKind(num_layers).new(target, [], 0), folder, name, torch.float32)
    return folder


def all_layers(name: str) -> int:
    return num_decoder_layers(made(name).config)


@contextmanager
def encoder_passes(llm: LLM) -> Iterator[list[int]]:
    """Yields a list to which the number of tokens of each encoder pass is appended."""
    found: list[int] = []
    handle = llm.target.hf.get_encoder().register_forward_pre_hook(
        lambda _module, _args, inputs: found.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        yield found
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_texts_are_plain_decodings_with_preemption(name: str, kind: str) -> None:
    assert_preempted_texts_are_plain_decodings(LLM(made(name), draft(name, 1), speculative_tokens=4), name, kind)


@pytest.mark.parametrize("name", NAMES)
def test_with_all_of_the_targets_layers_drafts_are_always_right(name: str) -> None:
    for settings in ({}, {"temperature": 1.0}):
        llm = LLM(made(name), draft(name, all_layers(name)), speculative_tokens=3, seed=1)
        texts(llm, sources(6), **settings)
        acceptance = llm.engine.stats.conditional_acceptance
        assert acceptance is not None
        assert acceptance >= 0.97


def test_trees_change_no_text() -> None:
    llm = LLM(made("t5"), draft("t5", 1), speculative_token_tree=TREE)
    for kind, settings in KINDS.items():
        assert texts(llm, sources(8, seed=4), **settings) == plain_texts("t5", kind)
    assert llm.engine.stats.num_draft_tokens > 0


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_compiled_targets_share_their_encoder_output(quantization: str, tmp_path: Path) -> None:
    copy.deepcopy(made("t5")).to(torch.bfloat16).save_pretrained(tmp_path)
    llm = LLM(tmp_path, draft("t5", 1), speculative_tokens=4, quantization=quantization, dtype="bfloat16")
    plain = llm.with_drafter("none")
    for settings in KINDS.values():
        assert texts(llm, sources(8, seed=4), **settings) == texts(plain, sources(8, seed=4), **settings)
    acceptance = llm.engine.stats.conditional_acceptance
    assert acceptance is not None
    assert acceptance > 0.1  # it read the right source: with a wrong one, 1 of 96 draft tokens would be right


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_over_a_compiled_target_the_draft_is_compiled_too(name: str, quantization: str) -> None:
    """With all of the target's layers its logits are the target's, bit for bit."""
    hf = random_model(ENCODER_DECODERS[name].config())
    if hasattr(hf, "final_logits_bias"):  # it is packed with the lm_head, which both share
        hf.final_logits_bias.normal_(generator=torch.Generator().manual_seed(0))
    options = LoadOptions(device="cpu", dtype="bfloat16", quantization=quantization)
    target = probe_encoder_decoder(
        hf.bfloat16(), name, lambda ours: prepare(ours, name, options), rounded_groups(options)
    )
    decoder = load_decoder_draft(
        str(draft(name, all_layers(name))), target, weight_format=head_format(hf, options).small
    )
    assert type(decoder.body) is DecoderStackBody
    source, text = TokenSource(tuple(sources(1)[0])), [*target.traits.start_ids, 5, 9, 4, 4, 30]
    caches = [
        target.scratch_cache([64], sources=[source], keeps_encoded=True),
        decoder.scratch_cache([64], sources=[source]),
    ]
    expected = target.read([Read(0, text, len(text))], caches[0])
    theirs, own = (cache.source(0) for cache in caches)
    assert theirs is not None
    assert own is not None
    own.encoded = theirs.encoded
    for start in range(len(text)):
        assert torch.equal(decoder.read([Read(0, text[start : start + 1], 1)], caches[1])[0], expected[start])


def test_a_small_cache_is_enough_and_is_freed() -> None:
    traits = LLM(made("bart"), method="none").target.traits
    room = 3 * (64 * traits.bytes_per_token + 80 * traits.bytes_per_source_token)
    llm = LLM(made("bart"), draft("bart", 1), speculative_tokens=4, cache_memory=room, max_num_batched_tokens=40)
    for kind, settings in KINDS.items():
        assert texts(llm, sources(8, seed=4), **settings) == plain_texts("bart", kind)
    assert llm.engine.pool.used == llm.engine.pool.bytes_retained <= room
    llm.engine.drop_retained()
    assert llm.engine.pool.used == 0


def test_the_source_is_encoded_once() -> None:
    llm = LLM(made("t5"), draft("t5", 1), speculative_tokens=3)
    with encoder_passes(llm) as lens:
        texts(llm, sources(3))
    assert len(lens) == 1
    assert llm.engine.stats.num_draft_tokens > 0


def test_the_encoder_output_counts_in_the_budget() -> None:
    llm, plain = LLM(made("t5"), draft("t5", 1), speculative_tokens=3), LLM(made("t5"), method="none")
    source = sources(1)[0]
    for one in (llm, plain):
        texts(one, [source], max_tokens=2)
    width, itemsize = llm.target.hf.config.d_model, 4
    per_token = llm.target.traits.bytes_per_source_token
    held, without = (len(source) * (per_token + extra) for extra in (width * itemsize, 0))
    assert llm.engine.cache.bytes_held - plain.engine.cache.bytes_held == held - without


def test_the_users_model_is_not_changed() -> None:
    hf = made("t5")
    embedding = hf.get_input_embeddings()
    required = [parameter.requires_grad for parameter in hf.parameters()]
    texts(LLM(hf, draft("t5", 1)), sources(1), max_tokens=2)
    assert hf.get_input_embeddings() is embedding
    assert [parameter.requires_grad for parameter in hf.parameters()] == required


def test_the_files_contain_only_the_decoders_own_weights() -> None:
    target = LLM(made("bart"), method="none").target
    names = own_weights(new_decoder(target, 1))
    assert names
    assert not any(name.startswith(("embed_tokens", "embed_positions")) for name in names)
    config = json.loads((draft("bart", 1) / "config.json").read_text())
    assert config["decoder_layers"] == 1
    assert config["spd_type"] == "shared_encoder"


def test_incompatible_targets_and_layers_are_refused() -> None:
    with pytest.raises(ModelError, match="over the encoder of a t5, but the target is a bart"):
        LLM(made("bart"), draft("t5", 1))
    with pytest.raises(ModelError, match="over the encoder of a t5, but the target is a llama"):
        LLM(made("llama"), draft("t5", 1))
    with pytest.raises(ModelError, match=r"1 to \d layers \(the target has \d\), not 9"):
        new_decoder(LLM(made("t5"), method="none").target, 9)
    with pytest.raises(ModelError, match="only with T5, BART and related models"):
        new_decoder(LLM(made("t5gemma"), method="none").target, 1)
