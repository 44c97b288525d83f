"""foredraft generate"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from foredraft.cli.app import app
from foredraft.cli.comparing import run_comparison
from foredraft.cli.inputs import prompts_from
from foredraft.cli.options import (
    DEFAULT_TOKENS,
    BatchInvariantOption,
    CacheMemoryOption,
    ChoiceOption,
    ConfigOption,
    DeviceOption,
    DraftOption,
    DraftQuantizationOption,
    DtypeOption,
    GammaOption,
    GrammarOption,
    IgnoreEosOption,
    JsonOption,
    MaxMemoryOption,
    MethodOption,
    MinAcceptanceOption,
    MinPOption,
    ModelOption,
    Models,
    PenaltyOption,
    QuantizationOption,
    RegexOption,
    RevisionOption,
    SchemaOption,
    SeedOption,
    StopOption,
    TemperatureOption,
    ThreadsOption,
    TokensOption,
    TopKOption,
    TopPOption,
    TraceOption,
    TrustOption,
    VerificationOption,
    sampling_params,
)
from foredraft.cli.streaming import stream_text
from foredraft.cli.tracing import check_trace, recorded
from foredraft.errors import ForedraftError, RequestError

if TYPE_CHECKING:
    from foredraft.llm import LLM
    from foredraft.sampling import SamplingParams
    from foredraft.text.outputs import RequestOutput
    from foredraft.text.request import Prompt


@app.command()
def generate(
    context: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(help='The prompt; "-", or nothing in a pipe, reads it from standard input.')
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Many prompts, batched: in a .jsonl file an object per line with prompt or prompt_token_ids, in any "
            "other a line each.",
        ),
    ] = None,
    model: ModelOption = None,
    draft_model: DraftOption = None,
    method: MethodOption = None,
    speculative_tokens: GammaOption = None,
    settings_file: ConfigOption = None,
    min_acceptance_rate: MinAcceptanceOption = None,
    max_draft_memory: MaxMemoryOption = None,
    max_tokens: TokensOption = DEFAULT_TOKENS,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    repetition_penalty: PenaltyOption = None,
    seed: SeedOption = None,
    n: Annotated[int, typer.Option("--n", help="That many texts from one prompt.")] = 1,
    stop: StopOption = None,
    ignore_eos: IgnoreEosOption = False,
    verification: VerificationOption = None,
    json_schema: SchemaOption = None,
    regex: RegexOption = None,
    choice: ChoiceOption = None,
    grammar: GrammarOption = None,
    cache_memory: CacheMemoryOption = None,
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = None,
    draft_quantization: DraftQuantizationOption = None,
    device: DeviceOption = "auto",
    batch_invariant: BatchInvariantOption = False,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    num_threads: ThreadsOption = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run plain decoding, interleaved, and show both side by side.")
    ] = False,
    trace: TraceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Complete a prompt. On a terminal each token is coloured by where it came from.

    Standard input loses one final newline, as in a shell's $(...).

    --json prints one object per request: prompt, text, token_ids,
    finish_reason, stop_reason, usage, metrics. Of several texts (--n)
    these are the first one's, and "choices" lists all with their index;
    usage and metrics are of all together. --compare adds "comparison".

    --trace records the rounds of what is asked for, not of a comparison.
    """
    params = sampling_params(context)
    models = Models.of(context)
    models.check()
    check_trace(trace)
    batch = prompts_from(prompt, prompts)
    if compare and len(batch) > 1:
        raise ForedraftError(f"--compare takes one prompt, and there are {len(batch)}")
    llm = models.load()
    if as_json:
        _generate_json(llm, batch, params, llm.speculative_tokens if compare else None, trace)
        return
    with recorded(llm, trace):
        if len(batch) > 1 or params.n > 1:
            _generate_many(llm, batch, params)
        else:
            _generate_one(llm, batch[0], params)
    if compare:
        _show_comparison(llm, batch[0], params, llm.speculative_tokens)


def _generate_json(
    llm: LLM, batch: list[Prompt], params: SamplingParams, gamma: int | str | None, trace: Path | None
) -> None:
    """gamma: also compare, with that many draft tokens."""
    from foredraft.cli.render import as_json

    try:
        with recorded(llm, trace):
            outputs = _generate(llm, batch, params)
    except RequestError as error:
        for output in cast("list[RequestOutput]", error.outputs):
            typer.echo(json.dumps(as_json(output)))
        raise
    for output in outputs:
        found = as_json(output)
        if gamma is not None:
            found["comparison"] = run_comparison(llm, batch[0], params, gamma).as_dict()
        typer.echo(json.dumps(found))


def _generate(llm: LLM, batch: list[Prompt], params: SamplingParams) -> list[RequestOutput]:
    from foredraft.cli.render import progress_bar

    if len(batch) == 1:
        return llm.generate(batch, params)
    with progress_bar("generating", len(batch)) as advance:
        num_finished = 0

        def progress(finished: int, _: int) -> None:
            nonlocal num_finished
            for _ in range(finished - num_finished):
                advance()
            num_finished = finished

        return llm.generate(batch, params, progress=progress)


def _generate_many(llm: LLM, batch: list[Prompt], params: SamplingParams) -> None:
    """Each text under a heading of its own."""
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
    from foredraft.cli import render

    console = render.output_console()
    for text in output.outputs:
        heading = [name] if name else []
        if len(output.outputs) > 1:
            heading.append(f"text {text.index + 1}")
        console.out(f"==> {', '.join(heading)} <==", style="bold", highlight=False)
        if llm.tokenizer is not None:
            render.write_pieces(console, render.pieces_of(text, llm.tokenizer, output.prompt_token_ids))
        console.out("\n", highlight=False)


def _generate_one(llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
    output = stream_text(llm, prompt, params)
    typer.echo()
    _show_summary([output])


def _show_summary(outputs: Sequence[RequestOutput]) -> None:
    """On standard error: what the colours mean, and the metrics of each request."""
    from foredraft.cli import render

    console = render.error_console()
    if render.colours(render.output_console()):
        console.print(render.legend(o for output in outputs for text in output.outputs for o in text.origins))
    for output in outputs:
        num_tokens = sum(len(text.token_ids) for text in output.outputs)
        console.out(render.metrics_line(output.metrics, num_tokens), style="dim", highlight=False)


def _show_comparison(llm: LLM, prompt: Prompt, params: SamplingParams, gamma: int | str) -> None:
    from foredraft.cli import render

    render.error_console().print(render.comparison_table(run_comparison(llm, prompt, params, gamma)))
