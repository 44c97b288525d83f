"""The options of a training run: its data, its length, and its recipe."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from foredraft.cli.inputs import parse_budget, parse_seconds
from foredraft.cli.models import DeviceOption, ThreadsOption
from foredraft.cli.train.app import parse_named
from foredraft.errors import ForedraftError
from foredraft.sampling import AUTO
from foredraft.utils.arguments import AUTOCAST_CHOICES, check_autocast, check_threads

if TYPE_CHECKING:
    from foredraft.train import Data, LearningRates, Recipe
    from foredraft.train.corpus import Pair

ArchitectureOption = Annotated[
    Path | None, Option("--architecture", metavar="CONFIG.json", help="The shape of a new model.")
]
OutOption = Annotated[
    Path,
    Option("--out", metavar="DIR", help="The directory of the run and the model; give it again to continue the run."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentOptions:
    """Where one document of a file ends and the next begins."""

    separator: Annotated[str, Option(help="The text between documents.")] = "<|endoftext|>"
    separator_line: Annotated[
        str | None, Option("--separator-line", help="A line that starts with this ends a document too, and is dropped.")
    ] = None
    text_field: Annotated[str, Option("--text-field", help="The field with the text, in .jsonl files.")] = "text"

    def read(self, file: Path) -> tuple[str, ...]:
        """The documents of a file."""
        from foredraft.train.corpus import read_file

        return read_file(
            file, separator=self.separator, separator_line=self.separator_line, field=self.text_field
        ).documents

    def read_pairs(self, file: Path) -> tuple[Pair, ...]:
        """The pairs of a file, one per line."""
        from foredraft.train.corpus import read_pairs

        return read_pairs(file, field=self.text_field).documents


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """The text to train on, and the text to validate on."""

    data: Annotated[
        list[Path] | None, Option("--data", metavar="FILE", help="Text to train on; may be .gz or .jsonl; repeatable.")
    ] = None
    pairs: Annotated[
        list[Path] | None,
        Option(
            "--pairs",
            metavar="FILE",
            help="Instead of --data, for encoder-decoders: sources and texts, separated by a tab, or .jsonl with source and text; "
            "may be .gz; repeatable.",
        ),
    ] = None
    exclude: Annotated[
        list[Path] | None,
        Option("--exclude", metavar="FILE", help="Leave the documents of this file out; repeatable."),
    ] = None
    validation: Annotated[
        list[str] | None,
        Option("--validation", metavar="NAME=FILE", help="Held-out text of a kind; kept out of training; repeatable."),
    ] = None
    validation_share: Annotated[
        float, Option("--validation-share", help="The share of documents held out if no file is given.")
    ] = 0.02
    licence: Annotated[
        list[str] | None, Option("--licence", metavar="FILE=LICENCE", help="For the model card; repeatable.")
    ] = None

    @property
    def files(self) -> list[Path]:
        """All files that are named. Raises ForedraftError for a --validation without a name."""
        return [*(self.data or ()), *(self.pairs or ()), *(self.exclude or ()), *self._validation().values()]

    def of(self, documents: DocumentOptions) -> Data:
        """Raises ForedraftError if both texts and pairs are given, and for a licence of a file that is not."""
        from foredraft.train import Data

        if self.data and self.pairs:
            raise ForedraftError(
                "give --data, texts for a decoder-only model, or --pairs for an encoder-decoder, not both"
            )
        files = tuple(self.pairs or self.data or ())
        licences = parse_named(self.licence, "--licence", "FILE=LICENCE")
        unknown = next((name for name in licences if name not in {file.name for file in files}), None)
        if unknown is not None:
            raise ForedraftError(
                f"--licence {unknown}: no file of that name is trained on: give its name without the folder"
            )
        return Data(
            files=files,
            are_pairs=bool(self.pairs),
            exclude=tuple(self.exclude or ()),
            validation=self._validation(),
            validation_share=self.validation_share,
            **asdict(documents),
            licences=licences,
        )

    def _validation(self) -> dict[str, Path]:
        return {kind: Path(file) for kind, file in parse_named(self.validation, "--validation").items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOptions:
    """How long to train, and how."""

    steps: Annotated[int | None, Option(help="How long to train, in steps.")] = None
    epochs: Annotated[float | None, Option(help="How long to train, in passes over the data.")] = None
    budget: Annotated[str | None, Option(help="How long to train, such as 90s, 20m or 2h.")] = None
    block_len: Annotated[
        int, Option("--context", help="Tokens per block; for pairs, the most tokens of a source and of a text.")
    ] = 512
    batch_size: Annotated[int, Option("--batch-size", help="Blocks per step.")] = 8
    optimiser: Annotated[str, Option(help="muon (AdamW for parameters other than matrices) or adamw.")] = "muon"
    learning_rate: Annotated[
        float | None, Option("--learning-rate", help="For AdamW. Default: 0.002 for new models, 0.0006 with --init.")
    ] = None
    muon_learning_rate: Annotated[
        float | None, Option("--muon-learning-rate", help="For Muon. Default: 0.02 for new models, 0.005 with --init.")
    ] = None
    warm_up: Annotated[float, Option("--warm-up", help="The share of the run in which the rates rise.")] = 0.02
    clip: Annotated[float, Option(help="The largest norm of a gradient.")] = 1.0
    dtype: Annotated[
        str,
        Option(
            "--dtype",
            help="float32, bfloat16 for mixed precision, or auto: bfloat16 where the device has instructions for it.",
        ),
    ] = "float32"
    device: DeviceOption = "auto"
    seed: Annotated[
        int, Option(help="The seed of initial weights, of the order of the data and of generated texts.")
    ] = 0
    checkpoint_every: Annotated[str, Option("--checkpoint-every", help="How often to save, such as 60s or 5m.")] = "60s"
    num_threads: ThreadsOption = None

    def check(self) -> None:
        """Raises ForedraftError for bad options that can be found without importing PyTorch."""
        check_threads(self.num_threads)
        check_autocast(self.dtype, AUTOCAST_CHOICES)
        if self.budget is not None:
            parse_budget(self.budget)
        parse_seconds(self.checkpoint_every)

    def recipe(self, *, is_new: bool, loss: str | None = None, **settings: Any) -> Recipe:
        """is_new: whether training does not start from another model; defaults depend on it. settings: fields of Recipe that
        are not among these options. Raises ForedraftError for a value that is out of range."""
        from foredraft.train import Recipe, fastest_autocast

        return Recipe(
            steps=self.steps,
            epochs=self.epochs,
            seconds=None if self.budget is None else parse_budget(self.budget),
            context=self.block_len,
            batch_size=self.batch_size,
            optimiser=self.optimiser,
            rates=self._rates(is_new),
            clip=self.clip,
            dtype=fastest_autocast(self.device) if self.dtype == AUTO else self.dtype,
            device=self.device,
            seed=self.seed,
            loss=loss or ("kl+tv" if is_new else "tv"),
            checkpoint_every=parse_seconds(self.checkpoint_every),
            **settings,
        )

    def _rates(self, is_new: bool) -> LearningRates:
        from foredraft.train import FINE_TUNING, LearningRates

        default = LearningRates() if is_new else FINE_TUNING
        return LearningRates(
            default.matrices if self.muon_learning_rate is None else self.muon_learning_rate,
            default.others if self.learning_rate is None else self.learning_rate,
            self.warm_up,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationOptions:
    """What a draft model learns from its target, and from which texts."""

    loss: Annotated[
        str | None,
        Option(
            help="tv (total variation, which is the rejection rate), kl, or kl+tv: first kl, then tv. Default: tv "
            "with --init, else kl+tv."
        ),
    ] = None
    kl_until: Annotated[float, Option("--kl-until", help="With kl+tv: the share of the run in which KL fades out.")] = (
        0.5
    )
    temperature: Annotated[
        list[float] | None, Option(help="The temperature it will be used at; repeatable, 0 is greedy. Default: 1.")
    ] = None
    only_generations: Annotated[
        bool, Option("--only-generations", help="Train only on generated texts; --data only gives their beginnings.")
    ] = False
    generations: Annotated[int, Option(help="Texts that the target generates, to train on as well.")] = 0
    chats: Annotated[
        int,
        Option(
            help="Conversations that a chat model writes, to train on as well; without --prompts it also writes the questions."
        ),
    ] = 0
    prompts: Annotated[
        list[Path] | None,
        Option("--prompts", metavar="FILE", help="Questions for --chats, one per line or .jsonl record; repeatable."),
    ] = None

    def recipe_fields(self) -> dict[str, Any]:
        return {
            "loss": self.loss,
            "kl_until": self.kl_until,
            "temperatures": tuple(self.temperature or (1.0,)),
            "only_generations": self.only_generations,
            "generations": self.generations,
            "chats": self.chats,
            "prompts": tuple(self.prompts or ()),
        }
