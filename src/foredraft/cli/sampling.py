"""The options that become SamplingParams, and those that constrain the form of a text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from foredraft.cli.inputs import read_text
from foredraft.errors import ForedraftError
from foredraft.utils.arguments import check_verification

if TYPE_CHECKING:
    from foredraft.sampling import SamplingParams, StructuredOutputs

DEFAULT_TOKENS = 128
_LISTS = ("stop", "bad_words", "stop_token_ids")

MaxTokensOption = Annotated[int | None, Option("--max-tokens", min=1, help="The most tokens to generate.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """The options of every command that generates. Each field has the name of a field of SamplingParams."""

    max_tokens: MaxTokensOption = DEFAULT_TOKENS
    temperature: Annotated[
        float | None, Option(help="0 is greedy. Default, here and below: the checkpoint's own, else neutral.")
    ] = None
    top_p: Annotated[
        float | None, Option("--top-p", help="Keep the likeliest tokens up to this total probability.")
    ] = None
    top_k: Annotated[int | None, Option("--top-k", help="Keep this many of the likeliest tokens.")] = None
    min_p: Annotated[
        float | None, Option("--min-p", help="Keep tokens at least this likely, relative to the likeliest.")
    ] = None
    seed: Annotated[int | None, Option(help="Makes the text depend on model, prompt, parameters and seed alone.")] = (
        None
    )
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Go on past an end-of-sequence token.")] = False
    verification: Annotated[
        str | None,
        Option(
            callback=check_verification,
            help="How draft tokens are verified: block, rejection, or, with a seed, coupled. Default: coupled with a seed, "
            "else block.",
        ),
    ] = None

    def params(self, structured_outputs: StructuredOutputs | None = None) -> SamplingParams:
        """Raises ForedraftError for a value that is out of range."""
        from foredraft.sampling import SamplingParams

        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in _LISTS:
            if name in values:
                values[name] = tuple(values[name] or ())
        if "logit_bias" in values:
            values["logit_bias"] = _logit_bias(values["logit_bias"] or ())
        return SamplingParams(**values, structured_outputs=structured_outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions(SamplingOptions):
    """For commands that show texts."""

    repetition_penalty: Annotated[
        float | None, Option("--repetition-penalty", help="Above 1 discourages repetition.")
    ] = None
    stop: Annotated[list[str] | None, Option("--stop", help="A string that ends the text; repeatable.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOptions(TextOptions):
    """For commands that may write several texts from one prompt."""

    n: Annotated[int, Option("--n", help="Number of texts per prompt.")] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AllSamplingOptions(CompletionOptions):
    """For commands that test everything a request may ask for."""

    min_tokens: Annotated[int, Option("--min-tokens", help="The fewest tokens to generate.")] = 0
    presence_penalty: Annotated[
        float,
        Option("--presence-penalty", help="Above 0 discourages tokens that are in the text, below 0 encourages them."),
    ] = 0.0
    frequency_penalty: Annotated[
        float, Option("--frequency-penalty", help="The same, for each occurrence of a token in the text.")
    ] = 0.0
    logit_bias: Annotated[
        list[str] | None,
        Option("--logit-bias", metavar="ID=NUMBER", help="A number to add to a token's logit; repeatable."),
    ] = None
    bad_words: Annotated[
        list[str] | None, Option("--bad-words", help="A string that must not be generated; repeatable.")
    ] = None
    stop_token_ids: Annotated[
        list[int] | None, Option("--stop-token-ids", help="A token id that ends the text; repeatable.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StructureOptions:
    """The form that a text must have. At most one option may be given."""

    json_schema: Annotated[
        str | None,
        Option(
            "--json-schema",
            metavar="FILE|JSON",
            help="Write JSON that satisfies this schema: a file, or the schema itself.",
        ),
    ] = None
    regex: Annotated[str | None, Option("--regex", help="Write a text that this regular expression matches.")] = None
    choice: Annotated[list[str] | None, Option("--choice", help="Write one of these strings; repeatable.")] = None
    grammar: Annotated[
        str | None,
        Option(
            "--grammar",
            metavar="FILE|LARK",
            help="Write a text of this grammar, in Lark's form: a file, or the grammar itself.",
        ),
    ] = None

    def structured_outputs(self) -> StructuredOutputs | None:
        """None if no form is requested. Raises ForedraftError for more than one, and for a file that cannot be read."""
        from foredraft.sampling import StructuredOutputs

        given = {
            f"--{field.name.replace('_', '-')}": value
            for field in fields(self)
            if (value := getattr(self, field.name)) not in (None, [])
        }
        if not given:
            return None
        if len(given) > 1:
            raise ForedraftError(f"a text can have only one form: give {' or '.join(given)}")
        schema, grammar = self._schema(), self._grammar_text()
        try:
            return StructuredOutputs(json=schema, regex=self.regex, choice=self.choice or None, grammar=grammar)
        except ForedraftError as error:
            ((option, value),) = given.items()
            file = f" {value}" if isinstance(value, str) and os.path.isfile(value) else ""
            raise ForedraftError(f"{option}{file}: {error}") from None

    def _schema(self) -> str | None:
        text = self.json_schema
        return text if text is None or text.lstrip().startswith("{") else read_text(Path(text))

    def _grammar_text(self) -> str | None:
        text = self.grammar
        if text is None or (":" in text and not os.path.isfile(text)):  # every rule has a colon
            return text
        return read_text(Path(text))


def _logit_bias(items: Sequence[str]) -> dict[int, float] | None:
    """items: ID=NUMBER each. Raises ForedraftError for any other form."""
    try:
        pairs = [item.split("=", 1) for item in items]
        return {int(token): float(value) for token, value in pairs} or None
    except ValueError:
        raise ForedraftError(
            f"--logit-bias takes a token id and a number, as in 42=-1.5, not {' '.join(items)}"
        ) from None
