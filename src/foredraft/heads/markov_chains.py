"""Chains of a DSpark head's draft tokens (arXiv:2607.05147), written by the compiled kernels in one call."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foredraft.heads.corrections import Correction, MarkovCorrection
from foredraft.kernels import Chains, DrawSpec, Kernels, MarkovFactors
from foredraft.model.generation import Generated
from foredraft.sampling import TokenProbs


class MarkovChains:
    """Chains of a MarkovCorrection of the kind "vanilla", with the second factor in bfloat16.

    target_ids: [D], the id of each column of the logits; None: the index of the column.
    """

    def __init__(self, correction: MarkovCorrection, target_ids: Tensor | None, kernels: Kernels) -> None:
        first, second = correction.markov_w1.weight.detach().float(), correction.markov_w2.weight.detach()
        self._factors = MarkovFactors(first.contiguous(), kernels.pack(second), target_ids)
        self._kernels = kernels

    @classmethod
    def of(cls, correction: Correction | None, target_ids: Tensor | None, kernels: Kernels) -> MarkovChains | None:
        """None for corrections that the kernels do not support: other kinds, which depend on states or on all previous tokens."""
        if not isinstance(correction, MarkovCorrection) or correction.kind != "vanilla":
            return None
        return cls(correction, target_ids, kernels)

    def generate(self, logits: Tensor, chains: Chains, vocab_size: int, specs: Sequence[DrawSpec]) -> Generated:
        """Draft chains of tokens among the first vocab_size ids. logits: [R, D], not corrected"""
        ids, probs, kept_ids = self._kernels.choose_chains(logits.float(), self._factors, chains, vocab_size, specs)
        return Generated(ids, None if probs is None else TokenProbs(probs, kept_ids))
