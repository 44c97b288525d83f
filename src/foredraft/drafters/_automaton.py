"""A suffix automaton that grows with its text, and a cursor that matches another text against it.

Blumer, Blumer, Haussler, Ehrenfeucht, Chen, Seiferas: "The smallest automaton recognizing the subwords of a text",
Theoretical Computer Science 40, 1985.

A state stands for all substrings with the same set of end positions in the text. They are suffixes of one another, one
of every length from `longest(suffix_link(state)) + 1` to `longest(state)`. The state of the whole text is
the last one; its suffix link is the longest suffix that occurred before.
"""

from __future__ import annotations

from collections.abc import Sequence

ROOT = 0  # the empty string
NOWHERE = -1
NUM_REFRESHED = 2  # states whose last end position an `append` refreshes; more made drafts no better on code or stories


class SuffixAutomaton:
    """Every substring of `text`, in at most 2 n states and 3 n transitions for n tokens (about 0.5 kB per token).

    text: the tokens so far. Append with `append` only.
    match_state, match_len, match_end: the longest suffix of the text that also ends earlier, at text[match_end] (a
        recent place, not always the most recent one); ROOT, 0 and -1 if there is none.
    """

    __slots__ = ("_last", "_lens", "_links", "_nexts", "ends", "match_end", "match_len", "match_state", "text")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.text: list[int] = []
        self.ends: list[int] = [-1]  # by state: the index in text of one recent end of its strings
        self.match_state, self.match_len, self.match_end = ROOT, 0, -1
        self._nexts: list[dict[int, int]] = [{}]
        self._links: list[int] = [NOWHERE]
        self._lens: list[int] = [0]
        self._last = ROOT
        for token in tokens:
            self.append(token)

    def followers(self, state: int) -> dict[int, int]:
        """token -> state, for each token that has followed the strings of `state`; do not write to it."""
        return self._nexts[state]

    def suffix_link(self, state: int) -> int:
        """The state of the longest suffix of this state's strings that also ends at other places; NOWHERE for ROOT."""
        return self._links[state]

    def longest(self, state: int) -> int:
        """The length of the state's longest string."""
        return self._lens[state]

    def append(self, token: int) -> None:
        """Append one token to the text. O(1) amortised."""
        nexts, links = self._nexts, self._links
        position = len(self.text)
        self.text.append(token)
        new = len(nexts)
        nexts.append({})
        self._lens.append(position + 1)
        self.ends.append(position)
        links.append(ROOT)
        state = self._last
        while state != NOWHERE and token not in nexts[state]:
            nexts[state][token] = new
            state = links[state]
        if state != NOWHERE:
            links[new] = self._exactly(state, token)
        self._last = new
        self._note_match(links[new], position)

    def _note_match(self, link: int, position: int) -> None:
        """Set the match: the suffix link of the whole text is its longest repeated suffix. It and its own suffixes now end
        here too. Refreshing all of them would cost more than O(1), and the longest are the ones that are looked up."""
        ends, links = self.ends, self._links
        self.match_state, self.match_len, self.match_end = link, self._lens[link], ends[link]
        for _ in range(NUM_REFRESHED):
            if link == ROOT:
                break
            ends[link] = position
            link = links[link]

    def _exactly(self, state: int, token: int) -> int:
        """The state whose longest string is that of `state` followed by `token`; split off from another if there is none."""
        target = self._nexts[state][token]
        if self._lens[target] == self._lens[state] + 1:
            return target
        clone = len(self._nexts)
        self._nexts.append(self._nexts[target].copy())
        self._links.append(self._links[target])
        self._lens.append(self._lens[state] + 1)
        self.ends.append(self.ends[target])
        self._links[target] = clone
        while state != NOWHERE and self._nexts[state].get(token) == target:
            self._nexts[state][token] = clone
            state = self._links[state]
        return clone


class Cursor:
    """The longest suffix of another text that an automaton's text contains, updated token by token.

    state, length: the suffix has `length` tokens and is one of the strings of `state`. O(1) amortised per token of the
    other text, plus one step per split of its own state since the last call.

    The automaton may grow in between. A suffix that matches only because of that growth is not searched for: the match
    is the longest one that is at most one token longer than the match one token ago.
    """

    __slots__ = ("length", "state")

    def __init__(self) -> None:
        self.state, self.length = ROOT, 0

    def settle(self, automaton: SuffixAutomaton) -> None:
        """Follow splits: a split moves the shorter strings of a state to its clone, which becomes the state's suffix link."""
        links, lens, state = automaton._links, automaton._lens, self.state
        while state != ROOT and self.length <= lens[links[state]]:
            state = links[state]
        self.state = state

    def advance(self, automaton: SuffixAutomaton, token: int) -> None:
        """Append `token` to the other text."""
        self.settle(automaton)
        nexts, state = automaton._nexts, self.state
        while token not in nexts[state]:
            state = automaton._links[state]
            if state == NOWHERE:
                self.state, self.length = ROOT, 0
                return
            self.length = automaton._lens[state]
        self.state, self.length = nexts[state][token], self.length + 1
