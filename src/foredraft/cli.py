"""The command line. Text and JSON go to standard output, everything about them to standard error.

Exit codes: 0; 2 for a mistake in the input, told in one line; 130 after Ctrl-C; 141 when a pipe's reader went away.
What is slow to import is imported where it is used, so that help is quick.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperGroup

from foredraft.errors import ForedraftError, RequestError

if TYPE_CHECKING:
    from foredraft.demo import Comparison
    from foredraft.llm import LLM
    from foredraft.model import LoadOptions
    from foredraft.outputs import Delta, RequestOutput
    from foredraft.quality import QualityReport
    from foredraft.request import Prompt
    from foredraft.sampling import SamplingParams

_MISTAKE, _INTERRUPTED, _PIPE_CLOSED = 2, 130, 141
_DEFAULT_TOKENS = 128
_QUALITY_TOKENS = 20_000


class _Commands(TyperGroup):
    """Every command ends in one line and an exit code, never in a traceback for what the user can mend."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except ForedraftError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(_MISTAKE) from None
        except typer.BadParameter as error:
            typer.echo(f"error: {' '.join(error.format_message().split())}", err=True)
            raise typer.Exit(_MISTAKE) from None
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None
        except BrokenPipeError:
            _abandon_output()
            raise typer.Exit(_PIPE_CLOSED) from None
        return result


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

ModelOption = Annotated[
    str | None, typer.Option("--model", help="The target: hub id or directory. Default: the embedded pair.")
]
DraftOption = Annotated[
    str | None, typer.Option("--draft-model", help="The draft model; it must share the target's vocabulary.")
]
MethodOption = Annotated[
    str | None,
    typer.Option(
        help="none, ngram, suffix, draft_model or self-int8. Default: draft_model where there is one, else suffix."
    ),
]
GammaOption = Annotated[int, typer.Option("--speculative-tokens", help="Draft tokens per step; 0 is plain decoding.")]
TokensOption = Annotated[int, typer.Option("--max-tokens", help="The most tokens to write.")]
TemperatureOption = Annotated[
    float | None, typer.Option(help="0 is greedy. Default, here and below: the checkpoint's own, else neutral.")
]
TopPOption = Annotated[float | None, typer.Option("--top-p", help="Keep the likeliest tokens up to this probability.")]
TopKOption = Annotated[int | None, typer.Option("--top-k", help="Keep this many tokens.")]
MinPOption = Annotated[float | None, typer.Option("--min-p", help="Keep tokens at least this likely, beside the top.")]
PenaltyOption = Annotated[float | None, typer.Option("--repetition-penalty", help="Above 1 discourages repetition.")]
SeedOption = Annotated[
    int | None, typer.Option(help="Then the text depends on model, prompt, parameters and seed alone.")
]
StopOption = Annotated[list[str] | None, typer.Option("--stop", help="A string that ends the text; repeatable.")]
IgnoreEosOption = Annotated[bool, typer.Option("--ignore-eos", help="Write on past an end-of-sequence token.")]
DtypeOption = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
QuantizationOption = Annotated[
    str | None, typer.Option(help="int8 rounds the linear layers as they are loaded, the draft's too. Default: none.")
]
DraftQuantizationOption = Annotated[
    str | None, typer.Option("--draft-quantization", help="The draft's own: int8 or none. Default: the target's.")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the checkpoint.")]
ThreadsOption = Annotated[int | None, typer.Option("--num-threads", help="Of PyTorch's CPU kernels.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on standard output, and nothing else there.")]


@dataclass(frozen=True, slots=True)
class _Models:
    """What --model and the options around it ask for. Each field is a command's option of that name, where it has one."""

    model: str | None = None
    draft_model: str | None = None
    method: str | None = None
    speculative_tokens: int = 4
    dtype: str = "auto"
    device: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    num_threads: int | None = None
    quantization: str | None = None
    draft_quantization: str | None = None

    @classmethod
    def of(cls, context: typer.Context) -> _Models:
        return cls(**{one.name: context.params[one.name] for one in fields(cls) if one.name in context.params})

    def load(self) -> LLM:
        from foredraft.llm import LLM
        from foredraft.render import spinner

        with spinner(f"loading {self.model or 'the embedded pair'}"):
            return LLM(
                self.model,
                self.draft_model,
                method=self.method,
                speculative_tokens=self.speculative_tokens,
                dtype=self.dtype,
                device=self.device,
                revision=self.revision,
                trust_remote_code=self.trust_remote_code,
                quantization=self.quantization,
                draft_quantization=self.draft_quantization,
                num_threads=self.num_threads,
            )

    def options(self) -> LoadOptions:
        from foredraft.model import LoadOptions

        return LoadOptions(self.dtype, self.device, self.revision, self.trust_remote_code, self.quantization)


def _show_version(wanted: bool) -> None:
    if wanted:
        from foredraft import __version__

        typer.echo(f"foredraft {__version__}")
        raise typer.Exit


@app.callback()
def foredraft(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Lossless speculative decoding: a drafter guesses, the target vouches, nothing else is trusted."""
    _quieten()


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
    speculative_tokens: GammaOption = 4,
    max_tokens: TokensOption = _DEFAULT_TOKENS,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    repetition_penalty: PenaltyOption = None,
    seed: SeedOption = None,
    n: Annotated[int, typer.Option("--n", help="That many texts from one prompt.")] = 1,
    stop: StopOption = None,
    ignore_eos: IgnoreEosOption = False,
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = None,
    draft_quantization: DraftQuantizationOption = None,
    device: DeviceOption = "auto",
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    num_threads: ThreadsOption = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run plain decoding, interleaved, and show both side by side.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Complete a prompt. On a terminal each token is coloured by where it came from.

    Standard input loses one final newline, as in a shell's $(...).

    --json prints one object per request: prompt, text, token_ids,
    finish_reason, stop_reason, usage, metrics. Of several texts (--n)
    these are the first one's, and "choices" lists all with their index;
    usage and metrics are of all together. --compare adds "comparison".
    """
    params = _sampling_params(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        n=n,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    batch = _prompts(prompt, prompts)
    if compare and len(batch) > 1:
        raise ForedraftError(f"--compare takes one prompt, and there are {len(batch)}")
    models = _Models.of(context)
    llm = models.load()
    if as_json:
        _generate_json(llm, batch, params, speculative_tokens if compare else None)
        return
    if len(batch) > 1 or params.n > 1:
        _generate_many(llm, batch, params)
    else:
        _generate_one(llm, batch[0], params)
    if compare:
        _show_comparison(llm, batch[0], params, speculative_tokens)


@app.command()
def chat(
    context: typer.Context,
    model: ModelOption = None,
    draft_model: DraftOption = None,
    method: MethodOption = None,
    speculative_tokens: GammaOption = 4,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option("--chat-template", help="A Jinja file, where the checkpoint has no template.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="The most tokens of an answer. Default: to the context's end.")
    ] = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    repetition_penalty: PenaltyOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    ignore_eos: IgnoreEosOption = False,
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = None,
    draft_quantization: DraftQuantizationOption = None,
    device: DeviceOption = "auto",
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    num_threads: ThreadsOption = None,
) -> None:
    """Talk to a model. Ctrl-C stops an answer; Ctrl-D or /exit ends."""
    params = _sampling_params(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    template = None if chat_template is None else _read(chat_template)
    models = _Models.of(context)
    if template is None:
        _require_template(models)
    _Chat(models.load(), params, template, system).run()


@app.command()
def demo(
    context: typer.Context,
    model: ModelOption = None,
    draft_model: DraftOption = None,
    method: MethodOption = None,
    speculative_tokens: GammaOption = 4,
    max_tokens: TokensOption = _DEFAULT_TOKENS,
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = None,
    draft_quantization: DraftQuantizationOption = None,
    device: DeviceOption = "auto",
    num_threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Complete a built-in code prompt greedily, token by token, then measure plain decoding beside speculation."""
    from foredraft.demo import DEMO_PROMPT

    params = _sampling_params(max_tokens=max_tokens, temperature=0.0)
    llm = _Models.of(context).load()
    if as_json:
        typer.echo(json.dumps(_compare(llm, DEMO_PROMPT, params, speculative_tokens).as_dict()))
        return
    from foredraft import render

    console = render.output_console()
    console.out(DEMO_PROMPT, style="dim", end="", highlight=False)
    output = _stream(llm, DEMO_PROMPT, params)
    console.print()
    console.print(render.legend(output.outputs[0].origins))
    console.print(render.comparison_table(_compare(llm, DEMO_PROMPT, params, speculative_tokens)))


@app.command()
def inspect(
    context: typer.Context,
    model: ModelOption = None,
    draft_model: DraftOption = None,
    load: Annotated[
        bool, typer.Option("--load/--no-load", help="Load the models and measure, or only predict.")
    ] = True,
    quality: Annotated[
        Path | None,
        typer.Option(
            metavar="TEXTFILE", help="Also measure what the precision costs on this text: the target against float32."
        ),
    ] = None,
    quality_tokens: Annotated[
        int, typer.Option("--quality-tokens", help="The most tokens of that text to use.")
    ] = _QUALITY_TOKENS,
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = None,
    device: DeviceOption = "auto",
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    num_threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Do these two fit, what will they cost in memory, what exactness does this machine give.

    The exit code is 0 if they fit and 2 if not. What does not fit is not loaded.

    --quality loads the target twice, one after the other: in float32, and
    as it would run. It says how much the perplexity of the text rises, and
    how often both find the same token likeliest. In --json: "quality".
    """
    from foredraft import render
    from foredraft.inspection import inspect_models
    from foredraft.model import EMBEDDED

    _set_threads(num_threads)
    if quality is not None and not load:
        raise ForedraftError("--quality has to load the target: leave out --no-load")
    text = None if quality is None else _read(quality)
    target: str = model or str(EMBEDDED / "target")
    draft = draft_model or (None if model else str(EMBEDDED / "draft"))
    options = _Models.of(context).options()
    with render.spinner("inspecting"):
        found = inspect_models(target, draft, options, load=load)
    measured = None
    if text is not None and found.fits:
        measured = _measure_quality(target, text, options, quality_tokens)
    if as_json:
        typer.echo(json.dumps(found.as_dict() | {"quality": None if measured is None else asdict(measured)}))
    else:
        console = render.output_console()
        console.print(render.inspection_table(found))
        for line in [*render.inspection_lines(found), *(render.quality_lines(measured) if measured else [])]:
            console.out(line, highlight=False)
    if not found.fits:
        raise ForedraftError(found.reason)


def _measure_quality(target: str, text: str, options: LoadOptions, max_tokens: int) -> QualityReport:
    from foredraft.quality import measure_quality
    from foredraft.render import spinner

    with spinner("measuring quality"):
        return measure_quality(target, text, options, max_tokens=max_tokens)


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that has no τ shows a question mark
    try:
        try:
            app(prog_name="foredraft")
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:
        _abandon_output()
        sys.exit(_PIPE_CLOSED)


def _quieten() -> None:
    """Our own warnings in one line each on standard error; the libraries' bars and warnings nowhere."""
    from transformers.utils import logging as library

    logger = logging.getLogger("foredraft")
    if not any(isinstance(handler, _Warnings) for handler in logger.handlers):
        logger.addHandler(_Warnings())
    library.disable_progress_bar()
    library.set_verbosity_error()
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(f"{record.levelname.lower()}: {' '.join(record.getMessage().split())}", err=True)


def _abandon_output() -> None:
    """Nobody reads it any more: what is still buffered goes nowhere, and closing it at exit is no error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _sampling_params(**settings: Any) -> SamplingParams:
    from foredraft.sampling import SamplingParams

    return SamplingParams(**settings)


def _set_threads(num_threads: int | None) -> None:
    if num_threads is None:
        return
    if num_threads < 1:
        raise ForedraftError(f"num_threads must be an integer of at least 1, not {num_threads}")
    import torch

    torch.set_num_threads(num_threads)


def _prompts(prompt: str | None, file: Path | None) -> list[Prompt]:
    if file is not None:
        if prompt is not None:
            raise ForedraftError("give a prompt or --prompts, not both")
        return _prompts_of(file)
    if prompt is not None and prompt != "-":
        return [prompt]
    if prompt is None and sys.stdin.isatty():
        raise ForedraftError('no prompt: give one as an argument, "-" to type it, --prompts FILE, or a pipe')
    return [_decoded(sys.stdin.buffer.read(), "standard input").removesuffix("\n")]


def _prompts_of(file: Path) -> list[Prompt]:
    lines = [(number, line) for number, line in enumerate(_read(file).split("\n"), start=1) if line.strip()]
    if not lines:
        raise ForedraftError(f"{file} holds no prompt: give one per line")
    if file.suffix != ".jsonl":
        return [line for _, line in lines]
    return [_prompt_of(line, f"{file}, line {number}") for number, line in lines]


def _prompt_of(line: str, where: str) -> Prompt:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ForedraftError(f"{where}: no JSON ({error})") from None
    if not isinstance(found, dict) or not ("prompt" in found or "prompt_token_ids" in found):
        raise ForedraftError(f'{where}: needs an object with "prompt" or "prompt_token_ids"')
    return found


def _read(file: Path) -> str:
    try:
        return _decoded(file.read_bytes(), str(file))
    except OSError as error:
        raise ForedraftError(f"{file}: cannot be read: {error.strerror}") from None


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ForedraftError(f"{where} is no UTF-8 text: byte {error.start} cannot be decoded") from None


def _generate_json(llm: LLM, batch: list[Prompt], params: SamplingParams, gamma: int | None) -> None:
    """gamma: also compare, with that many draft tokens."""
    from foredraft.render import as_json

    try:
        outputs = _generate(llm, batch, params)
    except RequestError as error:
        for output in cast("list[RequestOutput]", error.outputs):
            typer.echo(json.dumps(as_json(output)))
        raise
    for output in outputs:
        found = as_json(output)
        if gamma is not None:
            found["comparison"] = _compare(llm, batch[0], params, gamma).as_dict()
        typer.echo(json.dumps(found))


def _generate(llm: LLM, batch: list[Prompt], params: SamplingParams) -> list[RequestOutput]:
    from foredraft.render import progress_bar

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
    from foredraft import render

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
    output = _stream(llm, prompt, params)
    typer.echo()
    _show_summary([output])


def _show_summary(outputs: Sequence[RequestOutput]) -> None:
    """On standard error: what the colours mean, and the metrics of each request."""
    from foredraft import render

    console = render.error_console()
    if render.colours(render.output_console()):
        console.print(render.legend(o for output in outputs for text in output.outputs for o in text.origins))
    for output in outputs:
        num_tokens = sum(len(text.token_ids) for text in output.outputs)
        console.out(render.metrics_line(output.metrics, num_tokens), style="dim", highlight=False)


def _stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    """Show one text as it is written; its output."""
    from foredraft import render

    console = render.output_console()
    stream = _closing(llm, prompt, params)
    pieces = None
    with stream as deltas:
        for delta in deltas:
            if pieces is None and llm.tokenizer is not None:
                pieces = render.OriginPieces(llm.tokenizer, llm.frontend.prepare(prompt, params).prompt_ids)
            if pieces is not None:
                render.write_pieces(console, pieces.split(delta.text, delta.token_ids, delta.origins))
            if delta.output is not None:
                return delta.output
    raise AssertionError("a stream ends with its output")


def _closing(llm: LLM, prompt: Prompt, params: SamplingParams) -> closing[Generator[Delta, None, None]]:
    """A stream whose request ends with the block, Ctrl-C included."""
    return closing(llm.stream(prompt, params))


def _show_comparison(llm: LLM, prompt: Prompt, params: SamplingParams, gamma: int) -> None:
    from foredraft import render

    render.error_console().print(render.comparison_table(_compare(llm, prompt, params, gamma)))


def _compare(llm: LLM, prompt: Prompt, params: SamplingParams, gamma: int) -> Comparison:
    from foredraft.demo import NUM_RUNS, compare
    from foredraft.render import progress_bar

    with progress_bar("measuring", 2 * NUM_RUNS) as advance:
        return compare(llm, prompt, params, gamma, progress=advance)


def _require_template(models: _Models) -> None:
    """Told before the weights are loaded."""
    from foredraft.model import EMBEDDED, load_tokenizer

    tokenizer = load_tokenizer(models.model or EMBEDDED / "target", models.options())
    if not tokenizer.chat_template:
        raise ForedraftError(
            f"{models.model or 'the embedded target'}: its tokenizer has no chat template: give --chat-template FILE "
            "(Jinja), or use foredraft generate"
        )


class _Chat:
    """A conversation in the terminal. Earlier turns are not read again: the engine keeps their keys and values."""

    def __init__(self, llm: LLM, params: SamplingParams, template: str | None, system: str | None) -> None:
        from foredraft.render import output_console

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
        from foredraft.render import write_text

        said: list[str] = []
        prompt = self._llm.chat_prompt(self._messages, chat_template=self._template)
        try:
            with _closing(self._llm, prompt, self._params) as deltas:
                for delta in deltas:
                    said.append(delta.text)
                    write_text(self._console, delta.text)
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
        typer.echo()
        return "".join(said)


if __name__ == "__main__":
    main()
