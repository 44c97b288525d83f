"""foredraft generate"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from foredraft.cli.app import app
from foredraft.cli.comparing import run_comparison
from foredraft.cli.groups import option_groups
from foredraft.cli.inputs import read_prompts
from foredraft.cli.models import ModelOptions
from foredraft.cli.options import JsonOption, TraceOption
from foredraft.cli.recording import check_trace, recording
from foredraft.cli.sampling import CompletionOptions, StructureOptions
from foredraft.cli.streaming import stream_text
from foredraft.errors import ForedraftError, RequestError

if TYPE_CHECKING:
    from foredraft.llm import LLM
    from foredraft.sampling import SamplingParams
    from foredraft.text.outputs import RequestOutput
    from foredraft.text.request import Prompt


@app.command()
@option_groups
def generate(
    models: ModelOptions,
    sampling: CompletionOptions,
    structure: StructureOptions,
    prompt: Annotated[
        str | None, typer.Argument(help='The prompt; "-", or nothing in a pipe, reads it from standard input.')
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A file of prompts, which are batched: a .jsonl file with one object per line, with prompt or "
            "prompt_token_ids, or any other file with one prompt per line.",
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run plain decoding, interleaved, and show both side by side.")
    ] = False,
    trace: TraceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Complete a prompt. On a terminal each token is coloured by where it came from.

    Standard input loses one final newline, as in a shell's $(...).

    --json prints one object per request: prompt, text, token_ids,
    finish_reason, stop_reason, usage, metrics. With several texts (--n)
    these describe the first one, and "choices" lists all with their index;
    usage and metrics cover all texts. --compare adds "comparison".

    --trace records the requested texts, not the runs of --compare.
    """
    params = sampling.params(structure.structured_outputs())
    models.check()
    models.follow()
    check_trace(trace)
    batch = read_prompts(prompt, prompts)
    if compare and len(batch) > 1:
        raise ForedraftError(f"--compare takes one prompt, but there are {len(batch)}")
    llm = models.load()
    if as_json:
        _generate_json(llm, batch, params, trace, compare=compare)
        return
    with recording(llm, trace):
        if len(batch) > 1 or params.n > 1:
            _generate_many(llm, batch, params)
        else:
            _generate_one(llm, batch[0], params)
    if compare:
        _show_comparison(llm, batch[0], params)


def _generate_json(llm: LLM, batch: list[Prompt], params: SamplingParams, trace: Path | None, *, compare: bool) -> None:
    from foredraft.cli.render.outputs import as_json

    try:
        with recording(llm, trace):
            outputs = _generate(llm, batch, params)
    except RequestError as error:
        for output in cast("list[RequestOutput]", error.outputs):
            typer.echo(json.dumps(as_json(output)))
        raise
    for output in outputs:
        fields = as_json(output)
        if compare:
            fields["comparison"] = run_comparison(llm, batch[0], params).as_dict()
        typer.echo(json.dumps(fields))


def _generate(llm: LLM, batch: list[Prompt], params: SamplingParams) -> list[RequestOutput]:
    """Generate, with a progress bar if there are several prompts."""
    from foredraft.cli.render.progress import count_bar

    if len(batch) == 1:
        return llm.generate(batch, params)
    with count_bar("generating", len(batch)) as show:
        return llm.generate(batch, params, progress=lambda num_finished, _: show(num_finished))


def _generate_many(llm: LLM, batch: list[Prompt], params: SamplingParams) -> None:
    """Generate all texts, and show each one under its heading."""
    failed = None
    try:
        outputs = _generate(llm, batch, params)
    except RequestError as error:
        failed, outputs = error, cast("list[RequestOutput]", error.outputs)
    for number, output in enumerate(outputs, start=1):
        _show_texts(llm, output, f"prompt {number}" if len(batch) > 1 else "")
    _show_summary(outputs)
    if failed is not None:
        raise failed


def _show_texts(llm: LLM, output: RequestOutput, name: str) -> None:
    from foredraft.cli.render.console import output_console
    from foredraft.cli.render.origins import pieces_of, write_pieces

    console = output_console()
    for text in output.outputs:
        heading = [name] if name else []
        if len(output.outputs) > 1:
            heading.append(f"text {text.index + 1}")
        console.out(f"==> {', '.join(heading)} <==", style="bold", highlight=False)
        if llm.tokenizer is not None:
            write_pieces(console, pieces_of(text, llm.tokenizer, llm.target.inputs_for(output.prompt_token_ids).tokens))
        console.out("\n", highlight=False)


def _generate_one(llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
    output = stream_text(llm, prompt, params)
    typer.echo()
    _show_summary([output])


def _show_summary(outputs: Sequence[RequestOutput]) -> None:
    """On standard error: what the colours mean, and the metrics of each request."""
    from foredraft.cli.render.console import error_console, has_colours, output_console
    from foredraft.cli.render.origins import legend
    from foredraft.cli.render.outputs import metrics_line

    console = error_console()
    if has_colours(output_console()):
        console.print(legend(o for output in outputs for text in output.outputs for o in text.origins))
    for output in outputs:
        num_tokens = sum(len(text.token_ids) for text in output.outputs)
        console.out(metrics_line(output.metrics, num_tokens), style="dim", highlight=False)


def _show_comparison(llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
    from foredraft.cli.render.comparison import comparison_table
    from foredraft.cli.render.console import error_console

    error_console().print(comparison_table(run_comparison(llm, prompt, params)))
