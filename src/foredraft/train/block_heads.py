"""Block drafters as kinds of heads to train: DFlash, and DSpark, which corrects each draft position by the token drafted before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from foredraft.errors import ForedraftError
from foredraft.heads import DFlashConfig, DFlashHead, TargetEnds, TargetShape, load_head
from foredraft.heads.config import Markov
from foredraft.heads.saving import save_block_head
from foredraft.model import LanguageModel
from foredraft.train.block_drafts import BlockDrafts, num_anchors
from foredraft.train.head_kinds import MakeObjective, architectures_of, check_kept
from foredraft.train.head_student import default_taps, new_block_head, rarest_id
from foredraft.train.model_card import Student, distilled_by
from foredraft.train.recipe import Recipe
from foredraft.train.target_logits import TargetLogits
from foredraft.train.unrolled_drafts import TargetStates


@dataclass(frozen=True, slots=True)
class DFlashKind:
    """taps, layers, intermediate_size: see Eagle3Kind. block_size: rows of a block. mask_token: the id that it reads in place of tokens
    not drafted yet; None: the id that occurs least often in the texts. anchor_every: tokens of a text per draft that is trained.
    decay: see BlockDrafts. init: a head to train further.

    The target's embeddings and lm_head are used, but neither trained nor saved. The result is in speculators' format.
    """

    taps: tuple[int, ...] | None = None
    layers: int = 1
    intermediate_size: int | None = None
    block_size: int = 8
    mask_token: int | None = None
    anchor_every: int = 4
    decay: float = 0.8
    init: str | None = None

    name: ClassVar[str] = "DFlash"
    reads_pairs: ClassVar[bool] = False
    kernels: ClassVar[str] = "auto"

    def __post_init__(self) -> None:
        sizes = (self.layers, self.intermediate_size, self.anchor_every, self.block_size - 1)
        if any(size is not None and size < 1 for size in sizes) or not 0 < self.decay <= 1:
            raise ForedraftError(
                "--layers, --intermediate-size and --anchor-every must be at least 1, --block-size at least 2, and --decay above 0 "
                "and at most 1"
            )

    @property
    def correction(self) -> Markov | None:
        """The correction of a new head."""
        return None

    def _correction_of(self, config: DFlashConfig) -> dict[str, object]:
        """The fields of this kind that determine the correction of a head."""
        return {}

    def new(self, target: LanguageModel, texts: Sequence[Sequence[int]], seed: int) -> DFlashHead:
        """See HeadKind."""
        config = target.hf.config.get_text_config()
        vocab_size = int(config.vocab_size)
        mask_token = rarest_id(texts, vocab_size) if self.mask_token is None else self.mask_token
        if not 0 <= mask_token < vocab_size:
            raise ForedraftError(f"--mask-token must be an id of the target, 0 to {vocab_size - 1}, not {mask_token}")
        head = new_block_head(
            target,
            self.taps or default_taps(int(config.num_hidden_layers)),
            mask_token,
            seed,
            block_size=self.block_size,
            correction=self.correction,
            num_layers=self.layers,
            intermediate_size=self.intermediate_size,
        )
        return _to_train(head)

    def load(self, source: str, target: LanguageModel) -> DFlashHead:
        """See HeadKind."""
        checkpoint, ends = load_head(source, TargetShape.of(target.hf.config)), TargetEnds(target.hf)
        config = checkpoint.config
        if not isinstance(config, DFlashConfig) or config.kind != self.name.lower() or config.target_ids is not None:
            raise ForedraftError(f"{source}: must be a {self.name} head that drafts all ids")
        check_kept(
            self,
            source,
            taps=config.taps,
            layers=config.layer.num_hidden_layers,
            intermediate_size=config.layer.intermediate_size,
            block_size=config.block_size,
            mask_token=config.mask_token,
            **self._correction_of(config),
        )
        if not config.owns_lm_head:
            checkpoint = checkpoint.with_lm_head(ends.lm_head_rows(None))
        return _to_train(DFlashHead.of(checkpoint, ends.embed, ends.lm_head))

    def num_logits(self, head: DFlashHead, target: LanguageModel) -> int:
        """See HeadKind."""
        context = (
            head.config.block_size * self.anchor_every
        )  # any length will do: what counts is the share of positions
        share = num_anchors(context + 1, self.anchor_every) / context
        return round(head.config.draft_vocab_size * head.config.block_size * share)

    def objectives(self, head: DFlashHead, target: LanguageModel) -> MakeObjective:
        """See HeadKind."""
        states, logits = TargetStates(target, head.config.taps), TargetLogits.of(target)
        return lambda loss: BlockDrafts(states, logits, self.anchor_every, self.decay, loss)

    def save(self, head: DFlashHead, target: LanguageModel, target_name: str, folder: Path, dtype: torch.dtype) -> None:
        """See HeadKind."""
        save_block_head(head, folder, target_name, architectures_of(target), dtype)

    def describe(self, head: DFlashHead, target_name: str, recipe: Recipe) -> Student:
        """See HeadKind."""
        config = head.config
        reads = ", ".join(str(tap) for tap in config.taps)
        origin = "random weights with the target's dimensions" if self.init is None else f"`{self.init}`"
        corrected = (
            ""
            if config.correction is None
            else f", each corrected by the previous token with rank {config.correction.rank}"
        )
        return Student(
            "head",
            f"A {self.name} head for `{target_name}`",
            f"{origin}; it reads the inputs of the layers {reads}, and drafts {config.num_places} tokens in one pass{corrected}",
            (f"tags: [speculative-decoding, {config.kind}]",),
            f"{distilled_by(recipe)}, at every position of a draft, after one in {self.anchor_every} tokens, each position weighted "
            f"{self.decay:g} times the one before",
        )


@dataclass(frozen=True, slots=True)
class DSparkKind(DFlashKind):
    """markov_rank: of the correction. markov_kind: "vanilla", "gated" or "rnn", see Markov."""

    markov_rank: int = 64
    markov_kind: str = "vanilla"

    name: ClassVar[str] = "DSpark"

    def __post_init__(self) -> None:
        DFlashKind.__post_init__(self)
        if self.markov_rank < 1 or self.markov_kind not in ("vanilla", "gated", "rnn"):
            raise ForedraftError("--markov-rank must be at least 1, and --markov-kind one of vanilla, gated, rnn")

    @property
    def correction(self) -> Markov | None:
        """The correction of a new head."""
        return Markov(self.markov_rank, self.markov_kind)  # type: ignore[arg-type]

    def _correction_of(self, config: DFlashConfig) -> dict[str, object]:
        correction = config.correction
        return (
            {"markov_rank": correction.rank, "markov_kind": correction.kind} if isinstance(correction, Markov) else {}
        )


def _to_train(head: DFlashHead) -> DFlashHead:
    head.requires_grad_(True)
    head.lm_head.requires_grad_(False)
    return head
