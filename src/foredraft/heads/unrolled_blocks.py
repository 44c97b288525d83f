"""A block drafter over whole texts, with a block at each of many positions, for training. The weights are those of a DFlashHead, and the
results are the same."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from foredraft.heads.corrections import BlockReading
from foredraft.heads.dflash import DFlashHead


def unroll_blocks(head: DFlashHead, features: Tensor, ids: Tensor, anchors: Tensor) -> Iterator[Tensor]:
    """Logits of the first, second, .. draft token after each anchor, with the text's own tokens before each (teacher forcing).

    features: [B, L, F], the target's. ids: [B, L]. anchors: [B, A], positions of pending tokens, from 1 on. -> for each place of the
    draft [B * A, D]; rows for places past the end of the text are meaningless
    """
    reading = read_blocks(head, features, ids, anchors)
    config, correction = head.config, head.correction
    if correction is None:
        yield from reading.logits.unbind(1)[config.first_row :]
        return
    block, memory = correction.prepare(reading), correction.empty_memory(anchors.numel())
    starts = torch.arange(anchors.numel(), device=anchors.device) * config.block_size
    for row in range(config.block_size):
        place = row - config.first_row if row >= config.first_row else -int(correction.begins_earlier)
        previous = ids.gather(1, (anchors + place).clamp(max=ids.shape[1] - 1)).flatten()
        if row < config.first_row and not correction.has_memory:
            continue
        logits, memory = correction(block, starts + row, previous, memory)
        if row >= config.first_row:
            yield logits


def read_blocks(head: DFlashHead, features: Tensor, ids: Tensor, anchors: Tensor) -> BlockReading:
    """DFlashHead.read for a block that begins at each anchor, with the text before it as context. See unroll_blocks. -> the reading
    of B * A blocks"""
    size = head.config.block_size
    context = head.hidden_norm(head.fc(features.to(head.dtype)))
    block_ids = torch.full((*anchors.shape, size), head.config.mask_token, device=ids.device)
    block_ids[..., 0] = ids.gather(1, anchors)
    positions = anchors[..., None] + torch.arange(size, device=ids.device)
    x = head.embed(block_ids.flatten()).to(context.dtype)
    angles = head.angles(positions.flatten(1))
    context_angles = head.angles(torch.arange(ids.shape[1], device=ids.device)[None])
    for layer in head.layers:
        inner = partial(_attention, layer.self_attn, context, context_angles, positions, angles)
        x = layer(x, inner)
    x = head.norm(x)
    return BlockReading(*(each.view(anchors.numel(), size, -1) for each in (head.logits(x), x)))


def _attention(
    attention: Any, context: Tensor, context_angles: Any, positions: Tensor, angles: Any, x: Tensor
) -> Tensor:
    """context: [B, L, H], of the whole texts. positions: [B, A, S], of the rows. x: [B * A * S, H] -> the same"""
    batch, count, size = positions.shape
    rows = x.view(batch, count * size, -1)
    query = _rotated(attention.q_norm(_heads(attention.q_proj(rows), attention)), angles)
    groups = query.shape[1] // (attention.k_proj.out_features // attention.head_dim)
    (key, value), (block_key, block_value) = (
        _keys_and_values(attention, each, by, groups) for each, by in ((context, context_angles), (rows, angles))
    )
    query, block_key, block_value = (
        each.reshape(*each.shape[:2], count, size, -1) for each in (query, block_key, block_value)
    )
    scores = query @ key[:, :, None].transpose(3, 4)
    block_scores = query @ block_key.transpose(3, 4)
    scores, block_scores = (
        (each * attention.head_dim**-0.5).masked_fill(~mask[:, None], -torch.inf)
        for each, mask in zip((scores, block_scores), _masks(attention, positions, context.shape[1]), strict=True)
    )
    weights = torch.softmax(torch.cat((scores, block_scores), dim=-1), dim=-1, dtype=torch.float32).to(value.dtype)
    attended = weights[..., :-size] @ value[:, :, None] + weights[..., -size:] @ block_value
    out: Tensor = attention.o_proj(attended.permute(0, 2, 3, 1, 4).flatten(3).flatten(0, 2))
    return out


def _keys_and_values(attention: Any, x: Tensor, angles: Any, groups: int) -> tuple[Tensor, Tensor]:
    """x: [B, R, H] -> [B, heads, R, head_dim] each"""
    key = _rotated(attention.k_norm(_heads(attention.k_proj(x), attention)), angles)
    value = _heads(attention.v_proj(x), attention)
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def _masks(attention: Any, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Which tokens of the text a row sees, [B, A, S, L], and which rows of its block, [B, A, S, S]."""
    start = positions[..., :1, None]
    rows, keys = positions[..., None], torch.arange(length, device=positions.device)
    return (keys < start) & attention.sees(keys, rows, start), attention.sees(positions[..., None, :], rows, start)


def _heads(x: Tensor, attention: Any) -> Tensor:
    """[B, R, heads * head_dim] -> [B, heads, R, head_dim]"""
    return x.view(*x.shape[:-1], -1, int(attention.head_dim)).transpose(1, 2)


def _rotated(x: Tensor, angles: Any) -> Tensor:
    rotated: Tensor = apply_rotary_pos_emb(x, x, *angles)[0]
    return rotated
