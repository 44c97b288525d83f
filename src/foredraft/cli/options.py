"""The options that several commands take, and what they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.inputs import read_text
from foredraft.engine.methods import choose_methods
from foredraft.errors import ForedraftError
from foredraft.model.checkpoint import refuse_unusable
from foredraft.sampling import AUTO
from foredraft.settings import Settings
from foredraft.utils import arguments, startup

if TYPE_CHECKING:
    from foredraft.llm import LLM
    from foredraft.model import LoadOptions
    from foredraft.sampling import SamplingParams

DEFAULT_TOKENS = 128
_SAMPLING_OPTIONS = (
    "n",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "min_tokens",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "verification",
)

ModelOption = Annotated[
    str | None, typer.Option("--model", help="The target: hub id or directory. Default: the embedded pair.")
]
DraftOption = Annotated[
    str | None, typer.Option("--draft-model", help="The draft model; it must share the target's vocabulary.")
]
MethodOption = Annotated[
    str | None,
    typer.Option(
        help="none, ngram, suffix, draft_model or self-int8, or several with + between them, to choose from. Default: "
        "draft_model where there is one, else suffix."
    ),
]
GammaOption = Annotated[
    str | None,
    typer.Option(
        "--speculative-tokens",
        help="Draft tokens per step: auto takes as many as pay; 0 is plain decoding. Default: auto.",
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings as foredraft tune writes them; options win over the file."),
]
MinAcceptanceOption = Annotated[
    float | None,
    typer.Option(
        "--min-acceptance-rate", help="Leave a drafter alone for a while of whose recent tokens a smaller share stood."
    ),
]
MaxMemoryOption = Annotated[
    str | None,
    typer.Option("--max-draft-memory", help="The same for one that holds more cache memory than that, say 512MiB."),
]
TokensOption = Annotated[int, typer.Option("--max-tokens", min=1, help="The most tokens to write.")]
TemperatureOption = Annotated[
    float | None, typer.Option(help="0 is greedy. Default, here and below: the checkpoint's own, else neutral.")
]
TopPOption = Annotated[float | None, typer.Option("--top-p", help="Keep the likeliest tokens up to this probability.")]
TopKOption = Annotated[int | None, typer.Option("--top-k", help="Keep this many tokens.")]
MinPOption = Annotated[float | None, typer.Option("--min-p", help="Keep tokens at least this likely, beside the top.")]
PenaltyOption = Annotated[float | None, typer.Option("--repetition-penalty", help="Above 1 discourages repetition.")]
PresenceOption = Annotated[
    float,
    typer.Option("--presence-penalty", help="Above 0 discourages what was written before, below 0 encourages it."),
]
FrequencyOption = Annotated[
    float, typer.Option("--frequency-penalty", help="The same for each time that it was written.")
]
LogitBiasOption = Annotated[
    list[str] | None, typer.Option("--logit-bias", metavar="ID=NUMBER", help="Added to a token's logit; repeatable.")
]
BadWordsOption = Annotated[
    list[str] | None, typer.Option("--bad-words", help="A string that must not be written; repeatable.")
]
MinTokensOption = Annotated[int, typer.Option("--min-tokens", help="The fewest tokens to write.")]
StopIdsOption = Annotated[
    list[int] | None, typer.Option("--stop-token-ids", help="A token id that ends the text; repeatable.")
]
CopiesOption = Annotated[int, typer.Option("--n", help="That many texts from one prompt.")]
SeedOption = Annotated[
    int | None, typer.Option(help="Then the text depends on model, prompt, parameters and seed alone.")
]
StopOption = Annotated[list[str] | None, typer.Option("--stop", help="A string that ends the text; repeatable.")]
IgnoreEosOption = Annotated[bool, typer.Option("--ignore-eos", help="Write on past an end-of-sequence token.")]
VerificationOption = Annotated[
    str | None,
    typer.Option(
        callback=arguments.check_verification,
        help="block, rejection, or with a seed coupled: the rule for draft tokens. Default: coupled or block.",
    ),
]
CacheMemoryOption = Annotated[
    str | None,
    typer.Option("--cache-memory", help="For keys and values, as 4GiB. Default: by context and free memory."),
]
DtypeOption = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
QuantizationOption = Annotated[
    str | None, typer.Option(help="int8 rounds the linear layers as they are loaded, the draft's too. Default: none.")
]
DraftQuantizationOption = Annotated[
    str | None, typer.Option("--draft-quantization", help="The draft's own: int8 or none. Default: the target's.")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
BatchInvariantOption = Annotated[
    bool, typer.Option("--batch-invariant", help="On a GPU: a text never depends on its company. Somewhat slower.")
]
RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the checkpoint.")]
ThreadsOption = Annotated[int | None, typer.Option("--num-threads", help="Of PyTorch's CPU kernels.")]
SchemaOption = Annotated[
    str | None,
    typer.Option(
        "--json-schema", metavar="FILE|JSON", help="Write JSON that satisfies this schema: a file, or the text."
    ),
]
RegexOption = Annotated[
    str | None, typer.Option("--regex", help="Write what this regular expression matches, all of it.")
]
ChoiceOption = Annotated[list[str] | None, typer.Option("--choice", help="Write one of these strings; repeatable.")]
GrammarOption = Annotated[
    Path | None, typer.Option("--grammar", metavar="FILE", help="Write what this grammar describes, in Lark's form.")
]
TraceOption = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="Record every round there; see foredraft trace view.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on standard output, and nothing else there.")]


@dataclass(frozen=True, slots=True)
class Models:
    """What --model and the options around it ask for. Each field is a command's option of that name, where it has one."""

    model: str | None = None
    draft_model: str | None = None
    method: str | None = None
    speculative_tokens: str | None = None
    min_acceptance_rate: float | None = None
    max_draft_memory: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    num_threads: int | None = None
    quantization: str | None = None
    draft_quantization: str | None = None
    batch_invariant: bool = False
    settings_file: Path | None = None
    cache_memory: str | None = None

    @classmethod
    def of(cls, context: typer.Context) -> Models:
        return cls(**{one.name: context.params[one.name] for one in fields(cls) if one.name in context.params})

    @property
    def draft_len(self) -> int | str | None:
        """A number where the user gave one."""
        given = self.speculative_tokens
        return int(given) if given is not None and given.isdecimal() else given

    @property
    def name(self) -> str:
        """Of the target, for messages."""
        return self.target or "the embedded pair"

    @property
    def target(self) -> str | None:
        """As it was given, or as the settings file has it."""
        found: str | None = self._settings().model
        return found

    def check(self, *, has_weights: bool = True) -> None:
        """All that can be told without importing PyTorch. Raises ForedraftError; `load` would say the same, but later."""
        found = self._settings()
        arguments.check_threads(found.num_threads)
        arguments.check_draft_len(AUTO if found.speculative_tokens is None else found.speculative_tokens)
        arguments.check_numbers(cache_memory=(self.cache_bytes, 1))
        arguments.check_thresholds(self.min_acceptance_rate, self.max_draft_bytes)
        arguments.check_precision(self.dtype, found.quantization, found.draft_quantization)
        uses_draft = found.draft_model is not None or (found.model is None and found.method in (None, "draft_model"))
        choose_methods(found.method, has_draft_model=uses_draft)
        for source in (found.model, found.draft_model):
            if source is not None:
                refuse_unusable(source, has_weights=has_weights)

    def _settings(self) -> Settings:
        """The options over the settings file."""
        found = Settings() if self.settings_file is None else Settings.read(self.settings_file)
        return found.under(
            model=self.model,
            draft_model=self.draft_model,
            method=self.method,
            speculative_tokens=self.draft_len,
            quantization=self.quantization,
            draft_quantization=self.draft_quantization,
            num_threads=self.num_threads,
        )

    @property
    def max_draft_bytes(self) -> int | None:
        return None if self.max_draft_memory is None else num_bytes(self.max_draft_memory)

    @property
    def cache_bytes(self) -> int | None:
        return None if self.cache_memory is None else num_bytes(self.cache_memory)

    def load(self, **settings: Any) -> LLM:
        """settings: arguments of LLM that are no option of other commands."""
        self.check()
        settings = {"cache_memory": self.cache_bytes} | settings
        from foredraft.cli.render import spinner
        from foredraft.llm import LLM

        startup.ready()
        with spinner(f"loading {self.name}"):
            return LLM(
                self.model,
                self.draft_model,
                method=self.method,
                speculative_tokens=self.draft_len,
                min_acceptance_rate=self.min_acceptance_rate,
                max_draft_memory=self.max_draft_bytes,
                dtype=self.dtype,
                device=self.device,
                revision=self.revision,
                trust_remote_code=self.trust_remote_code,
                quantization=self.quantization,
                draft_quantization=self.draft_quantization,
                batch_invariant=self.batch_invariant,
                num_threads=self.num_threads,
                config=self.settings_file,
                **settings,
            )

    def options(self) -> LoadOptions:
        from foredraft.model import LoadOptions

        return LoadOptions(self.dtype, self.device, self.revision, self.trust_remote_code, self.quantization)


def num_bytes(size: str) -> int:
    """512MiB, 2GB, 1000000. Raises ForedraftError for what is no size."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(size))
    except ValidationError:
        raise ForedraftError(f"{size!r} is no amount of memory: write it as 512MiB, 2GB or a number of bytes") from None


def sampling_params(context: typer.Context, **settings: Any) -> SamplingParams:
    """What a command's options of these names ask for. settings: what it does not let the user choose."""
    from foredraft.sampling import SamplingParams

    given = {name: context.params[name] for name in _SAMPLING_OPTIONS if name in context.params}
    for name in ("stop", "bad_words", "stop_token_ids"):
        if name in given:
            given[name] = tuple(given[name] or ())
    if "logit_bias" in given:
        given["logit_bias"] = _logit_bias(given["logit_bias"] or ())
    return SamplingParams(**given, **_structured_outputs(context), **settings)


def _logit_bias(items: Sequence[str]) -> dict[int, float] | None:
    """items: ID=NUMBER. Raises ForedraftError for what is none."""
    try:
        found = {int(token): float(value) for token, value in (item.split("=", 1) for item in items)}
    except ValueError:
        raise ForedraftError(
            f"--logit-bias takes a token id and a number, as in 42=-1.5, not {' '.join(items)}"
        ) from None
    return found or None


def _structured_outputs(context: typer.Context) -> dict[str, Any]:
    """The form that a text is to have, where a command has options for one and they ask for it."""
    from foredraft.sampling import StructuredOutputs

    schema, regex, choice, grammar = (
        context.params.get(name) for name in ("json_schema", "regex", "choice", "grammar")
    )
    options = {"--json-schema": schema, "--regex": regex, "--choice": choice, "--grammar": grammar}
    given = [name for name, value in options.items() if value not in (None, [], ())]
    if not given:
        return {}
    if len(given) > 1:
        raise ForedraftError(f"a text has one form: give {' or '.join(given)}")
    return {
        "structured_outputs": StructuredOutputs(
            json=None if schema is None else schema if schema.lstrip().startswith("{") else read_text(Path(schema)),
            regex=regex,
            choice=choice or None,
            grammar=None if grammar is None else read_text(grammar),
        )
    }


def set_threads(num_threads: int | None) -> None:
    arguments.check_threads(num_threads)
    if num_threads is not None:
        import torch

        torch.set_num_threads(num_threads)
