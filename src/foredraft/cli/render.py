"""What the command line shows: text coloured by where its tokens came from, lines of metrics, tables, JSON."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from foredraft.engine.sequence import Origin
from foredraft.text.text import IncrementalDecoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foredraft.certificate import Certificate, CheckResult, ControlResult
    from foredraft.text.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from foredraft.tools.demo import Comparison, Side
    from foredraft.tools.inspection import Inspection, MemoryReport, ModelReport
    from foredraft.tools.quality import QualityReport
    from foredraft.utils.machine import MachineReport

STYLES = {Origin.PLAIN: "default", Origin.ACCEPTED: "green", Origin.RECOVERED: "red", Origin.BONUS: "blue"}
NAMES = {
    Origin.ACCEPTED: "accepted draft token",
    Origin.RECOVERED: "recovered token",
    Origin.BONUS: "bonus token",
    Origin.PLAIN: "plain token (no draft)",
}
# what a terminal would obey rather than show: a model may write anything
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {
    0x7F: 0x2421,
    **dict.fromkeys(range(128, 160), 65533),
}

_PIPE_WIDTH = 200

Piece = tuple[str, Origin]


def output_console() -> Console:
    """For what was asked for. Lines are not broken: a pipe gets them whole."""
    return Console(file=sys.stdout, width=_width(sys.stdout), highlight=False, soft_wrap=True)


def error_console() -> Console:
    """For everything about it."""
    return Console(file=sys.stderr, width=_width(sys.stderr), highlight=False, soft_wrap=True)


def _width(stream: TextIO) -> int | None:
    """A pipe has no width: tables there are as wide as they need to be."""
    return None if stream.isatty() else _PIPE_WIDTH


class OriginPieces:
    """Cuts the text of a stream where its tokens meet, and says where each piece came from.

    The text arrives later than its tokens (unfinished characters, possible stop strings), so what each token adds is
    found by decoding once more, and the characters are handed out in that order.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens, prompt_ids=prompt_ids)
        self._runs: deque[tuple[int, Origin]] = deque()
        self._last = Origin.PLAIN

    def split(self, text: str, token_ids: Sequence[int], origins: Sequence[Origin]) -> list[Piece]:
        """The pieces of `text`, after these tokens too were written."""
        for token_id, origin in zip(token_ids, origins, strict=True):
            self._runs.append((len(self._decoder.push(token_id)), origin))
        pieces = []
        while text and self._runs:
            length, self._last = self._runs.popleft()
            if length > len(text):
                self._runs.appendleft((length - len(text), self._last))
            if length:
                pieces.append((text[:length], self._last))
            text = text[length:]
        # the end of a text may hold more than its tokens gave so far: a character that stayed unfinished
        return [*pieces, (text, self._last)] if text else pieces


def pieces_of(text: CompletionOutput, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> list[Piece]:
    """A whole text's pieces."""
    return OriginPieces(tokenizer, prompt_ids).split(text.text, text.token_ids, text.origins)


def colours(console: Console) -> bool:
    """Whether origins can be told apart on it."""
    return console.is_terminal and console.color_system is not None and not console.no_color


def write_pieces(console: Console, pieces: Iterable[Piece]) -> None:
    """At once, coloured on a terminal, and the bare text anywhere else."""
    for piece, origin in pieces:
        if console.is_terminal:
            console.out(piece.translate(_CONTROLS), style=STYLES[origin], end="", highlight=False)
        else:
            console.file.write(piece)
    console.file.flush()


def write_text(console: Console, text: str) -> None:
    """Text without colours, but safe for a terminal."""
    console.file.write(text.translate(_CONTROLS) if console.is_terminal else text)
    console.file.flush()


def legend(origins: Iterable[Origin]) -> Text:
    """What the colours mean, with how many tokens of each there are."""
    counts = Counter(origins)
    line = Text()
    for origin, name in NAMES.items():
        if counts[origin]:
            line.append("  " if line else "")
            line.append(f"■ {name} ({counts[origin]})", style=STYLES[origin])
    return line


def metrics_line(metrics: RequestMetrics, num_tokens: int) -> str:
    """What one request took, and what its drafts were worth."""
    parts = [f"{num_tokens} tokens"]
    if metrics.tokens_per_second is not None:
        parts.append(f"{metrics.tokens_per_second:.1f} tokens/s")
    if metrics.time_to_first_token is not None:
        parts.append(f"first after {_milliseconds(metrics.time_to_first_token)}")
    if metrics.inter_token_latency is not None:
        parts.append(f"then {_milliseconds(metrics.inter_token_latency)} each")
    found = metrics.speculative_decoding
    if found.num_spec_steps:
        parts.append(f"accepted {found.num_accepted_draft_tokens} of {found.num_draft_tokens} draft tokens")
        parts.append(f"τ {_number(found.mean_acceptance_length)}")
    if found.num_near_ties:
        parts.append(f"{found.num_near_ties} near ties")
    return ", ".join(parts)


def as_json(output: RequestOutput) -> dict[str, Any]:
    """One request. text, token_ids and finish_reason are its first text's; with several, `choices` has them all."""
    first, num_output = output.outputs[0], sum(len(text.token_ids) for text in output.outputs)
    found: dict[str, Any] = {"prompt": output.prompt, **_text_as_json(first)}
    if output.prompt is None:
        found["prompt_token_ids"] = output.prompt_token_ids
    if len(output.outputs) > 1:
        found["choices"] = [{"index": text.index, **_text_as_json(text)} for text in output.outputs]
    num_prompt = len(output.prompt_token_ids)
    found["usage"] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }
    return found | {"metrics": asdict(output.metrics)}


def _text_as_json(text: CompletionOutput) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": text.text,
        "token_ids": text.token_ids,
        "finish_reason": text.finish_reason,
        "stop_reason": text.stop_reason,
    }
    return found | {"error": text.error} if text.error else found


def comparison_table(comparison: Comparison) -> Table:
    """Plain decoding beside speculation."""
    stats, plain, drafted = comparison.stats, comparison.plain, comparison.speculative
    table = Table(box=SIMPLE_HEAD, caption=_caption(comparison), caption_justify="left")
    table.add_column(f"{comparison.method}, γ = {comparison.speculative_tokens}", no_wrap=True)
    table.add_column("plain", justify="right", no_wrap=True)
    table.add_column("speculation", justify="right", no_wrap=True)
    for name, show in _SIDE_ROWS.items():
        table.add_row(name, show(plain), show(drafted))
    table.add_row("draft acceptance rate", "", _number(stats.draft_acceptance_rate))
    table.add_row("conditional acceptance α", "", _number(stats.conditional_acceptance))
    table.add_row("mean acceptance length τ", "", _number(stats.mean_acceptance_length))
    table.add_row("τ = (1 − α^(γ+1)) / (1 − α)", "", _number(comparison.formula_acceptance_length))
    table.add_row("speedup", "", f"{comparison.speedup:.2f}×")
    table.add_row("texts identical", "", _identical(comparison))
    return table


def _caption(comparison: Comparison) -> str:
    return (
        f"{comparison.num_tokens} tokens, {comparison.repeated_share:.0%} of them in repeated 8-grams; "
        f"medians of {comparison.num_runs} alternating runs"
    )


def _identical(comparison: Comparison) -> str:
    if comparison.identical is None:
        return "not promised without --seed"
    if comparison.identical:
        return "yes"
    return f"no, from token {comparison.first_difference}; {comparison.stats.num_near_ties} near ties"


def inspection_table(inspection: Inspection) -> Table:
    """The models, side by side."""
    models = [model for model in (inspection.target, inspection.draft) if model is not None]
    table = Table(box=SIMPLE_HEAD)
    for title in ("", "target", "draft")[: len(models) + 1]:
        table.add_column(title, overflow="fold")
    for name, show in _MODEL_ROWS.items():
        table.add_row(name, *(show(model) for model in models))
    return table


def inspection_lines(inspection: Inspection) -> list[str]:
    """What holds for the pair and the machine, a line each."""
    lines = _memory_lines(inspection.memory)
    lines.append(f"machine: {_machine(inspection.machine)}")
    lines.append(f"exactness: {inspection.exactness}")
    verdict = "yes" if inspection.fits else f"no: {inspection.reason}"
    lines.append(f"fits: {verdict}")
    return lines


def _memory_lines(memory: MemoryReport) -> list[str]:
    weights = f"weights {_bytes(memory.weight_bytes)}"
    free = f"{_bytes(memory.available_bytes)} {memory.when} on {memory.device}"
    lines = [f"memory: {weights}; {free}"]
    if memory.full_context_bytes is not None:
        held = "" if memory.num_full_contexts is None else f" ({memory.num_full_contexts} fit by default)"
        lines.append(
            f"cache: {_bytes(memory.cache_bytes_per_token)} per token, {_bytes(memory.full_context_bytes)} for a full "
            f"context, draft included{held}"
        )
    if memory.peak_bytes is not None:
        before = f", {_bytes(memory.process_bytes)} of it before the first weight" if memory.process_bytes else ""
        lines.append(f"peak: {_bytes(memory.peak_bytes)}, with one text of the full context{before}")
    return lines


def quality_lines(quality: QualityReport) -> list[str]:
    """What the run's precision costs, a line for each figure."""
    run = quality.dtype if quality.quantization is None else f"{quality.dtype} with {quality.quantization} weights"
    return [
        f"quality: {run} against float32, over {quality.num_tokens:,} tokens in windows of {quality.window_len}",
        f"perplexity: {quality.perplexity:.4f} against {quality.reference_perplexity:.4f} "
        f"({quality.perplexity_increase:+.3f} %)",
        f"agreement: the same likeliest token at {quality.agreement:.2f} % of positions",
    ]


def certificate_tables(found: Certificate) -> list[Table]:
    """The tests of the real verifier, and those of the broken ones."""
    title = f"{found.method}, temperature {found.temperature:g}"
    tests = Table(box=SIMPLE_HEAD)
    for name, justify in ((title, "left"), ("looked at", "right"), ("found", "left"), ("odds", "left"), ("", "left")):
        tests.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for check in found.checks:
        tests.add_row(f"{check.name}, {check.kind}", _looked_at(check), check.detail, check.odds, _mark(check.passed))
    if not found.controls:
        return [tests]
    controls = Table(box=SIMPLE_HEAD)
    for name, justify in (
        ("broken on purpose", "left"),
        ("rejected by", "left"),
        ("after", "right"),
        ("power", "right"),
    ):
        controls.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for name, group in _by_name(found.controls).items():
        by = [f"{one.kind}: {one.by or 'nothing'}" for one in group]
        after = [f"{one.num_tokens:,} tokens" for one in group]
        controls.add_row(f"{name}: {group[0].says}", "\n".join(by), "\n".join(after), "\n".join(map(_power, group)))
    return [tests, controls]


def certificate_lines(found: Certificate) -> list[str]:
    """What holds for all of it, and the verdict last."""
    rows = "bit-exact" if found.row_exact else f"not bit-exact: ties up to {found.tie:.1e} are let through"
    lines = [f"drafts: {found.drafts}", f"rows: {rows}", *(f"left out: {line}" for line in found.left_out)]
    rejected = sum(control.rejected for control in found.controls)
    odds = f"false alarm at most {found.false_alarm:.0e}, " if found.false_alarm else ""
    lines.append(
        f"in all: {odds}{rejected} of {len(found.controls)} broken verifiers rejected, {found.num_prompts} prompts, "
        f"seed {found.seed}, {found.seconds:.0f} s"
    )
    lines.append(f"verdict: {found.verdict}" + (f": {found.reason}" if found.reason else ""))
    return lines


def _looked_at(check: CheckResult) -> str:
    what = "steps" if check.kind == "drawn" else "texts"
    return f"{check.num_texts:,} {what}\n{check.num_tokens:,} tokens\n{check.num_drafted:,} drafted"


def _mark(passed: bool) -> Text:
    return Text("passed", style="green") if passed else Text("FAILED", style="bold red")


def _power(control: ControlResult) -> str:
    if control.power is None:
        return "-"
    return "> 0.9999" if control.power > 0.9999 else f"{control.power:.4f}"


def _by_name(controls: Iterable[ControlResult]) -> dict[str, list[ControlResult]]:
    groups: dict[str, list[ControlResult]] = {}
    for control in controls:
        groups.setdefault(control.name, []).append(control)
    return groups


def _machine(machine: MachineReport) -> str:
    features = f" with {', '.join(machine.cpu_features)}" if machine.cpu_features else ""
    return (
        f"{machine.cpu_capability}{features}, {machine.num_threads} threads for torch {machine.torch}, "
        f"transformers {machine.transformers}"
    )


@contextmanager
def spinner(description: str) -> Iterator[None]:
    """On a terminal, on standard error; nothing elsewhere."""
    console = error_console()
    if not console.is_terminal:
        yield
        return
    with console.status(description):
        yield


@contextmanager
def status(description: str) -> Iterator[Callable[[str], None]]:
    """Gives a function that says what is done now. On a terminal, on standard error; nothing elsewhere."""
    console = error_console()
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(description) as shown:
        yield lambda now: shown.update(f"{description}: {now}")


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[], None]]:
    """Gives a function that advances the bar by one. On a terminal, on standard error; nothing elsewhere."""
    console = error_console()
    if not console.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)


class TrainingBar:
    """What a training run does now: a stage with its share, or steps with what they found."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=1.0)

    def stage(self, description: str) -> None:
        self._bar.reset(self._task, description=description, total=1.0)

    def share(self, share: float) -> None:
        self._bar.update(self._task, completed=share)

    def step(self, share: float, loss: float, acceptance: float) -> None:
        description = f"loss {loss:.3f}  acceptance {acceptance:.3f}"
        self._bar.update(self._task, completed=share, description=description)


@contextmanager
def training_bar() -> Iterator[TrainingBar]:
    """On a terminal, on standard error; nothing elsewhere."""
    console = error_console()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield TrainingBar(progress)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.2f} ms"


def _bytes(amount: int | None) -> str:
    if amount is None:
        return "unknown"
    value, units = float(amount), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} bytes" if units[0] == "bytes" else f"{value:.1f} {units[0]}"


def _both(predicted: int | None, measured: int | None) -> str:
    """One figure where the two agree."""
    if measured is None:
        return f"{_bytes(predicted)} (predicted)"
    if predicted is None or _bytes(predicted) == _bytes(measured):
        return _bytes(measured)
    return f"{_bytes(measured)} (predicted {_bytes(predicted)})"


def _weights(model: ModelReport) -> str:
    return _both(model.predicted.weight_bytes, model.measured.weight_bytes if model.measured else None)


def _cache(model: ModelReport) -> str:
    return _both(
        model.predicted.cache_bytes_per_token, model.measured.cache_bytes_per_token if model.measured else None
    )


def _dtype(model: ModelReport) -> str:
    return model.dtype if model.quantization is None else f"{model.dtype}, linear layers in {model.quantization}"


def _attention(model: ModelReport) -> str:
    return ", ".join(f"{count} × {kind}" for kind, count in model.attention.items())


def _exact(model: ModelReport) -> str:
    return {None: "not measured", True: "yes", False: "no"}[model.row_exact]


_SIDE_ROWS: dict[str, Callable[[Side], str]] = {
    "tokens/s": lambda side: f"{side.tokens_per_second:.1f}",
    "inter-token latency": lambda side: _milliseconds(side.inter_token_latency),
    "time to first token": lambda side: _milliseconds(side.time_to_first_token),
}

_MODEL_ROWS: dict[str, Callable[[ModelReport], str]] = {
    "name": lambda model: model.name,
    "architecture": lambda model: model.architecture,
    "attention": _attention,
    "dtype": _dtype,
    "parameters": lambda model: "unknown" if model.num_parameters is None else f"{model.num_parameters / 1e6:,.1f} M",
    "weights": _weights,
    "cache per token": _cache,
    "context": lambda model: f"{model.context_len:,} tokens",
    "vocabulary": lambda model: "no tokenizer" if model.num_tokens is None else f"{model.num_tokens:,} tokens",
    "logits": lambda model: "unknown" if model.logit_width is None else f"{model.logit_width:,} wide",
    "rows bit-exact here": _exact,
}
