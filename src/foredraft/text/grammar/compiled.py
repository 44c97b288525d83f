"""Compiles grammars and caches them, as many as the memory limit allows."""

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
from foredraft.text.grammar.source import grammar_text, refusal
from foredraft.text.grammar.trials import Refused, Trials
from foredraft.text.grammar.walk import GrammarWalk

_MAX_REFUSALS = 1024
_MAX_RENEWAL_SECONDS = 0.02  # the rest of the batch waits for it
_SILENT = 0
_Key = tuple[str, bytes]
_Value = TypeVar("_Value")


class Grammar:
    """A compiled grammar; `start` gives each text its own walk.

    own_bytes: memory after compilation. new_matcher: compiles a matcher that shares nothing with earlier ones.
    """

    def __init__(
        self,
        kind: str,
        tokenizer: LLTokenizer,
        limits: GrammarLimits,
        own_bytes: int,
        new_matcher: Callable[[], LLMatcher],
    ) -> None:
        self.kind = kind
        self.limits = limits
        self.own_bytes = own_bytes
        self.end_ids = frozenset(tokenizer.eos_tokens)
        self.vocab_size = tokenizer.vocab_size
        self.work = 0.0  # seconds that its masks have taken
        self._new_matcher = new_matcher
        self._is_broken = False
        began = time.perf_counter()
        self.matcher = new_matcher()
        self._compile_seconds = time.perf_counter() - began

    @property
    def num_bytes(self) -> int:
        """Estimated memory: llguidance caches results of mask computation, and does not report their size."""
        growth = min(int(self.work * self.limits.growth_per_second), self.limits.max_growth)
        return self.own_bytes + growth

    @property
    def is_worn(self) -> bool:
        """Whether new requests should compile the grammar again."""
        return self._is_broken or self.work > self.limits.worn_seconds

    def meter(self) -> Meter:
        """A meter for one request, which its texts share."""
        return Meter(self.limits)

    def start(self, prompt_len: int, meter: Meter | None = None) -> GrammarWalk:
        """A walk for a text that follows a prompt of prompt_len tokens."""
        return GrammarWalk(self, prompt_len, meter or self.meter())

    def renew(self, spent: LLMatcher) -> bool:
        """Replace the matcher, whose copies have reached llguidance's limits, unless another text has replaced it already.

        spent: the matcher that reached them. -> False if that takes too long; then new requests compile the grammar again
        """
        if self.matcher is spent:
            self._is_broken = self._compile_seconds > _MAX_RENEWAL_SECONDS
            if self._is_broken:
                return False
            self.matcher = self._new_matcher()
            self.matcher.compute_bitmask()  # before its first mask a matcher has five times the fuel of later masks
        return True


class Grammars:
    """Compiles grammars and caches the most recent ones, within limits on their number and memory. Thread-safe: threads that
    need the same grammar wait for one compilation; other threads do not wait for it.

    tokenizer: a fast one. end_ids: the ids that end a text; once the grammar is complete, only these are allowed.
    capacity: the most grammars to cache.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
        capacity: int = 64,
        limits: GrammarLimits | None = None,
    ) -> None:
        self._hf_tokenizer = tokenizer
        self._end_ids = sorted(end_ids)
        self._capacity = capacity
        self._limits = limits or GrammarLimits()
        self._trials = Trials(self._limits)
        self._cached: OrderedDict[_Key, Grammar] = OrderedDict()
        self._refused: OrderedDict[_Key, str] = OrderedDict()
        self._compiling: dict[_Key, Future[Grammar]] = {}
        self._lock = Lock()
        self._tokenizer_lock = Lock()
        self._made_tokenizer: LLTokenizer | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the cached grammars."""
        with self._lock:
            return sum(grammar.num_bytes for grammar in self._cached.values())

    def is_known(self, wanted: StructuredOutputs) -> bool:
        """Whether `compile` returns or raises at once. Raises ForedraftError for a format that cannot be read."""
        key = _key(wanted.kind, grammar_text(wanted))
        with self._lock:
            return key in self._refused or (key in self._cached and not self._cached[key].is_worn)

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """Compile a grammar, or take it from the cache.

        Raises ForedraftError, with the name of the field, for an invalid schema, expression or grammar, for one that no
        text satisfies or that costs too much to compile, and for a tokenizer that cannot be read byte by byte.
        """
        text = grammar_text(wanted)
        key = _key(wanted.kind, text)
        with self._lock:
            if key in self._refused:
                raise ForedraftError(self._refused[key])
            cached = self._cached.get(key)
            if cached and not cached.is_worn:
                self._cached.move_to_end(key)
                return cached
            running = self._compiling.get(key)
            future = running or self._compiling.setdefault(key, Future())
        if running is None:
            self._compile_into(future, key, text, wanted.kind)
        return future.result()

    def _compile_into(self, future: Future[Grammar], key: _Key, text: str, kind: str) -> None:
        """Compile, and set the result for all threads that wait."""
        try:
            grammar = self._compile_now(text, kind)
        except Refused as error:
            message = f"structured_outputs.{kind}: {refusal(str(error), text, kind)}"
            self._end(key, lambda: _put(self._refused, key, message))
            future.set_exception(ForedraftError(message))
        except BaseException as error:
            self._end(key, lambda: None)
            future.set_exception(error)
        else:
            self._end(key, lambda: self._keep(key, grammar))
            future.set_result(grammar)

    def _end(self, key: _Key, store: Callable[[], None]) -> None:
        with self._lock:
            del self._compiling[key]
            store()
            while len(self._refused) > _MAX_REFUSALS:
                self._refused.popitem(last=False)

    def _keep(self, key: _Key, grammar: Grammar) -> None:
        _put(self._cached, key, grammar)
        total = sum(cached.num_bytes for cached in self._cached.values())
        while len(self._cached) > self._capacity or (total > self._limits.cache_bytes and len(self._cached) > 1):
            _, oldest = self._cached.popitem(last=False)
            total -= oldest.num_bytes

    def _compile_now(self, text: str, kind: str) -> Grammar:
        tokenizer, limits = self._tokenizer, self._limits.parser_for(kind)
        num_bytes = self._trials.run(text, limits)

        def new_matcher() -> LLMatcher:
            return LLMatcher(tokenizer, text, log_level=_SILENT, limits=LLParserLimits(**limits))  # type: ignore[arg-type]

        grammar = Grammar(kind, tokenizer, self._limits, num_bytes + len(text), new_matcher)
        _check(grammar.matcher)
        return grammar

    @property
    def _tokenizer(self) -> LLTokenizer:
        """Made on first use: for a large vocabulary it takes a second."""
        with self._tokenizer_lock:
            if self._made_tokenizer is None:
                self._made_tokenizer = self._read_tokenizer()
            return self._made_tokenizer

    def _read_tokenizer(self) -> LLTokenizer:
        end_ids = [i for i in self._end_ids if i < len(self._hf_tokenizer)]
        if not end_ids:
            raise ForedraftError("structured_outputs needs an end-of-sequence id, but the checkpoint names none")
        try:
            return llguidance.hf.from_tokenizer(self._hf_tokenizer, eos_token=end_ids)
        except Exception as error:  # llguidance raises exceptions of any type here
            raise ForedraftError(f"structured_outputs cannot read this tokenizer: {one_line(error)}") from error


def _check(matcher: LLMatcher) -> None:
    """Raises Refused if no text of this vocabulary satisfies the grammar, which only its first mask shows."""
    bits = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        raise Refused(matcher.get_error())
    if not any(bits):
        raise Refused("NoExtension")


def _key(kind: str, text: str) -> _Key:
    return kind, sha256(text.encode()).digest()


def _put(cache: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    cache[key] = value
    cache.move_to_end(key)
