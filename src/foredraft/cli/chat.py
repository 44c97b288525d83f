"""foredraft chat"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.app import app
from foredraft.cli.inputs import read_text
from foredraft.cli.options import (
    CacheMemoryOption,
    ConfigOption,
    DeviceOption,
    DraftOption,
    DraftQuantizationOption,
    DtypeOption,
    GammaOption,
    IgnoreEosOption,
    MaxMemoryOption,
    MethodOption,
    MinAcceptanceOption,
    MinPOption,
    ModelOption,
    Models,
    PenaltyOption,
    QuantizationOption,
    RevisionOption,
    SeedOption,
    StopOption,
    TemperatureOption,
    ThreadsOption,
    TopKOption,
    TopPOption,
    TraceOption,
    TrustOption,
    VerificationOption,
    sampling_params,
)
from foredraft.cli.streaming import closing_stream
from foredraft.cli.tracing import check_trace, recorded
from foredraft.errors import ForedraftError

if TYPE_CHECKING:
    from foredraft.llm import LLM
    from foredraft.sampling import SamplingParams


@app.command()
def chat(
    context: typer.Context,
    model: ModelOption = None,
    draft_model: DraftOption = None,
    method: MethodOption = None,
    speculative_tokens: GammaOption = None,
    settings_file: ConfigOption = None,
    min_acceptance_rate: MinAcceptanceOption = None,
    max_draft_memory: MaxMemoryOption = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option("--chat-template", help="A Jinja file, where the checkpoint has no template.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=1, help="The most tokens of an answer. Default: to the context's end."),
    ] = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    repetition_penalty: PenaltyOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    ignore_eos: IgnoreEosOption = False,
    verification: VerificationOption = None,
    cache_memory: CacheMemoryOption = None,
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = None,
    draft_quantization: DraftQuantizationOption = None,
    device: DeviceOption = "auto",
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    num_threads: ThreadsOption = None,
    trace: TraceOption = None,
) -> None:
    """Talk to a model. Ctrl-C stops an answer; Ctrl-D or /exit ends."""
    params = sampling_params(context)
    template = None if chat_template is None else read_text(chat_template)
    models = Models.of(context)
    models.check()
    check_trace(trace)
    if template is None:
        _require_template(models)
    llm = models.load()
    with recorded(llm, trace):
        _Chat(llm, params, template, system).run()


def _require_template(models: Models) -> None:
    """Told before the weights are loaded."""
    from foredraft.model import EMBEDDED, load_tokenizer

    tokenizer = load_tokenizer(models.target or EMBEDDED / "target", models.options())
    if not tokenizer.chat_template:
        raise ForedraftError(
            f"{models.target or 'the embedded target'}: its tokenizer has no chat template: give --chat-template FILE "
            "(Jinja), or use foredraft generate"
        )


class _Chat:
    """A conversation in the terminal. Earlier turns are not read again: the engine keeps their keys and values."""

    def __init__(self, llm: LLM, params: SamplingParams, template: str | None, system: str | None) -> None:
        from foredraft.cli.render import output_console

        self._llm = llm
        self._params = params
        self._template = template
        self._messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self._console = output_console()
        self._is_interactive = sys.stdin.isatty()

    def run(self) -> None:
        if self._is_interactive:
            typer.echo("Ctrl-C stops an answer; Ctrl-D or /exit ends.", err=True)
        while (line := self._next_line()) is not None:
            if line:
                self._turn(line)

    def _next_line(self) -> str | None:
        """What the user says; None at the end."""
        try:
            line = self._ask() if self._is_interactive else sys.stdin.readline()
        except EOFError:
            typer.echo()
            return None
        except UnicodeDecodeError:
            raise ForedraftError("standard input is no UTF-8 text") from None
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            typer.echo("\nCtrl-D or /exit ends.", err=True)
            return ""
        if not self._is_interactive and not line:
            return None
        line = line.strip()
        return None if line == "/exit" else line

    @staticmethod
    def _ask() -> str:
        with suppress(ImportError):
            import readline  # noqa: F401  # its import gives input() editing and history
        return input("> ")

    def _turn(self, line: str) -> None:
        """One question and its answer. A question that cannot be answered is forgotten."""
        self._messages.append({"role": "user", "content": line})
        try:
            answer = self._answer()
        except ForedraftError as error:
            if not self._is_interactive:
                raise
            typer.echo(f"error: {error}", err=True)
            answer = ""
        if answer:
            self._messages.append({"role": "assistant", "content": answer})
        else:
            self._messages.pop()

    def _answer(self) -> str:
        from foredraft.cli.render import write_text

        said: list[str] = []
        prompt = self._llm.chat_prompt(self._messages, chat_template=self._template)
        try:
            with closing_stream(self._llm, prompt, self._params) as deltas:
                for delta in deltas:
                    said.append(delta.text)
                    write_text(self._console, delta.text)
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
        typer.echo()
        return "".join(said)
