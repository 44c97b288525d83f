"""Log-probabilities of tokens under the raw distribution, for requests that ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.engine.sequence import TokenLogprobs, TokenSequence
from foredraft.sampling import to_device


def record_prompt(sequence: TokenSequence, start: int, logits: Tensor) -> None:
    """Record the log-probabilities of prompt tokens. Row i of a read that began at position `start` holds the distribution of token
    start + i + 1. A preempted prompt is read again, but recorded only once."""
    known = len(sequence.prompt_logprobs) - start
    next_ids = sequence.tokens[start + 1 : start + 1 + len(logits)][known:]
    num_top = sequence.sampler.params.prompt_logprobs or 0
    sequence.prompt_logprobs += logprobs_of(logits[known : known + len(next_ids)], next_ids, num_top)


def logprobs_of(logits: Tensor, ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """The log-probabilities of these tokens and of the num_top most likely ones. logits: [N, V], ids: N"""
    if not ids:
        return []
    token_probs = torch.log_softmax(logits.float(), dim=-1)
    own = token_probs.gather(1, to_device(ids, token_probs.device, torch.int64)[:, None])
    ranks = (token_probs > own).sum(-1, keepdim=True) + 1
    top = token_probs.topk(min(num_top, token_probs.shape[1]), dim=-1)
    # one copy for all, since each copy waits for the device
    columns = torch.cat([part.to(torch.float64) for part in (own, ranks, top.values, top.indices)], dim=1).tolist()
    count = top.values.shape[1]
    return [
        TokenLogprobs(token, row[0], int(row[1]), [int(i) for i in row[2 + count :]], row[2 : 2 + count])
        for token, row in zip(ids, columns, strict=True)
    ]
