"""Compiling grammars, and keeping them: as many as their memory allows."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from hashlib import sha256
from threading import Lock
from typing import TypeVar

import llguidance.hf
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from transformers import PreTrainedTokenizerBase

from foredraft.errors import ForedraftError, one_line
from foredraft.sampling import StructuredOutputs
from foredraft.text.grammar.limits import GrammarLimits, Meter
from foredraft.text.grammar.source import grammar_text, reason
from foredraft.text.grammar.trials import Refused, Trials
from foredraft.text.grammar.walk import GrammarWalk

_MAX_REFUSALS = 1024
_RENEWAL_SECONDS = 0.02  # the others of a batch wait for it
_SILENT = 0
_Key = tuple[str, bytes]
_Kept = TypeVar("_Kept")


class Grammar:
    """A compiled grammar; `start` gives each text a walk of its own.

    own_bytes: of memory, when it was compiled. compiled: compiles one that shares nothing with those before.
    """

    def __init__(
        self,
        kind: str,
        tokenizer: LLTokenizer,
        limits: GrammarLimits,
        own_bytes: int,
        compiled: Callable[[], LLMatcher],
    ) -> None:
        self.kind = kind
        self.limits = limits
        self.own_bytes = own_bytes
        self.end_ids = frozenset(tokenizer.eos_tokens)
        self.vocab_size = tokenizer.vocab_size
        self.work = 0.0  # seconds that its masks took
        self._compiled = compiled
        self._is_broken = False
        began = time.perf_counter()
        self.matcher = compiled()
        self._compile_seconds = time.perf_counter() - began

    @property
    def num_bytes(self) -> int:
        """Of memory. It grows by what masks find out about it, and llguidance does not say by how much."""
        growth = min(int(self.work * self.limits.growth_per_second), self.limits.max_growth)
        return self.own_bytes + growth

    @property
    def is_worn(self) -> bool:
        """Whether those who come now are better served by a new one."""
        return self._is_broken or self.work > self.limits.worn_seconds

    def meter(self) -> Meter:
        """For one request, which may have several texts."""
        return Meter(self.limits)

    def start(self, prompt_len: int, meter: Meter | None = None) -> GrammarWalk:
        """For the text behind a prompt of so many tokens."""
        return GrammarWalk(self, prompt_len, meter or self.meter())

    def renew(self, spent: LLMatcher) -> bool:
        """This one's copies have met their limits: replace it, unless another text has done so. False: it costs too much, and
        whoever comes next has a new one."""
        if self.matcher is spent:
            self._is_broken = self._compile_seconds > _RENEWAL_SECONDS
            if self._is_broken:
                return False
            self.matcher = self._compiled()
            self.matcher.compute_bitmask()  # until its first mask a matcher has the fuel for compiling, five times that of a mask
        return True


class Grammars:
    """Compiles what requests ask for, and keeps the last of them, by count and by memory. Safe to use from several threads:
    those that want one grammar wait for one compilation, others do not wait for it.

    tokenizer: a fast one. end_ids: the ids that end a text; where a grammar is complete, they are what it allows.
    capacity: how many are kept at most.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
        capacity: int = 64,
        limits: GrammarLimits | None = None,
    ) -> None:
        self._source = tokenizer
        self._end_ids = sorted(end_ids)
        self._capacity = capacity
        self._limits = limits or GrammarLimits()
        self._trials = Trials(self._limits)
        self._kept: OrderedDict[_Key, Grammar] = OrderedDict()
        self._refused: OrderedDict[_Key, str] = OrderedDict()
        self._running: dict[_Key, Future[Grammar]] = {}
        self._lock = Lock()
        self._tokenizer_lock = Lock()
        self._made_tokenizer: LLTokenizer | None = None

    @property
    def num_bytes(self) -> int:
        """Of memory, for those that are kept."""
        with self._lock:
            return sum(grammar.num_bytes for grammar in self._kept.values())

    def is_known(self, wanted: StructuredOutputs) -> bool:
        """Whether `compile` answers at once. Raises as it does for what cannot be read."""
        key = _key(wanted.kind, grammar_text(wanted))
        with self._lock:
            return key in self._refused or (key in self._kept and not self._kept[key].is_worn)

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """Raises ForedraftError that names the field: for what is no schema, expression or grammar, for what no text
        satisfies, for what takes too much to compile, and for a tokenizer that cannot be read byte by byte."""
        text = grammar_text(wanted)
        key = _key(wanted.kind, text)
        with self._lock:
            if key in self._refused:
                raise ForedraftError(self._refused[key])
            found = self._kept.get(key)
            if found and not found.is_worn:
                self._kept.move_to_end(key)
                return found
            running = self._running.get(key)
            future = running or self._running.setdefault(key, Future())
        if running is None:
            self._settle(future, key, text, wanted.kind)
        return future.result()

    def _settle(self, future: Future[Grammar], key: _Key, text: str, kind: str) -> None:
        """Compile, and tell all who wait."""
        try:
            grammar = self._compiled(text, kind)
        except Refused as error:
            message = f"structured_outputs.{kind}: {reason(str(error))}"
            self._end(key, lambda: _put(self._refused, key, message))
            future.set_exception(ForedraftError(message))
        except BaseException as error:
            self._end(key, lambda: None)
            future.set_exception(error)
        else:
            self._end(key, lambda: self._keep(key, grammar))
            future.set_result(grammar)

    def _end(self, key: _Key, note: Callable[[], None]) -> None:
        with self._lock:
            del self._running[key]
            note()
            while len(self._refused) > _MAX_REFUSALS:
                self._refused.popitem(last=False)

    def _keep(self, key: _Key, grammar: Grammar) -> None:
        _put(self._kept, key, grammar)
        total = sum(one.num_bytes for one in self._kept.values())
        while len(self._kept) > self._capacity or (total > self._limits.cache_bytes and len(self._kept) > 1):
            _, oldest = self._kept.popitem(last=False)
            total -= oldest.num_bytes

    def _compiled(self, text: str, kind: str) -> Grammar:
        tokenizer, limits = self._tokenizer, self._limits.parser_for(kind)
        num_bytes = self._trials.run(text, limits)

        def matcher() -> LLMatcher:
            return LLMatcher(tokenizer, text, log_level=_SILENT, limits=LLParserLimits(**limits))  # type: ignore[arg-type]

        grammar = Grammar(kind, tokenizer, self._limits, num_bytes + len(text), matcher)
        _check(grammar.matcher)
        return grammar

    @property
    def _tokenizer(self) -> LLTokenizer:
        """Made when it is first needed: over a large vocabulary it takes a second."""
        with self._tokenizer_lock:
            if self._made_tokenizer is None:
                self._made_tokenizer = self._read_tokenizer()
            return self._made_tokenizer

    def _read_tokenizer(self) -> LLTokenizer:
        end_ids = [i for i in self._end_ids if i < len(self._source)]
        if not end_ids:
            raise ForedraftError("structured_outputs needs an end-of-sequence id, and the checkpoint names none")
        try:
            return llguidance.hf.from_tokenizer(self._source, eos_token=end_ids)
        except Exception as error:  # it says what it cannot read by whatever exception comes
            raise ForedraftError(f"structured_outputs cannot read this tokenizer: {one_line(error)}") from error


def _check(matcher: LLMatcher) -> None:
    """What no text of this vocabulary can begin with shows only when it is asked for a beginning."""
    bits = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        raise Refused(matcher.get_error())
    if not any(bits):
        raise Refused("NoExtension")


def _key(kind: str, text: str) -> _Key:
    return kind, sha256(text.encode()).digest()


def _put(kept: OrderedDict[_Key, _Kept], key: _Key, value: _Kept) -> None:
    kept[key] = value
    kept.move_to_end(key)
