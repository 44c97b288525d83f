"""Medusa heads as a kind of head to train (Medusa-1, arXiv:2401.10774): the target is not trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.heads import MedusaConfig, MedusaHead, TargetEnds, TargetShape, load_head
from foredraft.heads.saving import save_medusa
from foredraft.model import LanguageModel
from foredraft.train.head_kinds import MakeObjective, check_kept
from foredraft.train.head_student import frequent_ids, lm_head_rows
from foredraft.train.losses import DistillationLoss, LossSums
from foredraft.train.model_card import Student, distilled_by
from foredraft.train.recipe import Recipe
from foredraft.train.target_logits import TargetLogits
from foredraft.train.unrolled_drafts import StepTargets, TargetStates, compared_rows, stepwise_loss


@dataclass(frozen=True, slots=True)
class MedusaKind:
    """num_heads: each drafts one position further. layers: residual blocks of each head. draft_vocab_size: how many ids they can
    draft; None: all. own_lm_heads: give each head its own lm_head; one for all is the cheapest to run. decay: the weight of a head
    relative to the one before. init: heads to train further.

    The result is in vLLM's format.
    """

    num_heads: int = 4
    layers: int = 1
    draft_vocab_size: int | None = None
    own_lm_heads: bool = False
    decay: float = 0.8
    init: str | None = None
    reads_pairs: ClassVar[bool] = False
    kernels: ClassVar[str] = "auto"

    def __post_init__(self) -> None:
        sizes = (self.num_heads, self.layers, self.draft_vocab_size)
        if any(size is not None and size < 1 for size in sizes) or not 0 < self.decay <= 1:
            raise ForedraftError(
                "--heads, --layers and --draft-vocab-size must be at least 1, and --decay above 0 and at most 1"
            )

    def new(self, target: LanguageModel, texts: Sequence[Sequence[int]], seed: int) -> MedusaHead:
        """See HeadKind. Nothing is random: each head begins as the target's lm_head, after blocks that change nothing."""
        shape = TargetShape.of(target.hf.config)
        ids = frequent_ids(texts, self.draft_vocab_size, shape.vocab_size)
        config = MedusaConfig(
            num_heads=self.num_heads,
            num_blocks=self.layers,
            shares_lm_head=not self.own_lm_heads,
            target_hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            draft_vocab_size=shape.vocab_size if ids is None else len(ids),
            target_ids=ids,
        )
        ends = TargetEnds(target.hf)
        head = MedusaHead(config, ends.lm_head)
        rows = lm_head_rows(target, ids).mul_(ends.logit_scale)
        weights = {
            name: rows.clone() if name.startswith("lm_head") else torch.zeros(weight.shape)
            for name, weight in head.state_dict().items()
        }
        head.load_state_dict(weights, assign=True)
        return head

    def load(self, source: str, target: LanguageModel) -> MedusaHead:
        """See HeadKind."""
        checkpoint = load_head(source, TargetShape.of(target.hf.config))
        config = checkpoint.config
        if not isinstance(config, MedusaConfig) or not config.owns_lm_head:
            raise ForedraftError(f"{source}: must contain Medusa heads with an lm_head of their own")
        check_kept(
            self,
            source,
            num_heads=config.num_heads,
            layers=config.num_blocks,
            own_lm_heads=not config.shares_lm_head,
            draft_vocab_size=config.draft_vocab_size,
        )
        return MedusaHead.of(checkpoint, TargetEnds(target.hf).lm_head).requires_grad_(True)

    def num_logits(self, head: MedusaHead, target: LanguageModel) -> int:
        """See HeadKind."""
        return head.config.draft_vocab_size * head.config.num_heads

    def objectives(self, head: MedusaHead, target: LanguageModel) -> MakeObjective:
        """See HeadKind."""
        states, logits = TargetStates(target, ()), TargetLogits.of(target, head.config.target_ids)
        return lambda loss: PlacedDrafts(states, logits, self.decay, loss)

    def save(self, head: MedusaHead, target: LanguageModel, target_name: str, folder: Path, dtype: torch.dtype) -> None:
        """See HeadKind."""
        save_medusa(head, folder, target_name, dtype)

    def describe(self, head: MedusaHead, target_name: str, recipe: Recipe) -> Student:
        """See HeadKind."""
        config = head.config
        lm_heads = "one lm_head for all" if config.shares_lm_head else "an lm_head for each"
        origin = "the target's lm_head after blocks that change nothing" if self.init is None else f"`{self.init}`"
        return Student(
            "head",
            f"Medusa heads for `{target_name}`",
            f"{origin}; {config.num_heads} heads of {config.num_blocks} blocks with {lm_heads}, which draft {config.draft_vocab_size} of "
            f"{config.vocab_size} ids",
            ("tags: [speculative-decoding, medusa]",),
            f"{distilled_by(recipe)}, each head at its own position (Medusa-1, arXiv:2401.10774) and weighted {self.decay:g} times "
            "the one before",
        )


@dataclass(frozen=True, slots=True)
class PlacedDrafts:
    """The objective of Medusa heads: head h at position P is compared with the target's distribution after the token at P + 1 + h.
    states: of the target, without taps. target_logits: for the ids that the heads can draft. decay: see UnrolledDrafts."""

    states: TargetStates
    target_logits: TargetLogits
    decay: float
    loss: DistillationLoss

    def __call__(self, student: MedusaHead, ids: Tensor, next_ids: Tensor, progress: float) -> LossSums:
        """ids, next_ids: [B, L] -> see stepwise_loss"""
        with torch.no_grad():
            _, final = self.states(ids)
            targets = StepTargets.of(final, self.target_logits, next_ids, self.loss)
        states = student.states(final.flatten(0, 1)).view(*ids.shape, -1, final.shape[-1])
        return stepwise_loss(states.unbind(2), student.logits, targets, self.decay, self.loss, progress)

    def shapes(self, student: MedusaHead, ids: Tensor) -> Iterator[Tensor]:
        """See Objective."""
        states = student.states(torch.empty(ids.numel(), student.config.target_hidden_size)).view(
            *ids.shape, student.config.num_heads, -1
        )
        for head, of_head in enumerate(states.unbind(2)):
            yield student.logits(head, compared_rows(of_head, head))
