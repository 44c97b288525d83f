"""Drafters whose tokens are never accepted, to measure what trying them costs."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from foredraft.engine.proposal import DraftRequest, Proposal


class RandomDrafter:
    """Proposes max_len random tokens for every request."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        """-> certain rows"""
        return Proposal.certain(
            [[self._random.randrange(self._vocab_size) for _ in range(r.max_len)] for r in requests]
        )

    def forget(self, seq_ids: list[int]) -> None:
        """It holds nothing."""


def shuffled_draft(draft: Path, folder: Path) -> Path:
    """The draft model with the rows of its embedding shuffled: as fast as before, but wrong. -> its directory"""
    model = AutoModelForCausalLM.from_pretrained(draft, dtype="auto")
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight.copy_(weight[torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))])
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(draft).save_pretrained(folder)
    return folder
