"""foredraft check"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli.app import app
from foredraft.cli.inputs import prompts_of
from foredraft.cli.options import (
    BatchInvariantOption,
    DeviceOption,
    DraftOption,
    DraftQuantizationOption,
    DtypeOption,
    GammaOption,
    IgnoreEosOption,
    JsonOption,
    MethodOption,
    MinPOption,
    ModelOption,
    Models,
    PenaltyOption,
    QuantizationOption,
    RevisionOption,
    SeedOption,
    TemperatureOption,
    ThreadsOption,
    TokensOption,
    TopKOption,
    TopPOption,
    TrustOption,
    sampling_params,
)
from foredraft.errors import ForedraftError

_NOT_PASSED = 1
_BUDGET = 60.0  # as in foredraft.certificate, which is slow to import
_TOKENS = 32


@app.command()
def check(
    context: typer.Context,
    prompts: Annotated[
        Path | None,
        typer.Option(help="What to complete: a prompt per line, or a .jsonl file as for generate. Default: built in."),
    ] = None,
    model: ModelOption = None,
    draft_model: DraftOption = None,
    method: MethodOption = None,
    speculative_tokens: GammaOption = "auto",
    max_tokens: TokensOption = _TOKENS,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    repetition_penalty: PenaltyOption = None,
    seed: SeedOption = None,
    ignore_eos: IgnoreEosOption = False,
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = None,
    draft_quantization: DraftQuantizationOption = None,
    device: DeviceOption = "auto",
    batch_invariant: BatchInvariantOption = False,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    num_threads: ThreadsOption = None,
    budget: Annotated[float, typer.Option(help="Seconds, about. With fewer, less is looked at and stated.")] = _BUDGET,
    as_json: JsonOption = False,
) -> None:
    """Is speculation lossless with this target, this drafter and these settings?

    Greedy and seeded texts are compared with plain decoding's and with an
    independent pass, sampled ones with the target's own law. Then the same
    tests must reject verifiers that are broken on purpose.

    The exit code is 0 if all of that holds and 1 if not. --seed also fixes
    the noise of the check itself: another one looks at other samples.
    """
    from foredraft import render
    from foredraft.certificate import check as certify

    params = sampling_params(context)
    if not budget > 0:
        raise ForedraftError(f"budget must be above 0 seconds, not {budget}")
    given = None if prompts is None else prompts_of(prompts)
    llm = Models.of(context).load()
    with render.status("checking") as say:
        found = certify(llm, params, prompts=given, budget=budget, progress=say)
    if as_json:
        typer.echo(json.dumps(found.as_dict()))
    else:
        console = render.output_console()
        for table in render.certificate_tables(found):
            console.print(table)
        for line in render.certificate_lines(found):
            console.out(line, highlight=False)
    if not found.passed:
        raise typer.Exit(_NOT_PASSED)
