"""foredraft train evaluate"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from typer import Option

from foredraft.cli.groups import option_groups
from foredraft.cli.inputs import parse_budget
from foredraft.cli.models import DeviceOption, DtypeOption, ThreadsOption, set_threads
from foredraft.cli.options import JsonOption
from foredraft.cli.train.app import parse_named, require_sources, train
from foredraft.cli.train.options import DocumentOptions
from foredraft.errors import ForedraftError
from foredraft.utils import startup
from foredraft.utils.arguments import check_precision, check_threads

if TYPE_CHECKING:
    from foredraft.llm import LLM
    from foredraft.train import KindReport, SpeedPrediction
    from foredraft.train.held_out import HeldOutDocument

Texts: TypeAlias = "Mapping[str, Sequence[HeldOutDocument]]"
"""Documents by kind of text."""

_NO_BUDGET = "none"
_PROMPT_CHARACTERS, _PROMPTS_PER_KIND = 80, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """The two models, and how to load them."""

    target: Annotated[str, Option(help="Hub id or directory.")]
    draft: Annotated[str, Option(help="The draft model or head: hub id, directory or GGUF file.")]
    dtype: DtypeOption = "auto"
    device: DeviceOption = "auto"
    num_threads: ThreadsOption = None

    def check(self) -> None:
        """Raises ForedraftError for bad options that can be found without importing PyTorch."""
        check_threads(self.num_threads)
        check_precision(self.dtype, None)

    def load(self, speculative_tokens: int) -> LLM:
        from foredraft.llm import LLM

        return LLM(self.target, self.draft, dtype=self.dtype, device=self.device, speculative_tokens=speculative_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutOptions:
    """What to measure on: text that neither model has seen."""

    data: Annotated[list[str] | None, Option(metavar="NAME=FILE", help="Held-out text, by kind; repeatable.")] = None
    pairs: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=FILE",
            help="Instead of --data, for encoder-decoders: sources and texts, in the same form as for training; repeatable.",
        ),
    ] = None

    @property
    def files(self) -> dict[str, Path]:
        """The files by kind. Raises ForedraftError unless either texts or pairs are given."""
        data, pairs = parse_named(self.data, "--data"), parse_named(self.pairs, "--pairs")
        if bool(data) == bool(pairs):
            raise ForedraftError("give --data NAME=FILE: held-out text, or --pairs NAME=FILE for an encoder-decoder")
        return {kind: Path(file) for kind, file in (data or pairs).items()}

    def read(self, documents: DocumentOptions) -> Texts:
        if self.pairs:
            return {kind: documents.read_pairs(file) for kind, file in self.files.items()}
        return {kind: documents.read(file) for kind, file in self.files.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """What to measure."""

    temperature: Annotated[list[float] | None, Option(help="Repeatable; 0 is greedy. Default: 0 and 0.8.")] = None
    speculative_tokens: Annotated[
        list[int] | None, Option("--speculative-tokens", help="Repeatable. Default: 1, 2, 4 and 8.")
    ] = None
    num_texts: Annotated[int, Option("--num-texts", help="Texts of each kind that the target generates.")] = 24
    max_tokens: Annotated[int, Option("--max-tokens", min=1, help="Tokens of each text.")] = 128
    measures: Annotated[
        bool, Option("--check", help="Also run the draft on the same prompts, and report what it achieved.")
    ] = False
    budget: Annotated[
        str, Option(help="Time to measure what steps and drafts cost here, such as 20s; none: do not predict speed.")
    ] = "20s"
    seed: Annotated[int, Option(help="The seed of the generated texts.")] = 0

    def check(self) -> None:
        """Raises ForedraftError."""
        _ = self.seconds
        if min(self.gammas) < 1 or self.num_texts < 1 or self.max_tokens < 2:
            raise ForedraftError("--speculative-tokens and --num-texts must be at least 1, and --max-tokens at least 2")

    @property
    def temperatures(self) -> list[float]:
        return self.temperature or [0.0, 0.8]

    @property
    def gammas(self) -> list[int]:
        return sorted(set(self.speculative_tokens or [1, 2, 4, 8]))

    @property
    def seconds(self) -> float | None:
        """For the prediction of speed; None: no prediction."""
        return None if self.budget == _NO_BUDGET else parse_budget(self.budget)


@train.command()
@option_groups
def evaluate(
    pair: PairOptions,
    evaluation: EvaluationOptions,
    held_out: HeldOutOptions,
    documents: DocumentOptions,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a draft model or head: acceptance by position, the expected tokens per target pass, and the speed.

    No draft is sampled: the expectation is computed on texts that the
    target generates. docs/guides/training.md explains how.
    """
    pair.check()
    evaluation.check()
    require_sources([pair.target, pair.draft], held_out.files.values())
    set_threads(pair.num_threads)
    from foredraft.cli.render.evaluation import evaluation_as_dict, print_evaluation

    startup.ready()
    texts = held_out.read(documents)
    llm = pair.load(max(evaluation.gammas))
    reports = _evaluate(llm, texts, evaluation)
    speeds = _predict_speed(llm, texts, evaluation)
    if as_json:
        typer.echo(json.dumps(evaluation_as_dict(reports, speeds)))
    else:
        print_evaluation(reports, speeds)


def _evaluate(llm: LLM, texts: Texts, evaluation: EvaluationOptions) -> list[KindReport]:
    from foredraft.cli.render.progress import share_bar
    from foredraft.train import evaluate

    with share_bar("evaluating") as show:
        return evaluate(
            llm,
            texts,
            evaluation.temperatures,
            evaluation.gammas,
            num_texts=evaluation.num_texts,
            max_tokens=evaluation.max_tokens,
            measures=evaluation.measures,
            seed=evaluation.seed,
            progress=show,
        )


def _predict_speed(llm: LLM, texts: Texts, evaluation: EvaluationOptions) -> list[SpeedPrediction]:
    """Predict the speed on the beginnings of a few documents of each kind; [] if no time is given for it."""
    if evaluation.seconds is None:
        return []
    from foredraft.sampling import SamplingParams
    from foredraft.train import predict_speed
    from foredraft.train.held_out import beginning

    prompts = [
        beginning(document, _PROMPT_CHARACTERS)
        for documents in texts.values()
        for document in documents[:_PROMPTS_PER_KIND]
    ]
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    return predict_speed(llm, prompts, params, evaluation.gammas, budget=evaluation.seconds)
