"""foredraft demo"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.app import app
from foredraft.cli.comparing import run_comparison
from foredraft.cli.groups import Without, option_groups
from foredraft.cli.models import ModelOptions
from foredraft.cli.options import JsonOption, TraceOption
from foredraft.cli.recording import check_trace, recording
from foredraft.cli.sampling import DEFAULT_TOKENS, MaxTokensOption
from foredraft.cli.streaming import stream_text
from foredraft.errors import ForedraftError

if TYPE_CHECKING:
    from foredraft.sampling import SamplingParams

_SHOWN_TOKENS = 4
"""Draft tokens per step of the text that is shown, if the setting is "auto". The table below the text measures that setting."""


@app.command()
@option_groups
def demo(
    models: Annotated[
        ModelOptions,
        Without("min_acceptance_rate", "max_draft_memory", "batch_invariant", "revision", "trust_remote_code"),
    ],
    max_tokens: MaxTokensOption = DEFAULT_TOKENS,
    trace: TraceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Complete a built-in code prompt greedily, token by token, then compare plain decoding with speculation.

    A model with a chat template answers a built-in question instead.
    """
    if trace is not None and as_json:
        raise ForedraftError("--trace records the text that is shown, but --json shows none: leave one of them out")
    from foredraft.sampling import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    check_trace(trace)
    llm = models.with_packaged_head().load()
    from foredraft.tools.demo import demo_prompt

    shown, prompt = demo_prompt(llm)
    if as_json:
        typer.echo(json.dumps(run_comparison(llm, prompt, params).as_dict()))
        return
    from foredraft.cli.render.comparison import comparison_table
    from foredraft.cli.render.console import output_console
    from foredraft.cli.render.origins import legend

    console = output_console()
    console.out(shown, style="dim", end="", highlight=False)
    with recording(llm, trace):
        output = stream_text(llm, prompt, _shown(params, llm.speculative_tokens))
    console.print()
    console.print(legend(output.outputs[0].origins))
    console.print(comparison_table(run_comparison(llm, prompt, params)))


def _shown(params: SamplingParams, speculative_tokens: int | str) -> SamplingParams:
    """Replaces "auto": a text this short ends before "auto" has measured what drafts gain, so it would show none."""
    from foredraft.sampling import AUTO

    return replace(params, speculative_tokens=_SHOWN_TOKENS) if speculative_tokens == AUTO else params
