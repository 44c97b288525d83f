"""foredraft check"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli.app import app
from foredraft.cli.inputs import prompts_of
from foredraft.cli.options import (
    BadWordsOption,
    BatchInvariantOption,
    ChoiceOption,
    ConfigOption,
    CopiesOption,
    DeviceOption,
    DraftOption,
    DraftQuantizationOption,
    DtypeOption,
    FrequencyOption,
    GammaOption,
    GrammarOption,
    IgnoreEosOption,
    JsonOption,
    LogitBiasOption,
    MaxMemoryOption,
    MethodOption,
    MinAcceptanceOption,
    MinPOption,
    MinTokensOption,
    ModelOption,
    Models,
    PenaltyOption,
    PresenceOption,
    QuantizationOption,
    RegexOption,
    RevisionOption,
    SchemaOption,
    SeedOption,
    StopIdsOption,
    StopOption,
    TemperatureOption,
    ThreadsOption,
    TokensOption,
    TopKOption,
    TopPOption,
    TrustOption,
    VerificationOption,
    sampling_params,
)
from foredraft.utils.arguments import check_budget

_NOT_PASSED = 1
_BUDGET = 120.0  # as in foredraft.certificate, which is slow to import
_TOKENS = 96


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
    speculative_tokens: GammaOption = None,
    settings_file: ConfigOption = None,
    min_acceptance_rate: MinAcceptanceOption = None,
    max_draft_memory: MaxMemoryOption = None,
    max_tokens: TokensOption = _TOKENS,
    min_tokens: MinTokensOption = 0,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    repetition_penalty: PenaltyOption = None,
    presence_penalty: PresenceOption = 0.0,
    frequency_penalty: FrequencyOption = 0.0,
    logit_bias: LogitBiasOption = None,
    bad_words: BadWordsOption = None,
    seed: SeedOption = None,
    n: CopiesOption = 1,
    stop: StopOption = None,
    stop_token_ids: StopIdsOption = None,
    ignore_eos: IgnoreEosOption = False,
    json_schema: SchemaOption = None,
    regex: RegexOption = None,
    choice: ChoiceOption = None,
    grammar: GrammarOption = None,
    verification: VerificationOption = None,
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = None,
    draft_quantization: DraftQuantizationOption = None,
    device: DeviceOption = "auto",
    batch_invariant: BatchInvariantOption = False,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    num_threads: ThreadsOption = None,
    budget: Annotated[
        float,
        typer.Option(
            help="Seconds. How much is looked at is planned from it; a busy machine may take 1.5 times as long, and what that "
            "cuts is said."
        ),
    ] = _BUDGET,
    as_json: JsonOption = False,
) -> None:
    """Is speculation lossless with this target, this drafter and these settings?

    Greedy and seeded texts are compared with plain decoding's and with an
    independent pass, sampled ones with the target's own law. Then the same
    tests must reject verifiers that are broken on purpose.

    The exit code is 0 if all of that holds and 1 if not. --seed also fixes
    the noise of the check itself: another one looks at other samples.
    """
    check_budget(budget)
    models = Models.of(context)
    models.check()
    given = None if prompts is None else prompts_of(prompts)
    from foredraft.certificate import check as certify
    from foredraft.cli import render

    params = sampling_params(context)
    llm = models.load()
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
