"""EAGLE-3 heads as a kind of head to train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from foredraft.errors import ForedraftError
from foredraft.heads import EagleConfig, EagleHead, TargetEnds, TargetShape, load_head
from foredraft.heads.saving import save_eagle3
from foredraft.model import LanguageModel
from foredraft.train.head_kinds import MakeObjective, architectures_of, check_kept
from foredraft.train.head_student import default_taps, frequent_ids, new_eagle3
from foredraft.train.model_card import Student, distilled_by
from foredraft.train.recipe import Recipe
from foredraft.train.unrolled_drafts import unrolled_objectives


@dataclass(frozen=True, slots=True)
class Eagle3Kind:
    """taps: inputs of the target's layers that the head reads; None: an early, a middle and the last. draft_vocab_size: how many
    ids it can draft; None: all. layers: of the head. intermediate_size: of its MLP; None: the target's. shares_lm_head: keep the
    target's lm_head rows, neither trained nor saved; with a draft_vocab_size, other engines need a saved lm_head.
    num_steps, decay: see UnrolledDrafts. init: a head to train further.

    The result is in speculators' format.
    """

    taps: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    layers: int = 1
    intermediate_size: int | None = None
    shares_lm_head: bool = False
    num_steps: int = 5
    decay: float = 0.8
    init: str | None = None
    reads_pairs: ClassVar[bool] = False
    kernels: ClassVar[str] = "auto"

    def __post_init__(self) -> None:
        sizes = (self.num_steps, self.layers, self.intermediate_size, self.draft_vocab_size)
        if any(size is not None and size < 1 for size in sizes) or not 0 < self.decay <= 1:
            raise ForedraftError(
                "--unroll, --layers, --intermediate-size and --draft-vocab-size must be at least 1, and --decay above 0 and at most 1"
            )

    @classmethod
    def of_head(cls, source: str, target: LanguageModel) -> Eagle3Kind:
        """The kind that loads a saved head, and saves it with or without an lm_head as it was. Raises ForedraftError if it does not fit
        the target."""
        config = load_head(source, TargetShape.of(target.hf.config)).config
        return cls(shares_lm_head=not config.owns_lm_head, init=source)

    def new(self, target: LanguageModel, texts: Sequence[Sequence[int]], seed: int) -> EagleHead:
        """See HeadKind."""
        config = target.hf.config.get_text_config()
        vocab_size = int(config.vocab_size)
        ids = frequent_ids(texts, self.draft_vocab_size, vocab_size)
        taps = self.taps or default_taps(int(config.num_hidden_layers))
        return self._to_train(new_eagle3(target, taps, ids, seed, self.layers, self.intermediate_size))

    def load(self, source: str, target: LanguageModel) -> EagleHead:
        """See HeadKind."""
        checkpoint, ends = load_head(source, TargetShape.of(target.hf.config)), TargetEnds(target.hf)
        config = checkpoint.config
        if not isinstance(config, EagleConfig) or config.kind != "eagle3" or config.mask_token is not None:
            raise ForedraftError(f"{source}: must be an EAGLE-3 head")
        if self.shares_lm_head and config.owns_lm_head:
            raise ForedraftError(f"{source}: has an lm_head of its own: leave out --share-lm-head")
        check_kept(
            self,
            source,
            taps=config.taps,
            layers=config.layer.num_hidden_layers,
            intermediate_size=config.layer.intermediate_size,
            draft_vocab_size=config.draft_vocab_size,
        )
        if not config.owns_lm_head:
            checkpoint = checkpoint.with_lm_head(ends.lm_head_rows(checkpoint.config.target_ids))
        return self._to_train(EagleHead.of(checkpoint, ends.embed, ends.lm_head))

    def num_logits(self, head: EagleHead, target: LanguageModel) -> int:
        """See HeadKind."""
        return head.config.draft_vocab_size * self.num_steps

    def objectives(self, head: EagleHead, target: LanguageModel) -> MakeObjective:
        """See HeadKind."""
        return unrolled_objectives(head, target, self.num_steps, self.decay)

    def save(self, head: EagleHead, target: LanguageModel, target_name: str, folder: Path, dtype: torch.dtype) -> None:
        """See HeadKind."""
        without = ["lm_head.weight"] if self.shares_lm_head else []
        save_eagle3(head, folder, target_name, architectures_of(target), dtype, without=without)

    def describe(self, head: EagleHead, target_name: str, recipe: Recipe) -> Student:
        """See HeadKind."""
        config = head.config
        reads = ", ".join(str(tap) for tap in config.taps)
        rows = "rows of its lm_head" + (", which are not saved" if self.shares_lm_head else "")
        origin = f"random weights with the target's dimensions, and {rows}"
        return Student(
            "head",
            f"An EAGLE-3 head for `{target_name}`",
            f"{origin if self.init is None else f'`{self.init}`'}; it reads the inputs of the layers {reads}, and drafts "
            f"{config.draft_vocab_size} of {config.vocab_size} ids",
            ("tags: [speculative-decoding, eagle3]",),
            f"{distilled_by(recipe)}, {self.num_steps} drafted tokens deep (test-time training, arXiv:2503.01840), each "
            f"weighted {self.decay:g} times the one before",
        )

    def _to_train(self, head: EagleHead) -> EagleHead:
        head.requires_grad_(True)
        head.lm_head.requires_grad_(not self.shares_lm_head)
        return head
