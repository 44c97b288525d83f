"""Serial corrections of a block: a small step per place that takes the previous token into account.

A pass over a block gives the logits of all its places at once, each independent of the tokens drafted at the others. A correction
adjusts a place given the block, the previous token, and a memory of the tokens before that. So a chain takes one step per place, and
a tree one per level, for all its nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from foredraft.heads.config import CorrectionForm, DFlashConfig, Markov, Refiner, Selector


class BlockReading(NamedTuple):
    """The reading of N blocks. logits: [N, block_size, D]. states: [N, block_size, H], the inputs of the lm_head."""

    logits: Tensor
    states: Tensor


class Correctable(NamedTuple):
    """The inputs of the steps over blocks, row by row. logits: [N * block_size, D]. context: [N * block_size, ..], from the states."""

    logits: Tensor
    context: Tensor


class Corrected(NamedTuple):
    """logits: [n, D]. memory: [n, ..], for the next step."""

    logits: Tensor
    memory: Tensor


class Correction(nn.Module):
    """One kind of correction. has_memory: whether it depends on more than the previous token. begins_earlier: whether the row of a
    pending token that does not draft reads the token before the pending one, and not the pending token itself."""

    has_memory = False
    begins_earlier = False

    def prepare(self, reading: BlockReading) -> Correctable:
        """Compute the part that does not depend on tokens, for all places at once."""
        return Correctable(reading.logits.flatten(0, 1), self._context(reading.states).flatten(0, 1))

    def empty_memory(self, count: int) -> Tensor:
        """The memory before the first row of so many blocks."""
        return torch.empty(count, 0)

    def forward(self, block: Correctable, rows: Tensor, previous: Tensor, memory: Tensor) -> Corrected:
        """rows: [n], of the blocks. previous: [n], the token before each, in the target's ids. memory: [n, ..]"""
        raise NotImplementedError

    def _context(self, states: Tensor) -> Tensor:
        """[N, block_size, H] -> [N, block_size, ..]"""
        return states


class MarkovCorrection(Correction):
    def __init__(self, form: Markov, config: DFlashConfig) -> None:
        super().__init__()
        self.kind, self._rank = form.kind, form.rank
        self.has_memory = form.kind == "rnn"
        self.markov_w1 = nn.Embedding(config.layer.vocab_size, form.rank)
        self.markov_w2 = nn.Linear(form.rank, config.draft_vocab_size, bias=False)
        if form.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + form.rank, form.rank)
        elif form.kind == "rnn":
            self.joint_proj = nn.Linear(config.hidden_size + 2 * form.rank, 3 * form.rank)

    def empty_memory(self, count: int) -> Tensor:
        """[count, rank]"""
        return self.markov_w1.weight.new_zeros(count, self._rank if self.has_memory else 0)

    def forward(self, block: Correctable, rows: Tensor, previous: Tensor, memory: Tensor) -> Corrected:
        """See Correction."""
        x = self.markov_w1(previous)
        if self.kind == "gated":
            x = torch.sigmoid(self.gate_proj(torch.cat((block.context[rows], x), dim=-1))) * x
        elif self.kind == "rnn":
            gate, candidate, x = self.joint_proj(torch.cat((memory, x, block.context[rows]), dim=-1)).chunk(3, dim=-1)
            gate, x = torch.sigmoid(gate), torch.tanh(x)
            memory = gate * memory + (1 - gate) * torch.tanh(candidate)
        return Corrected(block.logits[rows] + self.markov_w2(x), memory)


class SelectorCorrection(Correction):
    def __init__(self, form: Selector, config: DFlashConfig) -> None:
        super().__init__()
        self._top_k = form.top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(config.layer.vocab_size, form.rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.layer.vocab_size, form.rank))
        self.hidden_projection = nn.Linear(config.hidden_size, form.rank, bias=False)

    def forward(self, block: Correctable, rows: Tensor, previous: Tensor, memory: Tensor) -> Corrected:
        """See Correction. Only the top_k tokens of a place keep finite logits."""
        logits = block.logits[rows]
        best, ids = logits.topk(self._top_k, dim=-1)
        context = self.predecessor_codebook[previous] * block.context[rows]
        scores = best + torch.linalg.vecdot(context[:, None], self.successor_codebook[ids])
        return Corrected(torch.full_like(logits, -torch.inf).scatter(1, ids, scores), memory)

    def _context(self, states: Tensor) -> Tensor:
        projected: Tensor = self.hidden_projection(states)
        return projected


class RefinerCorrection(Correction):
    """XPress itself iterates over all places at once until none changes. One step per place gives the same result."""

    has_memory = True
    begins_earlier = True

    def __init__(self, form: Refiner, config: DFlashConfig) -> None:
        super().__init__()
        rank, width, size = form.rank, config.hidden_size, config.block_size
        self._block_size = size
        self.token_embed = nn.Embedding(config.layer.vocab_size, rank)
        self.down_h = nn.Linear(width, rank, bias=False)
        self.down_g = nn.Linear(width, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.empty(rank, size, size))
        self.mlp_gate = nn.Linear(rank, form.mlp_size, bias=False)
        self.mlp_up = nn.Linear(rank, form.mlp_size, bias=False)
        self.mlp_down = nn.Linear(form.mlp_size, rank, bias=False)
        self.readout = nn.Linear(rank, config.draft_vocab_size, bias=False)

    def empty_memory(self, count: int) -> Tensor:
        """[count, block_size, rank], a row for each place"""
        return self.mix_l.new_zeros(count, self._block_size, self.mix_l.shape[0])

    def forward(self, block: Correctable, rows: Tensor, previous: Tensor, memory: Tensor) -> Corrected:
        """See Correction."""
        places = rows % self._block_size
        x = self.in_proj(torch.cat((block.context[rows], self.token_embed(previous)), dim=-1))
        memory = memory.index_put((torch.arange(len(rows), device=rows.device), places), x)
        # later places are still 0 in the memory
        x = x + (self.mix_l[:, places].permute(1, 2, 0) * memory).sum(1)
        x = x + self.mlp_down(functional.silu(self.mlp_gate(x)) * self.mlp_up(x))
        return Corrected(block.logits[rows] + self.readout(x), memory)

    def _context(self, states: Tensor) -> Tensor:
        whole = states.mean(dim=1, keepdim=True).expand_as(states)
        return torch.cat((self.down_h(states), self.down_g(whole)), dim=-1)


def correction_of(form: CorrectionForm, config: DFlashConfig) -> Correction:
    """The correction's module, with uninitialised weights."""
    if isinstance(form, Markov):
        return MarkovCorrection(form, config)
    if isinstance(form, Selector):
        return SelectorCorrection(form, config)
    return RefinerCorrection(form, config)
