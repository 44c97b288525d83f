"""Translates the format that a request asks for into llguidance's language, and llguidance's errors into ours."""

from __future__ import annotations

import re

from llguidance import LLMatcher

from foredraft.errors import ForedraftError, one_line
from foredraft.sampling import StructuredOutputs

_WHITESPACE = r"[ \t]|\n[ \t]{0,24}"
"""Allowed between the tokens of JSON: a space, or a newline with its indentation. Without this bound a text could consist of
spaces until it reaches max_tokens, and never become JSON."""


def grammar_text(wanted: StructuredOutputs) -> str:
    """The grammar in llguidance's language. Raises ForedraftError, with the name of the field, if it cannot be read."""
    if wanted.regex is not None:
        if (len(wanted.regex) - len(wanted.regex.rstrip("\\"))) % 2:
            raise ForedraftError("structured_outputs.regex: it ends with a lone backslash")
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        return LLMatcher.grammar_from_regex("|".join(map(_escaped, wanted.choice)))
    if wanted.grammar is not None:
        return LLMatcher.grammar_from_lark(wanted.grammar)
    try:
        return LLMatcher.grammar_from_json_schema(wanted.schema, defaults={"whitespace_pattern": _WHITESPACE})
    except ValueError as error:
        raise ForedraftError(f"structured_outputs.{wanted.kind}: {one_line(error)}") from None


def _escaped(text: str) -> str:
    """A regular expression that matches exactly this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


_TOO_MUCH = "it takes more memory and time than a grammar is allowed: make its counts smaller"
_REASONS = (
    (r"NoExtension", "no text satisfies it"),
    (
        r".*Current row has \d+ items; max is (\d+)",
        r"there are more than \1 ways to continue at one position: make it unambiguous, or give it fewer optional properties "
        r"or alternatives",
    ),
    (
        r".*Too many items \(limit (\d+)",
        r"continuing at one position takes more than \1 steps of the parser: make it unambiguous, or give it fewer optional "
        r"properties or alternatives",
    ),
    (r"ParserTooComplex|LexerTooComplex|lexer error: too many", _TOO_MUCH),
)


_DUMP = re.compile(r"(?:<state>|<non-verbose/>).*", re.DOTALL)
_EXCERPT = re.compile(r"\n +\d+ \| .*", re.DOTALL)
"""The lines of the grammar around a mistake, with a mark under its column."""
_BAD_REGEX = re.compile(r"(.*)regex parse error:\n.*?\nerror: ", re.DOTALL)
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_RULE_OF_BNF = re.compile(r"^\s*<?[\w-]+>?\s*::=", re.MULTILINE)


def refusal(error: str, text: str, kind: str) -> str:
    """Why a grammar is refused. text: the grammar. For the others see `reason`."""
    if kind == "grammar" and (text.lstrip().startswith(("{", "[")) or _RULE_OF_BNF.search(text)):
        return 'it must be in Lark\'s form, with rules such as start: "a" | "b", not JSON or rules with ::='
    return reason(error, kind)


def reason(error: str, kind: str) -> str:
    """llguidance's error in one line, without its diagrams and its dump of the parser's state. kind: the field that the grammar is
    from."""
    error = _EXCERPT.sub("", _DUMP.sub("", error))
    error = _BAD_REGEX.sub("" if kind == "regex" else r"\1regex parse error: ", error)
    line = " ".join(_PLACE.sub(r"line \1, column \2: ", error, count=1).split())
    for pattern, words in _REASONS:
        match = re.match(pattern, line, re.IGNORECASE)
        if match:
            return match.expand(words)
    return line if len(line) <= 300 else f"{line[:300]}..."
