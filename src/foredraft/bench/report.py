"""The report directory: results.json, runs.jsonl, report.md and plots. docs/guides/benchmarking.md describes each field."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from foredraft.bench.environment import ModelIdentity
from foredraft.bench.figures import Figures
from foredraft.bench.records import GroupRun
from foredraft.bench.result import BenchResult, Comparison, Identity
from foredraft.bench.statistics import Percentiles, Ratio
from foredraft.errors import ForedraftError
from foredraft.utils.folders import make_directory

SCHEMA = "foredraft.bench"
VERSION = 1
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "ignore_eos",
    "verification",
)


def write_report(result: BenchResult, directory: Path) -> list[Path]:
    """Write everything. -> the files, in reading order. Raises ForedraftError for a file that cannot be written."""
    from foredraft.bench.plots import draw_plots  # it takes a second to import

    make_directory(directory)
    try:
        plots = draw_plots(result, directory)
        texts = {
            "report.md": markdown(result, [plot.name for plot in plots if plot.suffix == ".svg"]),
            "results.json": json.dumps(as_dict(result), indent=1) + "\n",
            "runs.jsonl": "".join(f"{json.dumps(_run_as_dict(run))}\n" for run in result.runs),
        }
        for name, text in texts.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ForedraftError(f"{error.filename or directory}: cannot be written: {error.strerror}") from None
    return [*(directory / name for name in texts), *plots]


def as_dict(result: BenchResult) -> dict[str, Any]:
    """results.json."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "environment": asdict(result.environment),
        "settings": {
            "sampling": {name: getattr(result.params, name) for name in SAMPLING_FIELDS},
            "workload": result.workload.name,
            "num_questions": len(result.workload.questions),
            "num_questions_measured": result.figures(result.baseline).num_questions,
            "num_repeats": _num_repeats(result),
            "baseline": result.baseline,
            "texts_must_agree": result.is_promised,
            "cut": list(result.cut),
            "turns": "steps" if result.are_together else "groups",
        },
        "warnings": list(result.warnings),
        "configurations": [
            {
                "name": one.name,
                "method": one.name.partition(":")[0] if not isinstance(one.method, str) else one.method,
                "speculative_tokens": one.speculative_tokens,
                "batch_size": one.batch_size,
                "overall": _measured(result, one.name, None),
                "categories": {category: _measured(result, one.name, category) for category in result.categories},
            }
            for one in result.configurations
        ],
    }


def _num_repeats(result: BenchResult) -> int:
    return 1 + max(run.repeat for run in result.runs)


def _measured(result: BenchResult, name: str, category: str | None) -> dict[str, Any]:
    figures, comparison = result.figures(name, category), result.compare(name, category)
    return {
        "num_questions": figures.num_questions,
        "num_answers": figures.num_answers,
        "num_tokens": figures.num_tokens,
        "seconds": figures.seconds,
        "tokens_per_second": figures.tokens_per_second,
        "num_repeated_8gram_tokens": figures.num_repeated_tokens,
        "repeated_8gram_share": figures.repeated_share,
        "inter_token_latency": _optional(figures.inter_token_latency),
        "time_per_output_token": _optional(figures.time_per_output_token),
        "time_to_first_token": _optional(figures.time_to_first_token),
        "stats": asdict(figures.stats),
        "draft_acceptance_rate": figures.stats.draft_acceptance_rate,
        "conditional_acceptance": figures.stats.conditional_acceptance,
        "acceptance_by_position": figures.acceptance_by_position,
        "mean_acceptance_length": figures.stats.mean_acceptance_length,
        "formula_acceptance_length": figures.formula_acceptance_length,
        "tokens_per_pass": figures.stats.tokens_per_pass,
        "speedup": asdict(comparison.speedup),
        "median_speedup": asdict(comparison.median_speedup),
        "identity": _identity_as_dict(comparison.identity),
        "spec_bench": {
            "tokens_per_second": figures.spec_bench_tokens_per_second,
            "speedup": comparison.spec_bench_speedup,
            "mean_accepted_tokens": figures.spec_bench_mean_accepted_tokens,
        },
    }


def _identity_as_dict(identity: Identity | None) -> dict[str, Any] | None:
    return None if identity is None else asdict(identity) | {"share": identity.share}


def _optional(percentiles: Percentiles | None) -> dict[str, Any] | None:
    return None if percentiles is None else asdict(percentiles)


def _run_as_dict(run: GroupRun) -> dict[str, Any]:
    fields = asdict(run)
    for answer in fields["answers"]:
        for turn in answer["turns"]:
            turn["gaps"] = [round(gap, 7) for gap in turn["gaps"]]
    return fields


Row = tuple[Figures, Comparison]

COLUMNS: dict[str, Callable[[Row], str]] = {
    "tokens/s": lambda row: f"{row[0].tokens_per_second:.1f}",
    "speedup": lambda row: _ratio(row[1].speedup),
    "median of pairs": lambda row: _ratio(row[1].median_speedup),
    "ITL p50 / p95, ms": lambda row: _milliseconds(row[0].inter_token_latency),
    "TTFT p50 / p95, ms": lambda row: _milliseconds(row[0].time_to_first_token),
    "accepted": lambda row: _share(row[0].stats.draft_acceptance_rate),
    "α": lambda row: _number(row[0].stats.conditional_acceptance),
    "τ": lambda row: _number(row[0].stats.mean_acceptance_length),
    "τ by formula": lambda row: _number(row[0].formula_acceptance_length),
    "identical": lambda row: _identical(row[1].identity),
    "in repeated 8-grams": lambda row: _share(row[0].repeated_share),
}
_MORE_COLUMNS: dict[str, Callable[[Row], str]] = {
    "TPOT p50 / p95, ms": lambda row: _milliseconds(row[0].time_per_output_token),
    "tokens": lambda row: str(row[0].num_tokens),
    "Spec-Bench speedup": lambda row: f"{row[1].spec_bench_speedup:.2f}",
    "Spec-Bench #mean accepted tokens": lambda row: _number(row[0].spec_bench_mean_accepted_tokens),
}


def table_rows(
    result: BenchResult, category: str | None = None, columns: dict[str, Callable[[Row], str]] = COLUMNS
) -> list[list[str]]:
    """A row for each configuration, its name first."""
    rows = [(name, (result.figures(name, category), result.compare(name, category))) for name in result.names]
    return [[name, *(show(row) for show in columns.values())] for name, row in rows]


def summary_columns(result: BenchResult) -> list[list[str]]:
    """The summary as columns, for a narrow screen: the names of the figures, then one column per configuration. The figures
    are those of all questions, and the speedup in each category."""
    columns = [["", *COLUMNS], *table_rows(result)]
    for category in result.categories if len(result.categories) > 1 else []:
        columns[0] += [f"speedup, {category}", "in repeated 8-grams"]
        for name, column in zip(result.names, columns[1:], strict=True):
            share = result.figures(name, category).repeated_share
            column += [_ratio(result.compare(name, category).speedup), _share(share)]
    return columns


def facts(result: BenchResult) -> list[str]:
    """The context of the figures: versions, machine, settings, warnings and differences. One line each."""
    return [line for line in _facts(result) if line]


def markdown(result: BenchResult, plots: Sequence[str] = ()) -> str:
    """report.md. plots: files beside it."""
    head = ["configuration", *COLUMNS]
    parts = ["# foredraft bench", "\n".join(f"* {line}" for line in facts(result))]
    parts += ["## All questions", _table(head, table_rows(result))]
    parts.append(_table(["configuration", *_MORE_COLUMNS], table_rows(result, columns=_MORE_COLUMNS)))
    if len(result.categories) > 1:
        parts += [part for one in result.categories for part in (f"## {one}", _table(head, table_rows(result, one)))]
    positions = _position_rows(result)
    if positions:
        width = max(len(row) for row in positions)
        parts += ["## α by position in the draft", _table(["configuration", *map(str, range(1, width))], positions)]
    parts += [f"![{Path(plot).stem}]({plot})" for plot in plots]
    return "\n\n".join([*parts, _LEGEND]) + "\n"


_LEGEND = """\
## What the columns mean

Tokens/s: all tokens over all seconds. Speedup: the ratio of that to the baseline's on the same questions, with the
bootstrap 95 % interval over groups of questions in brackets. Median of pairs: the median of the groups' own ratios.
ITL: the time from one delivery of a text to the next; the tokens of one step arrive together. TPOT: a text's mean time
per token after the first. TTFT: the time to its first token. Accepted: the share of draft tokens that were accepted.
α: accepted over evaluated (accepted and first rejected). τ: tokens per drafted pass of the target; by formula: what α
alone would give. Identical: answers that equal the baseline's token for token. A looping text flatters every drafter,
so the share of tokens inside repeated 8-grams is shown beside every speed. Spec-Bench's speedup is the ratio of mean
tokens/s over questions; its mean accepted tokens are tokens per pass, 1.00 for plain decoding."""


def _facts(result: BenchResult) -> Iterator[str]:
    params, environment, machine = result.params, result.environment, result.environment.machine
    measured = result.figures(result.baseline)
    yield f"{environment.date}, foredraft {environment.foredraft}"
    yield f"target {_model(environment.target)}"
    yield f"draft model {_model(environment.draft)}" if environment.draft else ""
    yield f"head {_model(environment.head)}" if environment.head else ""
    yield (
        f"{machine.processor} ({', '.join([machine.cpu_capability, *machine.cpu_features])}), {machine.num_threads} threads, "
        f"device {environment.device}{f' ({machine.gpus[0]})' if environment.device.startswith('cuda') else ''}"
    )
    yield f"Python {machine.python}, torch {machine.torch}, transformers {machine.transformers}"
    given = {name: getattr(params, name) for name in SAMPLING_FIELDS if name not in ("temperature", "max_tokens")}
    settings = ", ".join(f"{name} {value}" for name, value in given.items() if value not in (None, False))
    temperature = (
        "the checkpoint's own temperature" if params.temperature is None else f"temperature {params.temperature}"
    )
    yield f"{temperature}, at most {params.max_tokens} tokens per answer{', ' + settings if settings else ''}"
    repeats = _num_repeats(result)
    yield (
        f"{result.workload.name}: {measured.num_questions} of {len(result.workload.questions)} questions, asked "
        f"{'once' if repeats == 1 else f'up to {repeats} times'} under each configuration, taking turns {'step by step' if result.are_together else 'group by group'}; "
        f"{measured.num_tokens} tokens under {result.baseline}"
    )
    yield f"cut by the budget: {'; '.join(result.cut)}" if result.cut else ""
    yield from (f"warning: {line}" for line in result.warnings)
    yield f"compared with {result.baseline}"
    yield from _differences(result)


def _differences(result: BenchResult) -> Iterator[str]:
    """Texts that differ although they must not, a line for each configuration."""
    if not result.is_promised:
        yield "sampling without a seed: texts need not agree, so they are not compared"
    for name in result.names:
        identity = result.compare(name).identity
        if identity is None or identity.first_difference is None:
            continue
        first = identity.first_difference
        yield (
            f"{name} differs from {result.baseline} in {identity.num_answers - identity.num_identical} of {identity.num_answers} "
            f"answers, first in question {first.question_id}, turn {first.turn + 1}, token {first.position} "
            f"({first.ours} instead of {first.theirs}); {result.figures(name).stats.num_near_ties} near ties"
        )


def _model(model: ModelIdentity) -> str:
    rounded = f", linear layers in {model.quantization}" if model.quantization else ""
    return f"{model.name} ({model.dtype}{rounded}{', rows not bit-exact here' if model.row_exact is False else ''})"


def _position_rows(result: BenchResult) -> list[list[str]]:
    rows = ((name, result.figures(name).acceptance_by_position) for name in result.names)
    return [[name, *map(_number, alphas)] for name, alphas in rows if alphas]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    padded = [[*row, *[""] * (len(head) - len(row))] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *padded])


def _ratio(ratio: Ratio) -> str:
    if ratio.interval is None:
        return f"{ratio.value:.2f}"
    return f"{ratio.value:.2f} ({ratio.interval.low:.2f} to {ratio.interval.high:.2f})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}".replace("%", " %")


def _milliseconds(percentiles: Percentiles | None) -> str:
    return "" if percentiles is None else f"{1e3 * percentiles.p50:.2f} / {1e3 * percentiles.p95:.2f}"


def _identical(identity: Identity | None) -> str:
    return "" if identity is None else f"{identity.num_identical} of {identity.num_answers}"
