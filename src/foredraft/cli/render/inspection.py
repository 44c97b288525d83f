"""The report of `foredraft inspect`, as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from foredraft.cli.render.units import bytes_text

if TYPE_CHECKING:
    from foredraft.tools.inspection import HeadReport, Inspection, MemoryReport, ModelReport, VocabularyReport
    from foredraft.tools.quality import QualityReport
    from foredraft.utils.machine import MachineReport


def inspection_table(inspection: Inspection) -> Table:
    """The models, side by side."""
    models = [model for model in (inspection.target, inspection.draft) if model is not None]
    table = Table(box=SIMPLE_HEAD)
    for title in ("", "target", "draft")[: len(models) + 1]:
        table.add_column(title, overflow="fold")
    for name, show in _MODEL_ROWS.items():
        table.add_row(name, *(show(model) for model in models))
    return table


def head_table(head: HeadReport) -> Table:
    """The head that is used instead of a draft model."""
    table = Table(box=SIMPLE_HEAD)
    for title in ("", "head"):
        table.add_column(title, overflow="fold")
    for name, show in _HEAD_ROWS.items():
        if text := show(head):
            table.add_row(name, text)
    return table


def inspection_lines(inspection: Inspection) -> list[str]:
    """What applies to the pair and to the machine, one line for each fact."""
    fits = "yes" if inspection.fits else f"no: {inspection.reason}"
    return [
        *_mtp_lines(inspection.target),
        *_vocabulary_lines(inspection.vocabularies),
        *_memory_lines(inspection.memory),
        f"machine: {_machine(inspection.machine)}",
        f"exactness: {inspection.exactness}",
        f"fits: {fits}",
    ]


def _mtp_lines(target: ModelReport) -> list[str]:
    count = target.num_mtp_layers
    if not count:
        return []
    return [
        f"MTP layers: {count} in the target's checkpoint; --method mtp drafts with {'it' if count == 1 else 'them'}"
    ]


def _vocabulary_lines(report: VocabularyReport | None) -> list[str]:
    if report is None:
        return []
    how = _DRAFTING[report.method]
    if report.agreement is None:
        return [f"vocabularies: {how}"]
    chosen = "" if report.is_chosen else ", as requested"
    return [
        f"vocabularies: {how}{chosen}; on the {report.text} text {100 * report.agreement:.0f} % of the draft's ids agree in place, "
        f"and it has {report.draft_bytes_per_id:.2f} bytes per id against {report.target_bytes_per_id:.2f}"
    ]


_DRAFTING = {
    "same": "the same",
    "slem": "different; slem: the draft's text is encoded with the target's tokenizer and compared",
    "tli": "different; tli: the draft model draws from the tokens that both have",
}


def _memory_lines(memory: MemoryReport) -> list[str]:
    weights = f"weights {bytes_text(memory.weight_bytes)}"
    free = f"{bytes_text(memory.available_bytes)} {memory.when} on {memory.device}"
    lines = [f"memory: {weights}; {free}"]
    if memory.full_context_bytes is not None:
        num_fit = (
            "" if memory.num_full_contexts is None else f"; the default cache holds {memory.num_full_contexts} of these"
        )
        lines.append(
            f"cache: {bytes_text(memory.cache_bytes_per_token)} per token, {bytes_text(memory.full_context_bytes)} for a "
            f"full context, draft included{num_fit}"
        )
    if memory.peak_bytes is not None:
        before = (
            f"; {bytes_text(memory.process_bytes)} of it is the process before any weights are loaded"
            if memory.process_bytes
            else ""
        )
        lines.append(f"peak: {bytes_text(memory.peak_bytes)}, with one text of the full context{before}")
    return lines


def quality_lines(quality: QualityReport) -> list[str]:
    """What the run's precision costs, one line for each figure."""
    run = quality.dtype if quality.quantization is None else f"{quality.dtype} with {quality.quantization} weights"
    return [
        f"quality: {run} against float32, over {quality.num_tokens:,} tokens in windows of {quality.window_len}",
        f"perplexity: {quality.perplexity:.4f} against {quality.reference_perplexity:.4f} "
        f"({quality.perplexity_increase:+.3f} %)",
        f"agreement: the same likeliest token at {quality.agreement:.2f} % of positions",
    ]


def _machine(machine: MachineReport) -> str:
    features = f" with {', '.join(machine.cpu_features)}" if machine.cpu_features else ""
    return (
        f"{machine.cpu_capability}{features}, {machine.num_threads} threads for torch {machine.torch}, "
        f"transformers {machine.transformers}"
    )


def _both(predicted: int | None, measured: int | None) -> str:
    """Both sizes; only one if they look the same."""
    if measured is None:
        return f"{bytes_text(predicted)} (predicted)"
    if predicted is None or bytes_text(predicted) == bytes_text(measured):
        return bytes_text(measured)
    return f"{bytes_text(measured)} (predicted {bytes_text(predicted)})"


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


def _row_exact(model: ModelReport) -> str:
    return {None: "not measured", True: "yes", False: "no"}[model.row_exact]


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
    "rows bit-exact here": _row_exact,
}


def _layers(head: HeadReport) -> str:
    unit = "head" if head.kind == "medusa" else "layer"
    return (
        f"{head.num_layers} {unit}{'' if head.num_layers == 1 else 's'}, {head.num_parameters / 1e6:,.1f} M parameters"
    )


def _vocabulary(head: HeadReport) -> str:
    text = f"{head.draft_vocab_size:,} of {head.vocab_size:,} ids"
    return text if head.coverage is None else f"{text}: {head.coverage:.1%} of the text's tokens"


def _by_precision(amounts: dict[str, int]) -> str:
    return ", ".join(f"{bytes_text(amount)} in {precision}" for precision, amount in amounts.items())


def _head_weights(head: HeadReport) -> str:
    borrowed = f"; in addition, the target's {' and '.join(head.borrows)}" if head.borrows else ""
    here = _both(head.predicted.weight_bytes, head.measured.weight_bytes if head.measured else None)
    return f"{_by_precision(head.weight_bytes)}{borrowed}; as it would run: {here}"


def _head_cache(head: HeadReport) -> str:
    features, others = bytes_text(head.feature_bytes_per_token), bytes_text(head.own_cache_bytes_per_token)
    return f"{features} of hidden states, {others} of its own keys and values"


def _step(head: HeadReport) -> str:
    return "; ".join(
        f"{bytes_text(amount)} in {precision}{_of_a_pass(head.step_share(precision))}"
        for precision, amount in head.step_bytes.items()
    )


def _of_a_pass(share: float | None) -> str:
    return "" if share is None else f", {share:.1%} of a pass of the target"


def _open_settings(head: HeadReport) -> str:
    return "; ".join(f"{name}: {' or '.join(map(str, values))}" for name, values in head.open_settings.items())


def _reads(head: HeadReport) -> str:
    return f"{'; '.join(head.reads)} (taps {', '.join(map(str, head.taps))})" if head.taps else ""


_HEAD_ROWS: dict[str, Callable[[HeadReport], str]] = {
    "name": lambda head: head.name,
    "kind": lambda head: f"{head.kind}, in the format of {head.form}",
    "size": _layers,
    "reads": _reads,
    "vocabulary": _vocabulary,
    "weights": _head_weights,
    "per token": _head_cache,
    "a draft token reads": _step,
    "trained on": lambda head: "" if head.training_len is None else f"texts of at most {head.training_len:,} tokens",
    "unspecified": _open_settings,
    "notes": lambda head: "; ".join(head.notes),
}
