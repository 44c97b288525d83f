"""Applies a text's constraint to its draft: drafts the tokens that it forces, and cuts the draft where it forbids a token.

A token that is the only one allowed is drafted for free. It is a certain draft token like any other, and the target accepts it
with probability 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from foredraft.engine.proposal import CERTAIN, Proposal, trees_of
from foredraft.engine.sequence import TokenSequence
from foredraft.engine.token_tree import ROOT, TreeShape


class ForcedPrefix(NamedTuple):
    """The start of one sequence's draft of at most max_draft tokens. ids: the forced tokens after its history.
    shape: the wanted shape of the draft that follows them."""

    sequence: TokenSequence
    max_draft: int
    ids: list[int]
    shape: TreeShape | None = None

    @classmethod
    def of(cls, sequence: TokenSequence, max_draft: int, shape: TreeShape | None = None) -> ForcedPrefix:
        constraint = sequence.sampler.constraint
        if constraint is None:
            return cls(sequence, max_draft, [], shape)
        if not constraint.allows_drafts:
            max_draft = 0
        return cls(sequence, max_draft, sequence.sampler.forced(sequence.tokens, (), max_draft), shape)

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens that the drafter continues."""
        return [*self.sequence.tokens, *self.ids] if self.ids else self.sequence.tokens

    @property
    def room(self) -> int:
        """How many more tokens the draft may have."""
        if not self.ids:
            return self.max_draft
        return 0 if self._ends(self.ids) else self.max_draft - len(self.ids)

    def fit(self, ids: Sequence[int], prob_rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """The whole draft and its prob_rows: the forced prefix, the drafter's tokens up to the first that the constraint forbids, and
        any tokens that are forced after those.

        A forbidden token that was drawn is kept as the last one: removing it because of its value would bias the text, and the
        target rejects it anyway.
        """
        draft, all_prob_rows = [*self.ids, *ids], [*[CERTAIN] * len(self.ids), *prob_rows]
        sampler, history = self.sequence.sampler, self.sequence.tokens
        count = sampler.num_allowed(history, draft)
        if count < len(draft):
            count += all_prob_rows[count] != CERTAIN
            return draft[:count], all_prob_rows[:count]
        if not self._ends(draft):
            draft += sampler.forced(history, draft, self.max_draft - len(draft))
        return draft, [*all_prob_rows, *[CERTAIN] * (len(draft) - len(all_prob_rows))]

    def fit_tree(self, ids: Sequence[int], parents: Sequence[int]) -> tuple[list[int], list[int]]:
        """The whole draft and its parents: the forced prefix, followed by the part of the drafter's tree that the constraint allows."""
        num_forced = len(self.ids)
        last = num_forced - 1
        draft, grown = [*self.ids], list(range(ROOT, last))
        paths: dict[int, list[int]] = {ROOT: list(self.ids)}
        places = {ROOT: last}
        for node, (token, parent) in enumerate(zip(ids, parents, strict=True)):
            path = [*paths[parent], token] if parent in paths else None
            if path is None or self.sequence.sampler.num_allowed(self.sequence.tokens, path) < len(path):
                continue
            paths[node], places[node] = path, len(draft)
            draft.append(token)
            grown.append(places[parent])
        return draft, grown

    def _ends(self, ids: Sequence[int]) -> bool:
        return bool(ids) and ids[-1] in self.sequence.end_ids


def apply_constraints(proposal: Proposal, forced_prefixes: Sequence[ForcedPrefix]) -> Proposal:
    """Add each row's forced prefix to its draft, and cut the draft as the constraint demands. Row b belongs to forced_prefixes[b]."""
    if not any(forced.max_draft and forced.sequence.sampler.constraint is not None for forced in forced_prefixes):
        return proposal
    ids, prob_rows, parents = [], [], []
    columns = (forced_prefixes, proposal.draft_ids, proposal.draft_prob_rows, proposal.draft_parents)
    for forced, row_ids, row_prob_rows, row_parents in zip(*columns, strict=True):
        if row_parents is None:
            allowed, drawn_from = forced.fit(row_ids, row_prob_rows)
            grown = None
        else:
            allowed, grown = forced.fit_tree(row_ids, row_parents)
            drawn_from = [CERTAIN] * len(allowed)
        ids.append(allowed)
        prob_rows.append(drawn_from)
        parents.append(grown)
    return Proposal.of(ids, prob_rows, proposal.token_probs, trees_of(parents))
