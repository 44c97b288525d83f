"""Suffix decoding: what followed the longest suffix of the history that occurred before, for as long as it pays.

After "SuffixDecoding" (arXiv:2411.04975) and "SAM decoding" (arXiv:2411.10666), with hit rates learned while running.
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

    The j-th draft token is thought to be accepted with the product of j hit rates: how often, of late, the token after
    such a match was the right one, by the length of the match (which grows by one with each draft token) and by how
    many different tokens have followed it. The rates come for free from the tokens that the target writes and are
    shared by all requests. A row costs something to verify, so drafting stops before that product falls under
    min_probability. Where a tree is wanted, other tokens that followed the match, or shorter ones, are its siblings.

    min_probability: a row pays where its probability is above tau times its cost in passes. On code and stories, greedy
        and sampled, 4 and 8 draft tokens, the default came within 1 % of the best value where a row costs 10 % of a
        pass, and within 3 % at 5 and 15 %.
        Where rows are nearly free, 0.05 drafts more.
    max_match: matches of this length or more share a hit rate; so many tokens are read to find a place in the corpus.
    corpus_tokens: also keep the finished texts of the process, at most so many tokens of them, and draft from them
        where that promises more. They are held in two halves; when the newer one is full the older one is dropped.
        0 keeps nothing, and then nothing passes from one request to another but the rates.

    Time: O(1) amortised per token of the history (about 2 microseconds), and O(max_len) per proposal.
    Memory: an automaton of at most 2 states and 3 transitions per token of each history until `forget`, and per token
    of the corpus (0.5 kB per token).
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
        """-> one certain row per request. All are read before one drafts, so the order is no matter."""
        histories = [self._read(request) if request.max_len else None for request in requests]
        drafts = [
            _NO_DRAFT if history is None else self._draft(history, request)
            for history, request in zip(histories, requests, strict=True)
        ]
        return Proposal.certain([draft.ids for draft in drafts], trees_of([draft.parents for draft in drafts]))

    def forget(self, seq_ids: list[int]) -> None:
        """Drops what is held for these sequences; their text, as far as it was seen, goes to the corpus (if any).

        A preempted sequence leaves its text too, and all of it once more when it finishes.
        """
        for seq_id in seq_ids:
            history = self._histories.pop(seq_id, None)
            if history is not None and self._corpus is not None:
                self._corpus.add(history.own.text)

    def _read(self, request: DraftRequest) -> _History:
        history, tokens = self._histories.get(request.seq_id), request.context
        if history is None or len(tokens) < len(history.own.text):  # new, or another history under the same id
            history = self._histories[request.seq_id] = _History()
        new = tokens[len(history.own.text) :]
        history.read(new, self._rates)
        if self._corpus is not None:
            self._corpus.follow(history, new)
        return history

    def _draft(self, history: _History, request: DraftRequest) -> _Draft:
        """The one of which the most tokens are expected to be accepted; of equals the history's own."""
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
    """ids, parents: as in Proposal. expected: how many are thought to be accepted."""

    ids: Sequence[int]
    parents: Sequence[int] | None
    expected: float


_NO_DRAFT = _Draft((), None, 0.0)


class _History:
    """What is held for one sequence.

    own: the automaton of its text. cursors: its place in each generation of the corpus, by the generation's number (not
    by the generation, whose memory must go when it is dropped).
    """

    __slots__ = ("cursors", "own")

    def __init__(self) -> None:
        self.own = SuffixAutomaton()
        self.cursors: dict[int, Cursor] = {}

    def read(self, tokens: Sequence[int], rates: HitRates) -> None:
        """Append the tokens that are new, and learn from those that were written since the first call: what was there
        before is the prompt, which the target did not write."""
        own = self.own
        written = bool(own.text)
        for token in tokens:
            if written and own.match_len:
                hit = own.text[own.match_end + 1] == token
                rates.observe(own.match_len, len(own.followers(own.match_state)), hit)
            own.append(token)


class Corpus:
    """The texts of finished requests, in two generations; when the newer one is full the older one is dropped.

    num_tokens: the bound on both together, separators included.
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
        """Find the history's place in each generation, and learn from its tokens that are `new` since the last call."""
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
        """The history's place in each generation."""
        for number, generation in self._generations.items():
            cursor = history.cursors[number]
            yield generation, Match(cursor.state, cursor.length, generation.ends[cursor.state]), self._rates

    def _learn(self, generation: SuffixAutomaton, cursor: Cursor, token: int) -> None:
        cursor.settle(generation)
        if cursor.state != ROOT:
            hit = generation.text[generation.ends[cursor.state] + 1] == token
            self._rates.observe(cursor.length, len(generation.followers(cursor.state)), hit)
