"""Generate several tokens after each sequence, chosen as draw specs say, as a draft model does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from foredraft.kernels import DrawSpec
from foredraft.model.batch import Read
from foredraft.sampling import Pending, TokenProbs, choose_with
from foredraft.utils.host_copy import HostCopy


class Generated(NamedTuple):
    """ids: the tokens after each read. token_probs: the distributions of all drawn tokens, lens[i] rows for each read that draws, in
    order; None if no read draws. Rows of tokens that were not reached are arbitrary."""

    ids: list[list[int]]
    token_probs: TokenProbs | None = None


class Generation(NamedTuple):
    """A generation that a device may still be computing. ids: [K, N], the tokens of reads[i] in column i, -1 from where it ended early;
    None if nothing is under way."""

    result: Pending[Generated]
    ids: HostCopy | None = None


def generate_step_by_step(
    read: Callable[[Sequence[Read]], Tensor],
    reads: Sequence[Read],
    lens: Sequence[int],
    vocab_size: int,
    specs: Sequence[DrawSpec],
) -> Generated:
    """LanguageModel.generate with one pass per token. read: runs a pass -> logits [len(reads), V]"""
    ids: list[list[int]] = [[] for _ in reads]
    token_probs: dict[tuple[int, int], Tensor] = {}
    open_reads = {i: replace(read, num_logits=1) for i, read in enumerate(reads)}
    for step in range(max(lens)):
        logits = read(list(open_reads.values()))[:, :vocab_size]
        tokens, probs_of_rows = choose_with([specs[i] for i in open_reads], step, logits)
        for row, (i, token) in enumerate(zip(list(open_reads), tokens, strict=True)):
            if row in probs_of_rows:
                token_probs[i, step] = probs_of_rows[row]
            if token >= 0:
                ids[i].append(token)
            open_reads[i] = Read(reads[i].seq_id, [token], 1)
            if token < 0 or len(ids[i]) == lens[i]:
                del open_reads[i]
        if not open_reads:
            break
    return Generated(ids, _stacked(token_probs, lens, vocab_size, specs))


def _stacked(
    token_probs: dict[tuple[int, int], Tensor], lens: Sequence[int], vocab_size: int, specs: Sequence[DrawSpec]
) -> TokenProbs | None:
    """token_probs: by read and step. Missing rows become zero."""
    if not token_probs:
        return None
    places = [(i, step) for i, spec in enumerate(specs) if spec.is_drawn for step in range(lens[i])]
    probs = next(iter(token_probs.values())).new_zeros(len(places), vocab_size)
    for row, place in enumerate(places):
        if place in token_probs:
            probs[row, : token_probs[place].shape[0]] = token_probs[place]
    return TokenProbs(probs)
