"""A head that computes what the target computes drafts what the target writes, at every position and to any depth.

The weights are made so that the head is a copy of the target. That tests everything between the two: which token is paired with which
hidden state, positions, taps, the order of inputs of a fused layer, the vocabulary, and what is fed back.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, MistralForCausalLM

from foredraft.heads import EagleConfig, EagleHead, HeadCheckpoint, HeadReading, MedusaConfig, MedusaHead
from foredraft.model import Read
from foredraft.model.taps import FINAL_NORM
from tests.heads.running import cache_for

HIDDEN, VOCAB, WINDOW, DEPTH = 32, 48, 4, 5
PROMPT, TEXT = 12, 40
WIDTHS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
}


@pytest.fixture(scope="module")
def target() -> MistralForCausalLM:
    """A target with one layer that sees WINDOW tokens, so that a head, which never reads the first token, can compute the same. Rows of
    its embeddings have size 1 and norms weight 1, so that normalizing an embedding changes nothing."""
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**WIDTHS, sliding_window=WINDOW, tie_word_embeddings=False)).eval()
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            weight.data = torch.randn_like(weight) * weight.shape[1] ** -0.5 * (3 if "lm_head" in name else 1)
    rows = model.model.embed_tokens.weight.data
    rows /= rows.pow(2).mean(-1, keepdim=True).sqrt()
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def text(target: MistralForCausalLM) -> list[int]:
    """A random prompt and the target's greedy text after it."""
    ids = torch.randint(0, VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    while ids.shape[1] < TEXT:
        ids = torch.cat((ids, target(ids, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    assert len(set(ids[0, PROMPT:].tolist())) > 5
    return ids[0].tolist()


def features_of(target: MistralForCausalLM, text: list[int]) -> Tensor:
    """[TEXT, H], the target's final states."""
    return target.model(torch.tensor([text]), use_cache=False).last_hidden_state[0]


def accepted(head: EagleHead, target: MistralForCausalLM, text: list[int]) -> list[int]:
    """How many of DEPTH draft tokens are right, after each history that ends in the target's text."""
    features, counts = features_of(target, text).repeat(1, len(head.config.taps)), []
    for length in range(PROMPT, TEXT - DEPTH):
        cache = cache_for(head, [TEXT])
        reading = head.read([Read(0, text[1:length], 1)], head.fuse(features[: length - 1]), cache)
        drafted = [best(head, reading)]
        while len(drafted) < DEPTH:
            reading = head.read([Read(0, drafted[-1:], 1)], reading.states, cache)
            drafted.append(best(head, reading))
        written = text[length : length + DEPTH]
        counts.append(next((i for i in range(DEPTH) if drafted[i] != written[i]), DEPTH))
    return counts


def best(head: EagleHead, reading: HeadReading) -> int:
    return int(head.on_target(reading.logits)[0].argmax())


def layer_tensors(target: MistralForCausalLM, index: int) -> dict[str, Tensor]:
    return {f"layers.{index}.{name}": tensor for name, tensor in target.model.layers[0].state_dict().items()}


def eagle1(target: MistralForCausalLM) -> HeadCheckpoint:
    """A head whose fc passes on the embedding, and whose layer is the target's. EAGLE-1 has no final norm, which changes no best token."""
    layer = LlamaConfig(**WIDTHS, layer_types=["sliding_attention"], sliding_window=WINDOW)
    config = EagleConfig(
        kind="eagle1",
        layer=layer,
        taps=(FINAL_NORM,),
        target_hidden_size=HIDDEN,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        num_fused_layers=0,
        input_norm=False,
        final_norm=False,
        owns_lm_head=False,
    )
    tensors = layer_tensors(target, 0)
    del tensors["layers.0.input_layernorm.weight"]
    return HeadCheckpoint(
        config, {**tensors, "fc.weight": torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), 1)}
    )


def eagle3(target: MistralForCausalLM, ids: list[int], **settings: Any) -> HeadCheckpoint:
    """A head whose fused layer attends only to its own row (by the angles of constant queries and keys) and outputs the embedding of its
    token as the value; the state before it is normalized to zero. The second layer is the target's. ids: those it can draft."""
    layer = LlamaConfig(
        **{**WIDTHS, "num_hidden_layers": 2, "num_key_value_heads": 4},
        layer_types=["sliding_attention"] * 2,
        sliding_window=WINDOW,
        attention_bias=True,
    )
    config = EagleConfig(
        kind="eagle3",
        layer=layer,
        taps=(0, 1, FINAL_NORM),
        target_hidden_size=HIDDEN,
        vocab_size=VOCAB,
        draft_vocab_size=len(ids),
        target_ids=torch.tensor(ids),
        **settings,
    )
    second = repeated_kv(layer_tensors(target, 1))
    second |= {f"layers.1.self_attn.{name}_proj.bias": torch.zeros(HIDDEN) for name in "qkvo"}
    zeros, ones, eye = torch.zeros(HIDDEN, HIDDEN), torch.ones(HIDDEN), torch.eye(HIDDEN)
    first = {name.replace("layers.1.", "layers.0."): torch.zeros_like(tensor) for name, tensor in second.items()}
    first |= {"layers.0.input_layernorm.weight": ones, "layers.0.hidden_norm.weight": torch.zeros(HIDDEN)}
    first |= {f"layers.0.self_attn.{name}_proj.weight": torch.cat((zeros, zeros), dim=1) for name in "qk"}
    first |= {f"layers.0.self_attn.{name}_proj.bias": 40.0 * (torch.arange(HIDDEN) % 8 == 0) for name in "qk"}
    first |= {
        "layers.0.self_attn.v_proj.weight": torch.cat((eye, zeros), dim=1),
        "layers.0.self_attn.o_proj.weight": eye,
    }
    fc = torch.randn(HIDDEN, 3 * HIDDEN, generator=torch.Generator().manual_seed(2))
    ends = {"fc.weight": fc, "norm.weight": ones, "lm_head.weight": target.lm_head.weight[ids]}
    return HeadCheckpoint(config, {**second, **first, **ends})


def repeated_kv(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with one key-value head for each query head."""
    for name in ("k_proj", "v_proj"):
        key = f"layers.1.self_attn.{name}.weight"
        tensors[key] = tensors[key].view(2, 8, HIDDEN).repeat_interleave(2, dim=0).reshape(HIDDEN, HIDDEN)
    return tensors


def test_an_eagle1_head_that_is_the_target_accepts_everything(target: MistralForCausalLM, text: list[int]) -> None:
    head = EagleHead.of(eagle1(target), target.model.embed_tokens, target.lm_head)
    assert set(accepted(head, target, text)) == {DEPTH}


def test_a_window_one_token_too_short_accepts_less(target: MistralForCausalLM, text: list[int]) -> None:
    """A test of the test above: a layer that sees one token fewer is no copy."""
    head = EagleHead.of(eagle1(target), target.model.embed_tokens, target.lm_head, window=WINDOW - 1)
    counts = accepted(head, target, text)
    assert sum(counts) < 0.8 * DEPTH * len(counts)


@pytest.mark.parametrize("norm_output", [False, True])
def test_an_eagle3_head_that_is_the_target_accepts_everything(
    target: MistralForCausalLM, text: list[int], norm_output: bool
) -> None:
    """With a reduced vocabulary of the ids that the target writes."""
    checkpoint = eagle3(target, sorted(set(text[PROMPT:])), norm_before_residual=True, norm_output=norm_output)
    head = EagleHead.of(checkpoint, target.model.embed_tokens, target.lm_head)
    assert set(accepted(head, target, text)) == {DEPTH}


def test_a_wrong_residual_accepts_less(target: MistralForCausalLM, text: list[int]) -> None:
    checkpoint = eagle3(target, sorted(set(text[PROMPT:])), norm_before_residual=False)
    counts = accepted(EagleHead.of(checkpoint, target.model.embed_tokens, target.lm_head), target, text)
    assert sum(counts) < 0.8 * DEPTH * len(counts)


def test_medusa_heads_that_are_the_target_accept_everything() -> None:
    """The target's next token is a function of its last one, next_id; head h applies it h + 2 times."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.linalg.qr(torch.randn(VOCAB, VOCAB, generator=generator)).Q
    next_id = torch.randperm(VOCAB, generator=generator)
    after, lm_heads = next_id, {}
    for head in range(4):
        after = next_id[after]  # the token head + 2 positions after each
        lm_heads[f"lm_heads.{head}.weight"] = rows[torch.argsort(after)]
    blocks = {f"blocks.{head}.0.weight": torch.zeros(VOCAB, VOCAB) for head in range(4)}
    config = MedusaConfig(
        num_heads=4, block_bias=False, target_hidden_size=VOCAB, vocab_size=VOCAB, draft_vocab_size=VOCAB
    )
    heads = MedusaHead.of(HeadCheckpoint(config, {**blocks, **lm_heads}), lambda x: x)
    drafted = heads(rows).argmax(-1)  # after the token of each row, whose hidden state is that row
    written = [next_id]
    for _ in range(4):
        written.append(next_id[written[-1]])
    assert torch.equal(drafted, torch.stack(written[1:], dim=1))
