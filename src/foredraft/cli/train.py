"""foredraft train"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.app import app
from foredraft.cli.inputs import budget_of, seconds_of
from foredraft.cli.measuring import shares
from foredraft.cli.options import DeviceOption, DtypeOption, JsonOption, ThreadsOption, set_threads
from foredraft.errors import ForedraftError
from foredraft.model.checkpoint import refuse_unusable
from foredraft.utils import startup
from foredraft.utils.arguments import check_autocast, check_precision, check_threads

if TYPE_CHECKING:
    from foredraft.bench import Interval
    from foredraft.train import Data, KindReport, Outcome, Recipe, SpeedPrediction, Watch

_INTERRUPTED = 130
_NO_BUDGET = "none"

train = typer.Typer(no_args_is_help=True, help="Make a draft for a model, and see what it is worth.")
app.add_typer(train, name="train")

DataOption = Annotated[
    list[Path] | None,
    typer.Option("--data", metavar="FILE", help="Text to train on, .gz and .jsonl too; repeatable."),
]
ExcludeOption = Annotated[
    list[Path] | None,
    typer.Option("--exclude", metavar="FILE", help="Keep the documents of this file out; repeatable."),
]
ValidationOption = Annotated[
    list[str] | None,
    typer.Option(
        "--validation", metavar="NAME=FILE", help="Held-out text of a kind; kept out of training; repeatable."
    ),
]
ValidationShareOption = Annotated[
    float, typer.Option("--validation-share", help="Of the documents, held out where no file is given.")
]
SeparatorOption = Annotated[str, typer.Option(help="What stands between documents.")]
SeparatorLineOption = Annotated[
    str | None, typer.Option("--separator-line", help="A line that begins so ends a document too, and is dropped.")
]
FieldOption = Annotated[str, typer.Option("--text-field", help="Of the objects in .jsonl files.")]
LicenceOption = Annotated[
    list[str] | None, typer.Option("--licence", metavar="FILE=LICENCE", help="For the model card; repeatable.")
]
OutOption = Annotated[Path, typer.Option("--out", metavar="DIR", help="The run and the model; give it again to go on.")]
StepsOption = Annotated[int | None, typer.Option(help="How long to train, in steps.")]
EpochsOption = Annotated[float | None, typer.Option(help="How long to train, in passes over the data.")]
BudgetOption = Annotated[str | None, typer.Option(help="How long to train, as 90s, 20m or 2h.")]
BlockOption = Annotated[int, typer.Option("--context", help="Tokens of a block.")]
BatchOption = Annotated[int, typer.Option("--batch-size", help="Blocks of a step.")]
OptimiserOption = Annotated[str, typer.Option(help="muon (AdamW for what is no matrix) or adamw.")]
RateOption = Annotated[
    float | None, typer.Option("--learning-rate", help="Of AdamW. Default: 0.002 for new models, 0.0006 with --init.")
]
MuonRateOption = Annotated[
    float | None, typer.Option("--muon-learning-rate", help="Of Muon. Default: 0.02 for new models, 0.005 with --init.")
]
WarmUpOption = Annotated[float, typer.Option("--warm-up", help="Share of the run in which the rates rise.")]
ClipOption = Annotated[float, typer.Option(help="The longest gradient.")]
PrecisionOption = Annotated[str, typer.Option("--dtype", help="float32, or bfloat16 for mixed precision.")]
SeedOption = Annotated[
    int, typer.Option(help="Of first weights, of the order of the data and of texts that are written.")
]
EveryOption = Annotated[str, typer.Option("--checkpoint-every", help="How often to save, as 60s or 5m.")]
ArchitectureOption = Annotated[
    Path | None, typer.Option("--architecture", metavar="CONFIG.json", help="The shape of a new model.")
]


@train.command()
def lm(
    context: typer.Context,
    out: OutOption,
    data: DataOption = None,
    architecture: ArchitectureOption = None,
    init: Annotated[str | None, typer.Option(help="Go on from this model instead of a new one.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="The folder of the tokenizer, as a rule the target's. Default: that of --init.")
    ] = None,
    exclude: ExcludeOption = None,
    validation: ValidationOption = None,
    validation_share: ValidationShareOption = 0.02,
    separator: SeparatorOption = "<|endoftext|>",
    separator_line: SeparatorLineOption = None,
    text_field: FieldOption = "text",
    licence: LicenceOption = None,
    steps: StepsOption = None,
    epochs: EpochsOption = None,
    budget: BudgetOption = None,
    block_len: BlockOption = 512,
    batch_size: BatchOption = 8,
    optimiser: OptimiserOption = "muon",
    learning_rate: RateOption = None,
    muon_learning_rate: MuonRateOption = None,
    warm_up: WarmUpOption = 0.02,
    clip: ClipOption = 1.0,
    dtype: PrecisionOption = "float32",
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    checkpoint_every: EveryOption = "60s",
    num_threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a language model from text: a draft for a target that speaks the same tokenizer.

    Give the same command again to go on after a kill. docs/guides/training.md
    says what is written to --out.
    """
    _check(context, init)
    set_threads(num_threads)
    from foredraft.train import Start, train_lm

    start = Start(init=init, architecture=architecture, tokenizer=tokenizer)
    with _watched() as watch:
        outcome = train_lm(_data(context), start, _recipe(context), out, watch)
    _report(outcome, out, as_json)


@train.command()
def distill(
    context: typer.Context,
    target: Annotated[str, typer.Option(help="The model to draft for: hub id or directory.")],
    out: OutOption,
    data: DataOption = None,
    init: Annotated[
        str | None, typer.Option(help="A draft to go on from; it must speak the target's vocabulary.")
    ] = None,
    architecture: ArchitectureOption = None,
    layers: Annotated[
        int | None,
        typer.Option(help="A new draft: the target with so many of its layers. Default, if nothing is given: 1."),
    ] = None,
    own_head: Annotated[
        bool, typer.Option("--own-head", help="Part the draft's head from its embeddings: memory, no time.")
    ] = False,
    loss: Annotated[
        str | None,
        typer.Option(
            help="tv (total variation: the rejections themselves), kl, or kl+tv: first the one, then the other. Default: tv "
            "with --init, else kl+tv."
        ),
    ] = None,
    kl_until: Annotated[
        float, typer.Option("--kl-until", help="With kl+tv: the share of the run that KL fades out in.")
    ] = 0.5,
    temperature: Annotated[
        list[float] | None, typer.Option(help="At which it will serve; repeatable, 0 is greedy. Default: 1.")
    ] = None,
    only_generations: Annotated[
        bool, typer.Option("--only-generations", help="Train on those alone; --data only gives their beginnings.")
    ] = False,
    generations: Annotated[int, typer.Option(help="Texts of the target's own to train on as well.")] = 0,
    exclude: ExcludeOption = None,
    validation: ValidationOption = None,
    validation_share: ValidationShareOption = 0.02,
    separator: SeparatorOption = "<|endoftext|>",
    separator_line: SeparatorLineOption = None,
    text_field: FieldOption = "text",
    licence: LicenceOption = None,
    steps: StepsOption = None,
    epochs: EpochsOption = None,
    budget: BudgetOption = None,
    block_len: BlockOption = 512,
    batch_size: BatchOption = 8,
    optimiser: OptimiserOption = "muon",
    learning_rate: RateOption = None,
    muon_learning_rate: MuonRateOption = None,
    warm_up: WarmUpOption = 0.02,
    clip: ClipOption = 1.0,
    dtype: PrecisionOption = "float32",
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    checkpoint_every: EveryOption = "60s",
    num_threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a draft for a target from the target's own distribution, or fit a draft that there is.

    Give the same command again to go on after a kill. docs/guides/training.md
    says what is written to --out, and how to choose.
    """
    _check(context, target, init)
    set_threads(num_threads)
    from foredraft.train import Start, train_distill

    start = Start(init=init, architecture=architecture, layers=layers, own_head=own_head)
    with _watched() as watch:
        outcome = train_distill(target, _data(context), start, _recipe(context), out, watch)
    _report(outcome, out, as_json)


@train.command()
def evaluate(
    context: typer.Context,
    target: Annotated[str, typer.Option(help="Hub id or directory.")],
    draft: Annotated[str, typer.Option(help="The draft model: hub id or directory.")],
    data: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE", help="Text that neither has seen, by kind; repeatable.")
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Repeatable; 0 is greedy. Default: 0 and 0.8.")
    ] = None,
    speculative_tokens: Annotated[
        list[int] | None, typer.Option("--speculative-tokens", help="Repeatable. Default: 1, 2, 4 and 8.")
    ] = None,
    num_texts: Annotated[int, typer.Option("--num-texts", help="Of each kind, that the target writes.")] = 24,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Of each text.")] = 128,
    check: Annotated[
        bool, typer.Option("--check", help="Run the draft on the same prompts too, and say what it did.")
    ] = False,
    budget: Annotated[
        str, typer.Option(help="For measuring what steps and drafts cost here, as 20s; none leaves speed out.")
    ] = "20s",
    separator: SeparatorOption = "<|endoftext|>",
    separator_line: SeparatorLineOption = None,
    text_field: FieldOption = "text",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    num_threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a draft is worth: acceptance by place, the tokens per target pass it will bring, and the speed.

    No draft is drawn: the expectation is computed on texts that the
    target writes. docs/guides/training.md says how.
    """
    check_threads(num_threads)
    check_precision(dtype, None)
    seconds = None if budget == _NO_BUDGET else budget_of(budget)
    files = _named(data or [], "--data")
    if not files:
        raise ForedraftError("give --data NAME=FILE: held-out text")
    temperatures, gammas = temperature or [0.0, 0.8], sorted(set(speculative_tokens or [1, 2, 4, 8]))
    if min(gammas) < 1 or num_texts < 1 or max_tokens < 2:
        raise ForedraftError("--speculative-tokens and --num-texts must be at least 1, and --max-tokens at least 2")
    _require_sources([target, draft], [Path(file) for file in files.values()])
    set_threads(num_threads)
    from foredraft.llm import LLM
    from foredraft.sampling import SamplingParams
    from foredraft.train import evaluate as evaluate_draft
    from foredraft.train import predict_speed
    from foredraft.train.corpus import read_file

    startup.ready()
    texts = {
        kind: read_file(Path(file), separator=separator, separator_line=separator_line, field=text_field).documents
        for kind, file in files.items()
    }
    llm = LLM(target, draft, dtype=dtype, device=device, speculative_tokens=max(gammas))
    with shares("evaluating") as show:
        reports = evaluate_draft(
            llm,
            texts,
            temperatures,
            gammas,
            num_texts=num_texts,
            max_tokens=max_tokens,
            measures=check,
            seed=seed,
            progress=show,
        )
    prompts = [document[:80].strip() for documents in texts.values() for document in documents[:3]]
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    speeds = predict_speed(llm, prompts, params, gammas, budget=seconds) if seconds is not None else []
    if as_json:
        typer.echo(json.dumps(_as_dict(reports, speeds)))
    else:
        _print_reports(reports, speeds)


def _check(context: typer.Context, *models: str | None) -> None:
    """What lm and distill can refuse before PyTorch is imported."""
    given: dict[str, Any] = context.params
    check_threads(given["num_threads"])
    check_autocast(given["dtype"])
    if given["budget"] is not None:
        budget_of(given["budget"])
    seconds_of(given["checkpoint_every"])
    validation = _named(given["validation"] or [], "--validation").values()
    shape = [given["architecture"]] if given["architecture"] is not None else []
    _require_sources(
        [model for model in models if model is not None],
        [*(given["data"] or ()), *(given["exclude"] or ()), *(Path(file) for file in validation), *shape],
    )


def _require_sources(models: list[str], files: list[Path]) -> None:
    for model in models:
        refuse_unusable(model)
    for file in files:
        if not file.is_file():
            raise ForedraftError(f"{file}: cannot be read: {'it is a directory' if file.is_dir() else 'no such file'}")


def _named(given: list[str], option: str) -> dict[str, str]:
    found = {}
    for one in given:
        name, equals, file = one.partition("=")
        if not equals or not name or not file:
            raise ForedraftError(f"{option} takes NAME=FILE, not {one!r}")
        found[name] = file
    return found


def _data(context: typer.Context) -> Data:
    from foredraft.train import Data

    given: dict[str, Any] = context.params
    return Data(
        files=tuple(given["data"] or ()),
        exclude=tuple(given["exclude"] or ()),
        validation={kind: Path(file) for kind, file in _named(given["validation"] or [], "--validation").items()},
        validation_share=given["validation_share"],
        separator=given["separator"],
        separator_line=given["separator_line"],
        text_field=given["text_field"],
        licences=_named(given["licence"] or [], "--licence"),
    )


def _recipe(context: typer.Context) -> Recipe:
    from foredraft.train import FITTING, LearningRates, Recipe

    given: dict[str, Any] = context.params
    usual, loss = (LearningRates(), "kl+tv") if given["init"] is None else (FITTING, "tv")
    names = (
        "steps",
        "epochs",
        "batch_size",
        "optimiser",
        "clip",
        "dtype",
        "device",
        "seed",
        "kl_until",
        "generations",
        "only_generations",
    )
    return Recipe(
        **{name: given[name] for name in names if name in given},
        seconds=None if given["budget"] is None else budget_of(given["budget"]),
        context=given["block_len"],
        loss=given.get("loss") or loss,
        rates=LearningRates(
            usual.matrices if given["muon_learning_rate"] is None else given["muon_learning_rate"],
            usual.others if given["learning_rate"] is None else given["learning_rate"],
            given["warm_up"],
        ),
        temperatures=tuple(given.get("temperature") or (1.0,)),
        checkpoint_every=seconds_of(given["checkpoint_every"]),
    )


@contextmanager
def _watched() -> Iterator[Watch]:
    """A bar on a terminal; nothing elsewhere."""
    from foredraft.cli.render import training_bar
    from foredraft.train import Watch

    startup.ready()
    with training_bar() as bar:
        yield Watch(bar.stage, bar.share, lambda one: bar.step(one.progress, one.loss, one.acceptance))


def _report(outcome: Outcome, out: Path, as_json: bool) -> None:
    if not outcome.complete:
        typer.echo(f"stopped at step {outcome.step}: give the same command again to go on", err=True)
        raise typer.Exit(_INTERRUPTED)
    if as_json:
        typer.echo(json.dumps(asdict(outcome)))
        return
    last = outcome.history[-1]
    for kind, acceptance in last.acceptance.items():
        before = outcome.history[0].acceptance[kind]
        typer.echo(f"{kind}: acceptance {acceptance:.3f} (before: {before:.3f}), loss {last.loss[kind]:.3f}")
    typer.echo(f"{outcome.step} steps, {outcome.num_parameters} parameters; model: {out}")


def _as_dict(reports: list[KindReport], speeds: list[SpeedPrediction]) -> dict[str, Any]:
    cost = {one.gamma: one for one in speeds}
    return {
        "schema": "foredraft.train.evaluation",
        "version": 1,
        "kinds": [
            {
                "kind": one.kind,
                "temperature": one.temperature,
                "num_texts": one.texts.num_measured,
                "num_texts_asked": one.texts.num_asked,
                "num_documents": one.texts.num_documents,
                "num_documents_too_short": one.texts.num_too_short,
                "acceptance_on_text": one.on_text.mean,
                "of": [
                    {
                        "speculative_tokens": gamma,
                        "tau": found.tau,
                        "tau_interval": None if (span := one.tau_intervals[gamma]) is None else asdict(span),
                        "acceptance_by_position": found.by_position,
                        "measured_tau": one.measured.get(gamma),
                        "predicted_speedup": cost[gamma].speedup(found.tau) if gamma in cost else None,
                    }
                    for gamma, found in one.expected.items()
                ],
            }
            for one in reports
        ],
    }


def _print_reports(reports: list[KindReport], speeds: list[SpeedPrediction]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from foredraft.cli import render

    heads = [
        "text",
        "texts",
        "temperature",
        "Σmin(p, q)",
        "γ",
        "acceptance by place",
        "τ",
        "τ measured",
        "predicted speedup",
    ]
    table = Table(box=SIMPLE_HEAD)
    for head in heads:
        table.add_column(head, justify="left" if head in ("text", "acceptance by place") else "right")
    cost = {one.gamma: one for one in speeds}
    for one in reports:
        for gamma, found in one.expected.items():
            table.add_row(
                one.kind,
                str(one.texts.num_measured),
                f"{one.temperature:g}",
                f"{one.on_text.mean:.3f}",
                str(gamma),
                " ".join(f"{alpha:.2f}" for alpha in found.by_position),
                _with_interval(found.tau, one.tau_intervals[gamma]),
                f"{one.measured[gamma]:.2f}" if gamma in one.measured else "",
                f"{cost[gamma].speedup(found.tau):.2f}" if gamma in cost else "",
            )
    render.output_console().print(table)
    console = render.output_console()
    for line in _fewer(reports):
        console.out(line, highlight=False)


def _with_interval(value: float, interval: Interval | None) -> str:
    return f"{value:.2f}" if interval is None else f"{value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _fewer(reports: list[KindReport]) -> list[str]:
    """Of each kind of which fewer texts were measured than were asked for: why, and what an interval would need."""
    found = {one.kind: one.texts for one in reports if one.texts.why_fewer is not None}
    lines = [f"{kind}: {texts.why_fewer}" for kind, texts in found.items()]
    if found:
        lines.append(
            "Each document gives one text: see --separator, --separator-line and --text-field for where one ends."
        )
    if any(texts.num_measured < 2 for texts in found.values()):
        lines.append("One text gives no interval: another one may come out quite otherwise.")
    return lines
