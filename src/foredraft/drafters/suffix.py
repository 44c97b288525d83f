"""Suffix decoding: draft what followed the longest suffix of the history that occurred before, for as long as it pays.

Based on "SuffixDecoding" (arXiv:2411.04975) and "SAM decoding" (arXiv:2411.10666), with hit rates learned at run time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from foredraft.drafters._automaton import ROOT, Cursor, SuffixAutomaton
from foredraft.drafters._continuations import SEPARATOR, HitRates, Match, continuation, continuations
from foredraft.engine.proposal import DraftRequest, Proposal, trees_of
from foredraft.errors import ForedraftError


class SuffixDrafter:
    """Proposes the continuation of a recent earlier occurrence of the longest repeated suffix of the history.

    The estimated probability that the j-th draft token is accepted is the product of j hit rates. A hit rate says how
    often the token after such a match was the right one recently, by the length of the match (which grows by one with
    each draft token) and by how many different tokens have followed it. The rates cost nothing extra: they are counted
    on the tokens that the target writes, and shared by all requests. Verifying a row has a cost, so drafting stops
    before that product falls below min_probability. If a tree is requested, siblings are other tokens that followed the
    match, or shorter matches.

    min_probability: a row pays off if its probability is above tau times its cost in passes. On code and stories,
        greedy and sampled, with 4 and 8 draft tokens, the default came within 1 % of the best value where a row costs
        10 % of a pass, and within 3 % at 5 and 15 %. Where rows are nearly free, 0.05 drafts more.
    max_match: matches of this length or more share a hit rate; this many tokens are read to find a place in the corpus.
    corpus_tokens: also keep up to this many tokens of the process's finished texts, and draft from them where that
        promises more. They are held in two halves; when the newer one is full, the older one is dropped. With 0 no text
        is kept, and nothing but the rates passes from one request to another.

    Time: O(1) amortised per token of the history (about 2 microseconds), and O(max_len) per proposal.
    Memory: an automaton with at most 2 states and 3 transitions (0.5 kB) per token, for each history until `forget` and
    for the corpus.
    """

    grows_trees = True

    def __init__(self, min_probability: float = 0.15, max_match: int = 16, corpus_tokens: int = 0) -> None:
        if not 0.0 < min_probability <= 1.0:
            raise ForedraftError(f"min_probability must be in (0, 1], not {min_probability}")
        if max_match < 1:
            raise ForedraftError(f"max_match must be at least 1, not {max_match}")
        if corpus_tokens < 0 or 0 < corpus_tokens < 4:
            raise ForedraftError(f"corpus_tokens must be 0 or at least 4, not {corpus_tokens}")
        self._min_probability = min_probability
        self._max_match = max_match
        self._rates = HitRates(max_match)
        self._corpus = Corpus(corpus_tokens, max_match) if corpus_tokens else None
        self._histories: dict[int, _History] = {}

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        """-> one row of certain tokens per request. All requests are read before any is drafted for, so order does not matter."""
        histories = [self._read(request) if request.max_len else None for request in requests]
        drafts = [
            _NO_DRAFT if history is None else self._draft(history, request)
            for history, request in zip(histories, requests, strict=True)
        ]
        return Proposal.certain([draft.ids for draft in drafts], trees_of([draft.parents for draft in drafts]))

    def forget(self, seq_ids: list[int]) -> None:
        """Drop the state of these sequences; their text, as far as it was seen, goes to the corpus (if any).

        A preempted sequence adds its text too, and adds all of it again when it finishes.
        """
        for seq_id in seq_ids:
            history = self._histories.pop(seq_id, None)
            if history is not None and self._corpus is not None:
                self._corpus.add(history.own.text)

    def _read(self, request: DraftRequest) -> _History:
        history, tokens = self._histories.get(request.seq_id), request.context
        if history is None or len(tokens) < len(history.own.text):  # new, or the id is used for another history
            history = self._histories[request.seq_id] = _History()
        new = tokens[len(history.own.text) :]
        history.read(new, self._rates)
        if self._corpus is not None:
            self._corpus.follow(history, new)
        return history

    def _draft(self, history: _History, request: DraftRequest) -> _Draft:
        """The draft with the most expected accepted tokens; in a tie the one from the history itself."""
        own = history.own
        match = Match(own.match_state, own.match_len, own.match_end)
        draft = self._draft_from(own, match, self._rates, request)
        if self._corpus is None:
            return draft
        others = [self._draft_from(*source, request) for source in self._corpus.matches(history)]
        return max(draft, *others, key=lambda each: each.expected)

    def _draft_from(self, automaton: SuffixAutomaton, match: Match, rates: HitRates, request: DraftRequest) -> _Draft:
        if request.shape is None:
            ids, expected = continuation(automaton, match, rates, self._min_probability, request.max_len)
            return _Draft(ids, None, expected)
        shape = request.shape.cut(request.max_len)
        return _Draft(*continuations(automaton, match, rates, self._min_probability, shape))


class _Draft(NamedTuple):
    """ids, parents: as in Proposal. expected: the expected number of accepted tokens."""

    ids: Sequence[int]
    parents: Sequence[int] | None
    expected: float


_NO_DRAFT = _Draft((), None, 0.0)


class _History:
    """The state of one sequence.

    own: the automaton of its text. cursors: its place in each generation of the corpus, keyed by the generation's
    number: a reference to the generation would keep it alive after it is dropped.
    """

    __slots__ = ("cursors", "own")

    def __init__(self) -> None:
        self.own = SuffixAutomaton()
        self.cursors: dict[int, Cursor] = {}

    def read(self, tokens: Sequence[int], rates: HitRates) -> None:
        """Append new tokens. Learn from all but those of the first call, which are the prompt and not written by the
        target."""
        own = self.own
        written = bool(own.text)
        for token in tokens:
            if written and own.match_len:
                hit = own.text[own.match_end + 1] == token
                rates.observe(own.match_len, len(own.followers(own.match_state)), hit)
            own.append(token)


class Corpus:
    """The texts of finished requests, in two generations; when the newer one is full, the older one is dropped.

    num_tokens: the limit for both together, separators included.
    """

    def __init__(self, num_tokens: int, max_match: int) -> None:
        self._capacity = num_tokens // 2
        self._max_match = max_match
        self._rates = HitRates(max_match)
        self._generations: dict[int, SuffixAutomaton] = {0: SuffixAutomaton()}

    @property
    def num_tokens(self) -> int:
        """How many tokens are held now, separators included."""
        return sum(len(generation.text) for generation in self._generations.values())

    def add(self, text: Sequence[int]) -> None:
        """Keep this text, or the end of it if it is longer than a generation."""
        text = text[-(self._capacity - 1) :]
        newest = max(self._generations)
        if len(self._generations[newest].text) + len(text) + 1 > self._capacity:
            self._generations = {newest: self._generations[newest], newest + 1: SuffixAutomaton()}
            newest += 1
        generation = self._generations[newest]
        for token in text:
            generation.append(token)
        generation.append(SEPARATOR)

    def follow(self, history: _History, new: Sequence[int]) -> None:
        """Find the history's place in each generation, and learn from its `new` tokens, those added since the last call."""
        known, history.cursors = history.cursors, {}
        for number, generation in self._generations.items():
            cursor = known.get(number)
            if cursor is None:
                history.cursors[number] = cursor = Cursor()
                for token in history.own.text[-self._max_match :]:
                    cursor.advance(generation, token)
            else:
                history.cursors[number] = cursor
                for token in new:
                    self._learn(generation, cursor, token)
                    cursor.advance(generation, token)
            cursor.settle(generation)

    def matches(self, history: _History) -> Iterator[tuple[SuffixAutomaton, Match, HitRates]]:
        """For each generation, the history's match in it and the hit rates to use."""
        for number, generation in self._generations.items():
            cursor = history.cursors[number]
            yield generation, Match(cursor.state, cursor.length, generation.ends[cursor.state]), self._rates

    def _learn(self, generation: SuffixAutomaton, cursor: Cursor, token: int) -> None:
        cursor.settle(generation)
        if cursor.state != ROOT:
            hit = generation.text[generation.ends[cursor.state] + 1] == token
            self._rates.observe(cursor.length, len(generation.followers(cursor.state)), hit)
