"""foredraft demo"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from foredraft.cli.app import app
from foredraft.cli.comparing import run_comparison
from foredraft.cli.options import (
    DEFAULT_TOKENS,
    CacheMemoryOption,
    ConfigOption,
    DeviceOption,
    DraftOption,
    DraftQuantizationOption,
    DtypeOption,
    GammaOption,
    JsonOption,
    MethodOption,
    ModelOption,
    Models,
    QuantizationOption,
    ThreadsOption,
    TokensOption,
    TraceOption,
    sampling_params,
)
from foredraft.cli.streaming import stream_text
from foredraft.cli.tracing import check_trace, recorded
from foredraft.errors import ForedraftError

if TYPE_CHECKING:
    from foredraft.sampling import SamplingParams

_SHOWN = 4
"""Draft tokens of the text that is shown, where no number was given. The table below it is of what was asked for."""


@app.command()
def demo(
    context: typer.Context,
    model: ModelOption = None,
    draft_model: DraftOption = None,
    method: MethodOption = None,
    speculative_tokens: GammaOption = None,
    settings_file: ConfigOption = None,
    max_tokens: TokensOption = DEFAULT_TOKENS,
    cache_memory: CacheMemoryOption = None,
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = None,
    draft_quantization: DraftQuantizationOption = None,
    device: DeviceOption = "auto",
    num_threads: ThreadsOption = None,
    trace: TraceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Complete a built-in code prompt greedily, token by token, then measure plain decoding beside speculation."""
    if trace is not None and as_json:
        raise ForedraftError("--trace records the text that is shown, and with --json none is: leave one of them out")
    params = sampling_params(context, temperature=0.0)
    check_trace(trace)
    llm = Models.of(context).load()
    from foredraft.tools.demo import DEMO_PROMPT

    if as_json:
        typer.echo(json.dumps(run_comparison(llm, DEMO_PROMPT, params, llm.speculative_tokens).as_dict()))
        return
    from foredraft.cli import render

    console = render.output_console()
    console.out(DEMO_PROMPT, style="dim", end="", highlight=False)
    with recorded(llm, trace):
        output = stream_text(llm, DEMO_PROMPT, _shown(params, llm.speculative_tokens))
    console.print()
    console.print(render.legend(output.outputs[0].origins))
    console.print(render.comparison_table(run_comparison(llm, DEMO_PROMPT, params, llm.speculative_tokens)))


def _shown(params: SamplingParams, speculative_tokens: int | str) -> SamplingParams:
    """So short a text would be over before "auto" has seen what drafts bring, and there would be nothing to see."""
    from foredraft.sampling import AUTO

    return replace(params, speculative_tokens=_SHOWN) if speculative_tokens == AUTO else params
