"""The arguments of a training run, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from foredraft.errors import ForedraftError
from foredraft.kernels import load_kernels
from foredraft.train.corpus import SEPARATOR
from foredraft.train.losses import DistillationLoss, check_loss
from foredraft.train.optimiser import OPTIMISERS, LearningRates
from foredraft.train.records import ValidationRecord
from foredraft.utils.arguments import check_autocast

_GREEDY_TEMPERATURE = 0.25


def loss_temperature(served: float) -> float:
    """The temperature of the compared distributions, if `served` is the one served: a greedy distribution has no gradient."""
    return served or _GREEDY_TEMPERATURE


@dataclass(frozen=True, slots=True)
class Data:
    """files: to train on. are_pairs: whether all files hold pairs of a source and a text, see read_pairs. exclude: files whose
    documents are not trained on, whichever file they occur in. validation: held-out files by kind of text; without any,
    validation_share of the documents is held out. separator, separator_line, text_field: see read_file. licences: by file
    name, for the model card."""

    files: tuple[Path, ...]
    are_pairs: bool = False
    exclude: tuple[Path, ...] = ()
    validation: Mapping[str, Path] = field(default_factory=dict)
    validation_share: float = 0.02
    separator: str = SEPARATOR
    separator_line: str | None = None
    text_field: str = "text"
    licences: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Start:
    """What the student is made from, one of: init, a draft to train further; architecture, a config.json; layers, the number
    of the target's layers to keep. tokenizer: a folder, if there is no target to take it from. own_head: untie the lm_head
    from the embeddings. parallel_tokens: how many tokens a draft learns to draft in one pass (PARD); None: one."""

    init: str | None = None
    architecture: Path | None = None
    layers: int | None = None
    tokenizer: str | None = None
    own_head: bool = False
    parallel_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.parallel_tokens is not None and self.parallel_tokens < 2:
            raise ForedraftError(f"--parallel-tokens must be at least 2, not {self.parallel_tokens}")

    def check_for(self, data: Data) -> None:
        """Raises ForedraftError if an option for decoder-only models is given together with pairs."""
        only = {"--layers": self.layers, "--own-head": self.own_head, "--parallel-tokens": self.parallel_tokens}
        given = next((option for option, value in only.items() if value), None)
        if data.are_pairs and given is not None:
            raise ForedraftError(
                f"{given} is for decoder-only models, but --pairs is for encoder-decoders: leave out {given}"
            )


@dataclass(frozen=True, slots=True)
class Recipe:
    """steps, epochs, seconds: how long to train; exactly one of them. temperatures: to be served; steps alternate between them,
    and read what the target wrote at that temperature (tasks.py). generations: number of texts that the target writes, to train
    on in addition to the files, or instead of them if only_generations. chats: the same for conversations. prompts: files of
    their questions, one per line or .jsonl record; without any, the target writes the questions too. dtype: of autocast;
    weights stay in float32. device: "auto" is CUDA if available."""

    steps: int | None = None
    epochs: float | None = None
    seconds: float | None = None
    context: int = 512
    batch_size: int = 8
    optimiser: str = "muon"
    rates: LearningRates = field(default_factory=LearningRates)
    clip: float = 1.0
    dtype: str = "float32"
    seed: int = 0
    loss: str = "kl+tv"
    kl_until: float = 0.5
    temperatures: tuple[float, ...] = (1.0,)
    generations: int = 0
    chats: int = 0
    prompts: tuple[Path, ...] = ()
    only_generations: bool = False
    checkpoint_every: float = 60.0
    device: str = "auto"

    def __post_init__(self) -> None:
        self._check_length()
        self._check_temperatures()
        self._check_optimiser()
        check_autocast(self.dtype)
        check_loss(self.loss)

    def _check_length(self) -> None:
        given = [name for name in ("steps", "epochs", "seconds") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ForedraftError("give exactly one of --steps, --epochs and --budget: how long to train")
        for name, least in (("context", 2), ("batch_size", 1), ("seed", 0), ("generations", 0), ("chats", 0)):
            _check_at_least(name, getattr(self, name), least)
        length = getattr(self, given[0])
        if not 0 < length < float("inf"):
            raise ForedraftError(f"{given[0]} must be above 0 and finite, not {length}")

    def _check_temperatures(self) -> None:
        for temperature in self.temperatures:
            if not 0 <= temperature < float("inf"):
                raise ForedraftError(f"--temperature must be 0 (greedy) or above, not {temperature}")
        if not self.temperatures:
            raise ForedraftError("give at least one --temperature")
        if self.only_generations and max(self.generations, self.chats) < len(self.temperatures):
            raise ForedraftError(
                f"--only-generations needs --generations or --chats, the number of texts for the target to write: at "
                f"least {len(self.temperatures)}, one for each --temperature"
            )

    def _check_optimiser(self) -> None:
        if self.optimiser not in OPTIMISERS:
            raise ForedraftError(f"--optimiser must be one of {', '.join(OPTIMISERS)}, not {self.optimiser!r}")
        for rate in (self.rates.matrices, self.rates.others, self.clip):
            if not rate > 0:
                raise ForedraftError(f"learning rates and --clip must be above 0, not {rate}")
        if not 0 <= self.rates.warm_up < 1 or not 0 <= self.kl_until <= 1:
            raise ForedraftError(
                "--warm-up must be at least 0 and below 1, and --kl-until from 0 to 1: both are shares of the run"
            )


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The peak memory of the process, in bytes: as predicted before the first step, and as measured at the end."""

    predicted: int
    measured: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """complete: whether the run reached its end. num_parameters: of the student. history: validations, from before the first
    step to after the last. memory: None if the system does not report it."""

    complete: bool
    step: int
    seconds: float
    num_parameters: int
    history: list[ValidationRecord]
    memory: MemoryUse | None = None


def losses_of(recipe: Recipe) -> tuple[list[DistillationLoss], DistillationLoss]:
    """-> a loss for each served temperature, and the loss of validation"""
    temperatures = [loss_temperature(served) for served in recipe.temperatures]
    kernels = load_kernels()
    losses = [DistillationLoss(recipe.loss, temperature, recipe.kl_until, kernels) for temperature in temperatures]
    return losses, DistillationLoss("kl", max(temperatures), kernels=kernels)


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ForedraftError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
