"""What followed a match in a suffix automaton's text: one continuation, or a tree of several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from foredraft.drafters._automaton import NOWHERE, ROOT, SuffixAutomaton
from foredraft.drafters._lookups import look_up_tree, token_at
from foredraft.engine.token_tree import TreeShape

SEPARATOR = -1  # ends each text of the corpus; no request has such a token, so no match extends past it
MAX_BRANCHES = 4


class Match(NamedTuple):
    """A suffix of the history that also occurs in the automaton's text. state: the automaton's; None past the end of the text.
    length: of the suffix. end: where it ends in the text."""

    state: int | None
    length: int
    end: int


class HitRates:
    """How often the token after a match was the right one, by the length of the match and by how many different
    tokens have followed it (`branches`). Counts are halved at MAX_TRIALS, so that the rates follow the text.

    The counts start from a prior with the weight of PRIOR_TRIALS observations: a rough fit to the rates on Python code
    and on stories, which agree with each other to about 0.1.
    """

    PRIOR_TRIALS = 8
    MAX_TRIALS = 1024

    __slots__ = ("_hits", "_max_match", "_trials")

    def __init__(self, max_match: int) -> None:
        self._max_match = max_match
        places = [divmod(place, MAX_BRANCHES + 1) for place in range((max_match + 1) * (MAX_BRANCHES + 1))]
        self._hits = [self.PRIOR_TRIALS * _prior(length, branches) for length, branches in places]
        self._trials: list[float] = [self.PRIOR_TRIALS] * len(places)

    def of(self, match_len: int, branches: int) -> float:
        """The probability that a match of this length continues as it did before."""
        place = self._place(match_len, branches)
        return self._hits[place] / self._trials[place]

    def observe(self, match_len: int, branches: int, hit: bool) -> None:
        """Count one match. hit: whether the next token was the predicted one."""
        place = self._place(match_len, branches)
        self._trials[place] += 1
        if hit:
            self._hits[place] += 1
        if self._trials[place] >= self.MAX_TRIALS:
            self._trials[place] /= 2
            self._hits[place] /= 2

    def _place(self, match_len: int, branches: int) -> int:
        length = match_len if match_len < self._max_match else self._max_match  # min() takes three times as long
        return length * (MAX_BRANCHES + 1) + (branches if branches < MAX_BRANCHES else MAX_BRANCHES)


def _prior(match_len: int, branches: int) -> float:
    if not match_len:
        return 0.0
    return 0.9 * match_len / (match_len + 1.5) if branches <= 1 else 0.6 / branches


def continuation(
    automaton: SuffixAutomaton, match: Match, rates: HitRates, min_probability: float, max_len: int
) -> tuple[list[int], float]:
    """The tokens after the match, for as long as they pay -> draft tokens, and how many are expected to be accepted.

    At the end of the text the copy continues with its own tokens: a b c a b, whose match a b ended at 1, gives c a b c a b ...
    """
    draft: list[int] = []
    state, match_len, match_end = match
    if not match_len:
        return draft, 0.0
    text, size = automaton.text, len(automaton.text)
    probability, expected, followers = 1.0, 0.0, _followers(automaton, state)
    for source in range(match_end + 1, match_end + 1 + max_len):
        token = text[source] if source < size else draft[source - size]
        probability *= rates.of(match_len, len(followers))
        if token == SEPARATOR or probability < min_probability:
            break
        draft.append(token)
        expected += probability
        match_len += 1
        after = followers.get(token)
        followers = {} if after is None else automaton.followers(after)
    return draft, expected


class _Node(NamedTuple):
    match: Match
    path: tuple[int, ...]
    probability: float


def continuations(
    automaton: SuffixAutomaton, match: Match, rates: HitRates, min_probability: float, shape: TreeShape
) -> tuple[list[int], list[int], float]:
    """The tokens that followed the match in several places, for as long as they pay -> tokens and parents of a tree, as in Proposal,
    and how many are expected to be accepted.

    The first child of a node is the token of `continuation`. Then come the other tokens that have followed the match, the most
    recent first, and then those that have followed shorter matches. The probability that the first child's hit rate leaves is
    divided among the other followers of the match.
    """

    def children_of(node: _Node) -> Iterator[tuple[int, _Node]]:
        return (each for each in _followed_by(automaton, node, rates) if each[1].probability >= min_probability)

    ids, parents, nodes = look_up_tree(shape, _Node(match, (), 1.0), children_of)
    return ids, parents, sum(node.probability for node in nodes)


def _followed_by(automaton: SuffixAutomaton, node: _Node, rates: HitRates) -> Iterator[tuple[int, _Node]]:
    """The candidate children of a node: each token once, with its node."""
    (state, length, end), path, probability = node
    seen = {SEPARATOR}
    while length:
        followers = _followers(automaton, state)
        rate = rates.of(length, len(followers))
        token = token_at(automaton.text, path, end + 1)
        if token is not None and token not in seen:
            seen.add(token)
            yield token, _Node(Match(followers.get(token), length + 1, end + 1), (*path, token), probability * rate)
        rest = probability * (1 - rate) / max(1, len(followers) - 1)
        others = sorted(
            (each for each in followers if each not in seen), key=lambda each: -automaton.ends[followers[each]]
        )
        for other in others:
            seen.add(other)
            after = followers[other]
            yield other, _Node(Match(after, length + 1, automaton.ends[after]), (*path, other), rest)
        probability = rest
        state, length, end = _shorter(automaton, state)


def _shorter(automaton: SuffixAutomaton, state: int | None) -> Match:
    """The longest suffix of the state's strings that also occurs elsewhere; of length 0 if there is none."""
    link = NOWHERE if state is None else automaton.suffix_link(state)
    if link in (NOWHERE, ROOT):
        return Match(ROOT, 0, -1)
    return Match(link, automaton.longest(link), automaton.ends[link])


def _followers(automaton: SuffixAutomaton, state: int | None) -> dict[int, int]:
    return {} if state is None else automaton.followers(state)
