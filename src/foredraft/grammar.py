"""Structured outputs: from what a request says its text may look like to masks over token ids, by llguidance.

The only place that knows that library. A grammar is compiled once and kept; each text walks it by itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from threading import Lock

import llguidance.hf
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from transformers import PreTrainedTokenizerBase

from foredraft.errors import ForedraftError, one_line
from foredraft.prefix import common_prefix
from foredraft.sampling import Bits, StructuredOutputs, has_id, only_id

_WHITESPACE = r"[ \t]|\n[ \t]{0,24}"
"""Between the tokens of JSON: a blank, or a new line and its indentation. Without a bound a text may be blanks to the end of its
budget, and be no JSON."""
_MAX_FORCED_BYTES = 65_536
_MASKS_KEPT = 64
_SILENT = 0


class Grammars:
    """Compiles what requests ask for, and keeps the last `capacity` grammars. Safe to use from several threads.

    tokenizer: a fast one. end_ids: the ids that end a text; where a grammar is complete, they are what it allows.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int], capacity: int = 64) -> None:
        self._source = tokenizer
        self._end_ids = sorted(end_ids)
        self._capacity = capacity
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = Lock()

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """Raises ForedraftError that names the field: for what is no schema, expression or grammar, for what no text
        satisfies, for what takes too much to compile, and for a tokenizer that cannot be read byte by byte."""
        text = _grammar_text(wanted)
        with self._lock:
            found = self._kept.pop(text, None) or self._compiled(text, wanted.kind)
            self._kept[text] = found
            while len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
        return found

    def _compiled(self, text: str, kind: str) -> Grammar:
        def matcher() -> LLMatcher:
            return LLMatcher(self._tokenizer, text, log_level=_SILENT)

        return Grammar(_checked(matcher(), kind), self._tokenizer, matcher)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Made when it is first needed: over a large vocabulary it takes a second."""
        end_ids = [i for i in self._end_ids if i < len(self._source)]
        if not end_ids:
            raise ForedraftError("structured_outputs needs an end-of-sequence id, and the checkpoint names none")
        try:
            return llguidance.hf.from_tokenizer(self._source, eos_token=end_ids)
        except Exception as error:  # it says what it cannot read by whatever exception comes
            raise ForedraftError(f"structured_outputs cannot read this tokenizer: {one_line(error)}") from error


class Grammar:
    """A compiled grammar; `start` gives each text a walk of its own.

    matcher: at the grammar's beginning. Its copies share what was worked out about the grammar, and the limits on that.
    again: compiles one that shares nothing.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, again: Callable[[], LLMatcher]) -> None:
        self.matcher = matcher
        self.end_ids = frozenset(tokenizer.eos_tokens)
        self.vocab_size = tokenizer.vocab_size
        self._again = again

    def start(self, prompt_len: int) -> GrammarWalk:
        """For the text behind a prompt of so many tokens."""
        return GrammarWalk(self, prompt_len)

    def renew(self, spent: LLMatcher) -> None:
        """This one's copies have met their limits: replace it, unless another text has done so."""
        if self.matcher is spent:
            self.matcher = self._again()


class GrammarWalk:
    """A sampling.Constraint: one text's place in a grammar.

    It goes along with the draft and comes back with it. What lies behind a token that the grammar refuses, or behind the
    end, no text has: there the end alone is allowed.
    """

    def __init__(self, grammar: Grammar, prompt_len: int) -> None:
        self._grammar = grammar
        self._prompt_len = prompt_len
        self._end_ids = grammar.end_ids
        self._end = np.zeros(max(self._end_ids) // 8 + 1, dtype=np.uint8)
        for token in self._end_ids:
            self._end[token // 8] |= 1 << token % 8
        self._has_tried_again = False
        self._failure: str | None = None
        self._failed_at = 0
        self._begin()

    def _begin(self) -> None:
        self._origin = self._grammar.matcher
        self._matcher = self._origin.deep_copy()
        self._walked: list[int] = []  # the output tokens that the matcher has read
        self._masks: dict[int, Bits] = {}  # by how many output tokens come before

    def allowed(self, history: Sequence[int], drafted: Sequence[int]) -> Bits:
        place = len(history) - self._prompt_len + len(drafted)
        while self._failure is None or place < self._failed_at:
            try:
                return self._allowed(history, drafted)
            except _Spent as error:
                self._grammar.renew(self._origin)
                self._begin()
                if self._has_tried_again:
                    self._failure, self._failed_at = f"structured_outputs: {error}", place
                # it may have been another text of this grammar that met the limits they share; but once only: the work that
                # leads to them is a third of a second
                self._has_tried_again = True
        # and that far it does not go again: others wait for every attempt
        raise ForedraftError(self._failure)

    def _allowed(self, history: Sequence[int], drafted: Sequence[int]) -> Bits:
        if not self._go_to(history, drafted):
            return self._end
        place = len(self._walked)
        bits = self._masks.get(place)
        if bits is None:
            bits = self._computed_mask()
            self._keep(place, bits)
        return bits

    def num_allowed(self, history: Sequence[int], drafted: Sequence[int]) -> int:
        # by the masks: where the grammar forces some text, they allow one way of writing it and no other
        for place, token in enumerate(drafted):
            if not has_id(self.allowed(history, drafted[:place]), token):
                return place
            if token in self._end_ids:
                return place + 1
        return len(drafted)

    def forced(self, history: Sequence[int], drafted: Sequence[int], at_most: int) -> list[int]:
        found: list[int] = []
        while len(found) < at_most and not (found and found[-1] in self._end_ids):
            token = only_id(self.allowed(history, [*drafted, *found]))
            if token is None:
                break
            found.append(token)
        return found

    def _go_to(self, history: Sequence[int], drafted: Sequence[int]) -> bool:
        """Stand behind history + drafted; say whether that is a place in the grammar, and not its end."""
        wanted = [*history[self._prompt_len :], *drafted]
        self._go_back(common_prefix(self._walked, wanted))
        new = wanted[len(self._walked) :]
        words = self._before_end(new)
        num_read = self._matcher.try_consume_tokens(words) if words else 0
        self._check()
        self._walked += words[:num_read]
        if num_read < len(words):
            # where another text has met the limits they share, every token is refused, and only a mask tells why
            self._computed_mask()
        return num_read == len(new)

    def _computed_mask(self) -> Bits:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return bits

    def _go_back(self, place: int) -> None:
        excess = len(self._walked) - place
        if excess:
            self._matcher.rollback(excess)
            del self._walked[place:]
            self._masks = {at: bits for at, bits in self._masks.items() if at <= place}

    def _keep(self, place: int, bits: Bits) -> None:
        """A step asks for those of its draft, once to draft and once to verify; what comes before is computed again if
        somebody asks for it."""
        self._masks[place] = bits
        if len(self._masks) > _MASKS_KEPT:
            self._masks = {at: self._masks[at] for at in sorted(self._masks)[_MASKS_KEPT // 2 :]}

    def _before_end(self, ids: Sequence[int]) -> list[int]:
        """Up to the first that ends a text, or that the tokenizer does not have."""
        size = self._grammar.vocab_size
        stop = next((i for i, token in enumerate(ids) if token in self._end_ids or token >= size), len(ids))
        return list(ids[:stop])

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _Spent(_reason(self._matcher))


class _Spent(Exception):
    """A matcher met its limits, and is of no more use."""


def _checked(matcher: LLMatcher, kind: str) -> LLMatcher:
    """The same, if any text can begin with it. Raises ForedraftError that names the field."""
    if not matcher.is_error():
        # what no text can begin with shows only when it is asked for a beginning
        bits = matcher.compute_bitmask()
        if not matcher.is_error() and not any(bits):
            raise ForedraftError(f"structured_outputs.{kind}: no text satisfies it")
    if matcher.is_error():
        raise ForedraftError(f"structured_outputs.{kind}: {_reason(matcher)}")
    if len(matcher.compute_ff_bytes()) > _MAX_FORCED_BYTES:
        raise ForedraftError(f"structured_outputs.{kind}: every text has more than {_MAX_FORCED_BYTES} bytes")
    return matcher


def _grammar_text(wanted: StructuredOutputs) -> str:
    """As llguidance reads it."""
    if wanted.regex is not None:
        if (len(wanted.regex) - len(wanted.regex.rstrip("\\"))) % 2:
            raise ForedraftError("structured_outputs.regex: it ends with a lone backslash")
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        return LLMatcher.grammar_from_regex("|".join(map(_literally, wanted.choice)))
    if wanted.grammar is not None:
        return LLMatcher.grammar_from_lark(wanted.grammar)
    try:
        return LLMatcher.grammar_from_json_schema(wanted.schema, defaults={"whitespace_pattern": _WHITESPACE})
    except ValueError as error:
        raise ForedraftError(f"structured_outputs.{wanted.kind}: {one_line(error)}") from None


def _literally(text: str) -> str:
    """A regular expression that matches this text alone."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


_REASONS = {
    "NoExtension": "no text satisfies it",
    "ParserTooComplex": "it takes more memory and time than a grammar may",
    "LexerTooComplex": "it takes more memory and time than a grammar may",
}


def _reason(matcher: LLMatcher) -> str:
    """In one line, without the dump of the parser's state."""
    text = matcher.get_error().partition("<state>")[0]
    known = next((words for name, words in _REASONS.items() if text.startswith(name)), None)
    line = " ".join(text.split())
    return known or (line if len(line) <= 300 else f"{line[:300]}...")
