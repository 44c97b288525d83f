"""What differs between the kinds of heads that `foredraft train head` makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import nn

from foredraft.errors import ForedraftError
from foredraft.model import LanguageModel
from foredraft.train.losses import DistillationLoss
from foredraft.train.model_card import Student
from foredraft.train.objectives import Objective
from foredraft.train.recipe import Recipe

Head = TypeVar("Head", bound=nn.Module)

_OPTIONS = {"num_heads": "heads"}
"""Fields whose option has another name."""

MakeObjective = Callable[[DistillationLoss], Objective]
"""-> what a step minimises"""


class HeadKind(Protocol[Head]):
    """A kind of head with its options: a dataclass, whose fields identify a run. A new kind is a new file, and a line in the
    command. A head is a module whose parameters are trained, and it is saved in the format that `load` reads."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def init(self) -> str | None:
        """A head to train further."""

    def new(self, target: LanguageModel, texts: Sequence[Sequence[int]], seed: int) -> Head:
        """A head to start from, in float32; parameters that require a gradient are trained. texts: what it will be trained on.
        Raises ForedraftError for options that do not fit the target."""

    def load(self, source: str, target: LanguageModel) -> Head:
        """A saved head, ready to train like one from `new`. Raises ForedraftError for a head of another kind, and for an `init` that
        was made with other options; see check_kept."""

    @property
    def reads_pairs(self) -> bool:
        """Whether its targets are encoder-decoders, which read pairs."""

    @property
    def kernels(self) -> str:
        """The kernels that run the target, see LoadOptions."""

    def num_logits(self, head: Head, target: LanguageModel) -> int:
        """How many logits the objective computes for each token of a block."""

    def objectives(self, head: Head, target: LanguageModel) -> MakeObjective: ...

    def save(self, head: Head, target: LanguageModel, target_name: str, folder: Path, dtype: torch.dtype) -> None: ...

    def describe(self, head: Head, target_name: str, recipe: Recipe) -> Student:
        """The head's description for the model card."""


def check_kept(kind: HeadKind[Any], source: str, **actual: object) -> None:
    """actual: what the head of `kind.init` has, by the field of the kind that determines it in a new head. Raises ForedraftError if a
    field has another value, unless it is the default: a head that is trained further keeps its own. A head from anywhere else than
    `kind.init`, which is the run's own, passes."""
    for name, value in actual.items() if source == kind.init else ():
        wanted = getattr(kind, name)
        wanted = tuple(wanted) if isinstance(wanted, list) else wanted
        if wanted not in (value, kind.__dataclass_fields__[name].default):
            option = f"--{_OPTIONS.get(name, name).replace('_', '-')}"
            raise ForedraftError(
                f"{source}: was made with {option} {value}, not {wanted}: a head that is trained further keeps its own"
            )


def architectures_of(target: LanguageModel) -> list[str]:
    """The names of the target's class, as in its configuration."""
    named: list[str] | None = target.hf.config.architectures
    return named or [type(target.hf).__name__]
