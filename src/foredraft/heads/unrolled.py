"""An EAGLE head over whole texts, several draft tokens deep, for training (training-time test, EAGLE-3, arXiv:2503.01840). The
weights are those of an EagleHead, and the results are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from foredraft.heads.eagle import EagleHead

_KeysAndValues = list[tuple[Tensor, Tensor]]
"""The keys and values of one layer for each step so far, [B, heads, L, D] each."""


def unroll(head: EagleHead, features: Tensor, next_ids: Tensor, num_steps: int) -> Iterator[Tensor]:
    """Logits of the first, second, .. draft token after every position. See unroll_states. -> for each step [B, L, D]"""
    for states in unroll_states(head, features, next_ids, num_steps):
        yield head.logits(states.flatten(0, 1)).view(*states.shape[:2], -1)


def unroll_states(head: EagleHead, features: Tensor, next_ids: Tensor, num_steps: int) -> Iterator[Tensor]:
    """The inputs of the head's lm_head for the first, second, .. draft token after every position.

    features: [B, L, F], of the tokens at positions 0 .. L - 1. next_ids: [B, L], the tokens at positions 1 .. L. Row P of step j
    reads the text's token P + 1 + j with the target's features of P (j = 0), or with the head's own state from step j - 1. A head that
    drafts in one pass reads its mask token and mask state from step 1 on. The row sees the rows of step 0 up to P, and its own
    chain. -> for each step [B, L, H]; the last j rows of step j are meaningless
    """
    states = head.fuse(features)
    stores: list[_KeysAndValues] = [[] for _ in head.layers]
    for step in range(num_steps):
        ids = _ids_of_step(head, next_ids, step)
        embeds = head.embed(ids.flatten()).view(*ids.shape, -1).to(states.dtype)
        x = head.fc(torch.cat((embeds, states), dim=-1)) if head.config.kind == "eagle1" else states
        positions = torch.arange(step, step + ids.shape[1], device=ids.device)[None]
        angles = head.rotary_emb(x, positions)
        for layer, store in zip(head.layers, stores, strict=True):
            x = _layer(layer, embeds, x, angles, store)
        normalized = head.norm(x)
        yield normalized
        if head.config.mask_token is None:
            states = normalized if head.config.norm_output else x
        else:
            states = head.mask_state.expand_as(x)


def _ids_of_step(head: EagleHead, next_ids: Tensor, step: int) -> Tensor:
    """[B, L], the ids that the rows read"""
    if step and head.config.mask_token is not None:
        return torch.full_like(next_ids, head.config.mask_token)
    return functional.pad(next_ids[:, step:], (0, min(step, next_ids.shape[1])))


def _layer(layer: Any, embeds: Tensor, x: Tensor, angles: tuple[Tensor, Tensor], store: _KeysAndValues) -> Tensor:
    """[B, L, H] -> [B, L, H]"""
    inputs, residual = layer.inputs(embeds, x)
    x = residual + _attention(layer.self_attn, inputs, angles, store)
    out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
    return out


def _attention(attention: Any, x: Tensor, angles: tuple[Tensor, Tensor], store: _KeysAndValues) -> Tensor:
    """x: [B, L, input] -> [B, L, H]"""
    query, key, value = (
        linear(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    query, key = apply_rotary_pos_emb(attention.q_norm(query), attention.k_norm(key), *angles)
    groups = query.shape[1] // key.shape[1]
    store.append((key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
    attended = _attend(query, store, attention.head_dim**-0.5)
    out: Tensor = attention.o_proj(attended.transpose(1, 2).flatten(2))
    return out


def _attend(query: Tensor, store: _KeysAndValues, scale: float) -> Tensor:
    """Attend to the rows of step 0 up to a row's own position, and to later steps at that position. query: [B, H, L, D] -> the same"""
    (first_keys, first_values), *chain = store
    if not chain:
        return functional.scaled_dot_product_attention(query, first_keys, first_values, is_causal=True, scale=scale)
    length = query.shape[2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ first_keys.transpose(2, 3) * scale).masked_fill(hidden, -torch.inf)
    own = [(query * keys).sum(-1, keepdim=True) * scale for keys, _ in chain]
    weights = torch.softmax(torch.cat([scores, *own], dim=-1), dim=-1, dtype=torch.float32).to(query.dtype)
    attended = weights[..., :length] @ first_values
    for index, (_, values) in enumerate(chain):
        attended = attended + weights[..., length + index : length + index + 1] * values
    return attended
