"""The best tokens of a row under coupled noise, for siblings of a tree.

The target's own token is the argmax of log p plus noise. The k best tokens by log q plus the same noise are likely to contain it, at
any temperature; without noise they are the k most likely tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.sampling.noise import shared_scores
from foredraft.sampling.sampler import Row, adjusted, sampled_groups, select, token_probs_of
from foredraft.sampling.search import top_rows


def top_choices(logits: Tensor, rows: Sequence[Row], counts: Sequence[int]) -> list[list[int]]:
    """The best ids of each row. logits: [R, V]. rows: greedy or coupled. counts: R, how many ids are wanted -> for each row that many,
    best first; fewer if fewer are possible, none for a row without a distribution"""
    logits, failed = adjusted(logits, rows)
    found: list[list[int]] = [[] for _ in rows]
    greedy = [r for r, row in enumerate(rows) if row.spec.is_greedy]
    for group in [group for group in (greedy, *sampled_groups(rows)) if group]:
        most = max(counts[r] for r in group)
        scores, ids = _scored(select(logits, group), [rows[r] for r in group], most)
        is_possible = (scores > (-torch.inf if group is greedy else 0)).tolist()
        for r, row_ids, possible in zip(group, ids.tolist(), is_possible, strict=True):
            if r not in failed:
                kept = zip(row_ids[: counts[r]], possible, strict=False)
                found[r] = [token for token, is_allowed in kept if is_allowed]
    return found


def _scored(logits: Tensor, rows: Sequence[Row], count: int) -> tuple[Tensor, Tensor]:
    """The best scores of rows of one kind and their ids, best first. -> [R, count], [R, count], or fewer columns if there are fewer ids"""
    if rows[0].spec.is_greedy:
        return top_rows(logits, min(count, logits.shape[1]))
    token_probs = token_probs_of(logits, rows)
    scores = shared_scores(token_probs.probs, [row.noise_key for row in rows], token_probs.ids)
    best, columns = scores.topk(min(count, scores.shape[1]), dim=-1)
    return best, columns if token_probs.ids is None else token_probs.ids.gather(1, columns)
