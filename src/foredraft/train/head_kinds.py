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
Value = TypeVar("Value")

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
        """A saved head, ready to train like one from `new`. Raises ForedraftError for a head of another kind."""

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


def check_kept(source: str, **settings: tuple[object, object]) -> None:
    """settings: by name, what was asked for (None: nothing) and what a head has that is trained further. Raises ForedraftError if they
    differ, because such a head keeps its own."""
    for name, (wanted, actual) in settings.items():
        if wanted is not None and wanted != actual:
            raise ForedraftError(
                f"{source}: its {name} is {actual}, not {wanted}: a head that is trained further keeps its own"
            )


def unless_default(value: Value, default: Value) -> Value | None:
    return None if value == default else value


def architectures_of(target: LanguageModel) -> list[str]:
    """The names of the target's class, as in its configuration."""
    named: list[str] | None = target.hf.config.architectures
    return named or [type(target.hf).__name__]
