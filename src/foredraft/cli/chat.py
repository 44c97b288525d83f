"""foredraft chat"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.app import app
from foredraft.cli.groups import Without, option_groups
from foredraft.cli.inputs import read_text
from foredraft.cli.models import ModelOptions
from foredraft.cli.options import TraceOption
from foredraft.cli.recording import check_trace, recording
from foredraft.cli.sampling import TextOptions
from foredraft.cli.streaming import closing_stream
from foredraft.errors import ForedraftError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foredraft.llm import LLM
    from foredraft.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions(TextOptions):
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", min=1, help="The most tokens of an answer. Default: up to the end of the context."
        ),
    ] = None


@app.command()
@option_groups
def chat(
    models: Annotated[ModelOptions, Without("batch_invariant")],
    sampling: AnswerOptions,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option("--chat-template", help="A Jinja file, for a checkpoint without a template.")
    ] = None,
    trace: TraceOption = None,
) -> None:
    """Talk to a model. Ctrl-C stops an answer; Ctrl-D or /exit ends."""
    params = sampling.params()
    template = None if chat_template is None else read_text(chat_template)
    models.check()
    models.follow()
    check_trace(trace)
    llm = models.load(tokenizer=models.load_tokenizer() if template is not None else _with_template(models))
    with recording(llm, trace):
        _Chat(llm, params, template, system).run()


def _with_template(models: ModelOptions) -> PreTrainedTokenizerBase:
    """The tokenizer. Raises ForedraftError for a model without a chat template, before its weights are loaded."""
    tokenizer = models.load_tokenizer()
    if not tokenizer.chat_template:
        raise ForedraftError(
            f"{models.target or 'the embedded target'}: its tokenizer has no chat template: give --chat-template FILE "
            "(Jinja), or use foredraft generate"
        )
    return tokenizer


class _Chat:
    """A conversation in the terminal. The engine keeps the keys and values of earlier turns."""

    def __init__(self, llm: LLM, params: SamplingParams, template: str | None, system: str | None) -> None:
        from foredraft.cli.render.console import output_console

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
                self._take_turn(line)

    def _next_line(self) -> str | None:
        """The user's next line; None at the end of input."""
        try:
            # decoded here: in a C locale Python's own text of standard input hides what is not UTF-8
            line = self._read_edited() if self._is_interactive else sys.stdin.buffer.readline().decode()
        except EOFError:
            typer.echo()
            return None
        except UnicodeDecodeError:
            raise ForedraftError("standard input is not UTF-8 text") from None
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
    def _read_edited() -> str:
        with suppress(ImportError):
            import readline  # noqa: F401  # its import gives input() editing and history
        return input("> ")

    def _take_turn(self, line: str) -> None:
        """Ask one question and show its answer. A question that cannot be answered is dropped from the conversation."""
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
        from foredraft.cli.render.console import write_text

        written: list[str] = []
        prompt = self._llm.chat_prompt(self._messages, chat_template=self._template)
        try:
            with closing_stream(self._llm, prompt, self._params) as deltas:
                for delta in deltas:
                    written.append(delta.text)
                    write_text(self._console, delta.text)
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
        typer.echo()
        return "".join(written)
