"""Drafts under construction: the common part of the drafters that choose tokens from a model's logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.drafters._constrained import held
from foredraft.engine.proposal import CERTAIN, DraftRequest, Proposal, trees_of
from foredraft.kernels import DrawSpec
from foredraft.model.generation import Generated
from foredraft.sampling import (
    Row,
    TokenProbs,
    adjusted,
    checked_ids,
    choose,
    joined,
    pick,
    sampled_groups,
    select,
    token_probs_of,
)


@dataclass(slots=True)
class Draft:
    """One request's draft under construction. prob_rows, parents: as in Proposal. tokens: for a draft model, the history in its
    ids."""

    request: DraftRequest
    max_len: int
    tokens: Sequence[int] = ()
    ids: list[int] = field(default_factory=list)
    prob_rows: list[int] = field(default_factory=list)
    parents: list[int] | None = None
    is_open: bool = True

    @property
    def has_room(self) -> bool:
        """Whether one more token may be drafted."""
        return self.is_open and len(self.ids) < self.max_len

    @property
    def row(self) -> Row:
        return Row(self.request.sampler, self.request.tokens, self.ids)

    def append(self, token: int, prob_row: int, *, row_failed: bool) -> None:
        """Add a token. If its row failed (NaN from the draft model, or an error in a user's processor), the draft ends before it."""
        self.is_open = self.is_open and not row_failed
        if self.is_open:
            self.ids.append(token)
            self.prob_rows.append(prob_row)


def in_passes(drafts: Sequence[Draft], num_rows: Callable[[Draft], int], max_rows: int) -> Iterator[list[Draft]]:
    """Group drafts into passes of at most max_rows rows. A draft is never split, so one that is larger has a pass to itself."""
    group, total = list[Draft](), 0
    for draft in drafts:
        rows = num_rows(draft)
        if group and total + rows > max_rows:
            yield group
            group, total = [], 0
        group.append(draft)
        total += rows
    if group:
        yield group


def extend(drafts: Sequence[Draft], logits: Tensor, vocab_size: int, token_probs: list[TokenProbs]) -> None:
    """Add one token to each draft. logits: [len(drafts), V'], cut or padded to vocab_size. token_probs: the distributions of the tokens
    drawn so far; those of the tokens drawn here are appended."""
    rows = [draft.row._replace(drafted=list(draft.ids)) for draft in drafts]
    append_choices(drafts, rows, fit_vocabulary(logits, vocab_size), token_probs)


def append_choices(drafts: Sequence[Draft], rows: Sequence[Row], logits: Tensor, token_probs: list[TokenProbs]) -> None:
    """Append the token that each row chooses to the draft of the same index. The rows of one draft are in the order of its places.
    logits: [R, V]. token_probs: as in extend."""
    certain = [i for i, row in enumerate(rows) if not row.spec.draws]
    if certain:
        choice = choose(select(logits, certain), [rows[i] for i in certain])
        for r, (i, token) in enumerate(zip(certain, choice.ids, strict=True)):
            drafts[i].append(token, CERTAIN, row_failed=r in choice.failed)
    for group in sampled_groups(rows):
        if rows[group[0]].spec.draws:
            _sample(drafts, rows, group, logits, token_probs)


def _sample(
    drafts: Sequence[Draft], rows: Sequence[Row], group: list[int], logits: Tensor, token_probs: list[TokenProbs]
) -> None:
    group_rows = [rows[i] for i in group]
    group_logits, failed = adjusted(select(logits, group), group_rows)
    probs = token_probs_of(group_logits, group_rows)
    ids, not_a_distribution = checked_ids(pick(probs, group_rows)[0])
    first = num_prob_rows(token_probs)
    token_probs.append(probs)
    for r, (i, token) in enumerate(zip(group, ids, strict=True)):
        drafts[i].append(token, first + r, row_failed=r in failed or r in not_a_distribution)


def fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits over the target's ids: padding columns are cut, and missing ones are -inf, so that they are never drafted."""
    width = logits.shape[1]
    if width >= vocab_size:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, vocab_size - width), value=-torch.inf)


def num_prob_rows(token_probs: Sequence[TokenProbs]) -> int:
    return sum(part.probs.shape[0] for part in token_probs)


def take_generated(
    drafts: Sequence[Draft], generated: Generated, specs: Sequence[DrawSpec], token_probs: list[TokenProbs]
) -> None:
    """Set each draft to the tokens that a model generated for it, as far as the text's constraint allows. specs: those the model
    generated with."""
    first, offset = num_prob_rows(token_probs), 0  # where this draft's rows begin among those of this call
    for draft, ids, spec in zip(drafts, generated.ids, specs, strict=True):
        draft.ids = held(draft.row, ids, generated.token_probs if spec.is_drawn else None, offset)
        draft.prob_rows = [first + offset + i if spec.is_drawn else CERTAIN for i in range(len(draft.ids))]
        offset += len(spec.uniforms)
    if generated.token_probs is not None:
        token_probs.append(generated.token_probs)


def is_written(draft: Draft, *, adjusts: bool) -> bool:
    """Whether a model can write the whole draft in one call, except for what a constraint forbids. adjusts: whether the model applies
    DrawSpec.adjustments."""
    sampler = draft.request.sampler
    if not sampler.has_logits_processors:
        return True
    return adjusts and sampler.has_adjustments(draft.request.tokens, draft.max_len)


def as_proposal(drafts: Sequence[Draft], token_probs: list[TokenProbs]) -> Proposal:
    probs = joined(token_probs) if token_probs else None
    parents = trees_of([draft.parents for draft in drafts])
    return Proposal.of([draft.ids for draft in drafts], [draft.prob_rows for draft in drafts], probs, parents)
