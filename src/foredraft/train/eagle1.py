"""EAGLE-1 heads that begin as a draft model: a kind of head to train."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from foredraft.errors import ForedraftError
from foredraft.heads import EagleConfig, EagleHead, TargetEnds, TargetShape, load_head
from foredraft.heads.config import projected_eagle1
from foredraft.heads.saving import save_eagle1
from foredraft.model import LanguageModel
from foredraft.train.head_kinds import MakeObjective, architectures_of, check_kept
from foredraft.train.head_student import check_taps, default_taps
from foredraft.train.model_card import Student, distilled_by
from foredraft.train.recipe import Recipe
from foredraft.train.students import load_for_training
from foredraft.train.unrolled_drafts import unrolled_objectives

_WRITES = ("embed_tokens.weight", "o_proj.weight", "down_proj.weight")
"""The weights that write to the residual stream."""


@dataclass(frozen=True, slots=True)
class Eagle1Kind:
    """A draft model's layers, embeddings and lm_head, which also read hidden states of the target beside each token's embedding
    (arXiv:2401.15077), from several layers as in EAGLE-3. At first the fc in front of them ignores these states, so the head drafts
    what the draft model drafts, and training starts from there.

    draft_model: what it begins as, with the target's vocabulary. taps: inputs of the target's layers that it reads; None: an early,
    a middle and the last. num_steps, decay: see UnrolledDrafts. init: a head to train further, in place of draft_model.

    The result is in our own format: other engines' EAGLE-1 heads have neither norms nor a matrix for the states.
    """

    draft_model: str | None = None
    taps: tuple[int, ...] | None = None
    num_steps: int = 5
    decay: float = 0.8
    init: str | None = None
    reads_pairs: ClassVar[bool] = False
    kernels: ClassVar[str] = "auto"

    def __post_init__(self) -> None:
        if self.num_steps < 1 or not 0 < self.decay <= 1:
            raise ForedraftError("--unroll must be at least 1, and --decay above 0 and at most 1")
        if (self.draft_model is None) == (self.init is None):
            raise ForedraftError(
                "give --kind eagle1 either --draft-model, to initialise the head from, or --init, a head to continue from"
            )

    def new(self, target: LanguageModel, texts: Sequence[Sequence[int]], seed: int) -> EagleHead:
        """See HeadKind."""
        assert self.draft_model is not None
        draft, ends, shape = (
            load_for_training(self.draft_model),
            TargetEnds(target.hf),
            TargetShape.of(target.hf.config),
        )
        _check_draft(draft.config, self.draft_model, shape)
        taps = self.taps or default_taps(shape.num_layers)
        check_taps(taps, shape.num_layers)
        factor = 1 / _rms(draft.get_input_embeddings().weight)
        head = EagleHead(_config(draft, factor, taps, shape), ends.embed, ends.lm_head)
        head.load_state_dict(_weights(draft, factor) | _new_weights(head, seed), assign=True)
        return head.requires_grad_(True)

    def load(self, source: str, target: LanguageModel) -> EagleHead:
        """See HeadKind."""
        checkpoint, ends = load_head(source, TargetShape.of(target.hf.config)), TargetEnds(target.hf)
        config = checkpoint.config
        if not isinstance(config, EagleConfig) or not config.projects_features:
            raise ForedraftError(f"{source}: must be a head that was made by --kind eagle1")
        check_kept(self, source, taps=config.taps)
        return EagleHead.of(checkpoint, ends.embed, ends.lm_head).requires_grad_(True)

    def num_logits(self, head: EagleHead, target: LanguageModel) -> int:
        """See HeadKind."""
        return head.config.draft_vocab_size * self.num_steps

    def objectives(self, head: EagleHead, target: LanguageModel) -> MakeObjective:
        """See HeadKind."""
        return unrolled_objectives(head, target, self.num_steps, self.decay)

    def save(self, head: EagleHead, target: LanguageModel, target_name: str, folder: Path, dtype: torch.dtype) -> None:
        """See HeadKind."""
        save_eagle1(head, folder, target_name, architectures_of(target), dtype)

    def describe(self, head: EagleHead, target_name: str, recipe: Recipe) -> Student:
        """See HeadKind."""
        origin = f"the draft model `{self.draft_model}`" if self.init is None else f"`{self.init}`"
        reads = ", ".join(str(tap) for tap in head.config.taps)
        return Student(
            "head",
            f"An EAGLE-1 head for `{target_name}`",
            f"{origin}; it reads the inputs of the target's layers {reads} in addition to each token's embedding",
            ("tags: [speculative-decoding, eagle]",),
            f"{distilled_by(recipe)}, {self.num_steps} drafted tokens deep, each weighted {self.decay:g} times the one before",
        )


def _check_draft(draft: PretrainedConfig, name: str, target: TargetShape) -> None:
    if draft.model_type != "llama":
        raise ForedraftError(
            f"{name} is of the family {draft.model_type}: a head can only be initialised from a model of the family llama"
        )
    if draft.vocab_size != target.vocab_size:
        raise ForedraftError(
            f"{name} has {draft.vocab_size} ids, but the target has {target.vocab_size}: a head can only be initialised "
            "from a draft model with the target's vocabulary"
        )


def _config(draft: PreTrainedModel, factor: float, taps: tuple[int, ...], target: TargetShape) -> EagleConfig:
    """factor: see _weights."""
    layer = copy.deepcopy(draft.config)
    layer.rms_norm_eps *= factor**2
    return projected_eagle1(layer, taps, target)


def _weights(draft: PreTrainedModel, factor: float) -> dict[str, Tensor]:
    """The draft's weights under a head's names, and an fc that passes on only the embedding.

    factor: scales the residual stream, so that embeddings are as large as the states beside them; norms undo it. Otherwise an update
    of fc would give states many times the weight of embeddings.
    """
    weights = {name.removeprefix("model."): weight.detach().clone() for name, weight in draft.state_dict().items()}
    weights.setdefault("lm_head.weight", weights["embed_tokens.weight"].clone())
    for name, weight in weights.items():
        if name.endswith(_WRITES):
            weight.mul_(factor)
    width = draft.config.hidden_size
    return {**weights, "fc.weight": torch.eye(width, 2 * width)}


def _new_weights(head: EagleHead, seed: int) -> dict[str, Tensor]:
    """The weights that a draft model lacks, scaled so that projected states have about unit size."""
    generator = torch.Generator().manual_seed(seed)
    shape = head.feature_fc.weight.shape
    norms = {
        name: torch.ones(weight.shape) for name, weight in head.state_dict().items() if name.startswith("fc_norm.")
    }
    return {**norms, "feature_fc.weight": shape[1] ** -0.5 * torch.randn(shape, generator=generator)}


def _rms(x: Tensor) -> float:
    return float(x.detach().square().mean().sqrt())
