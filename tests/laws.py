"""The laws (docs/internals/exactness.md) as functions. Each runs production code and returns an error or a count of violations, so
that the tests of the laws (they hold) and the tests of the tests (a seeded bug breaks them) use the same check. What also tests
users' own drafters and rules is in `foredraft.testing`, and is re-exported here.

A *cut* is a function from a draft to how many of its tokens are proposed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import foredraft.verify as verification
import foredraft.verify.law as law_module
from foredraft.engine.engine import Engine
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import CERTAIN, Proposal, Verdict
from foredraft.engine.sequence import TokenSequence
from foredraft.model import LanguageModel, Read
from foredraft.sampling import (
    Bits,
    Choice,
    Pending,
    Row,
    Sampler,
    adjusted,
    choose,
    has_id,
    only_id,
    pending_choice,
    token_probs_of,
)
from foredraft.testing.rules import EXACT
from foredraft.testing.statistics import FALSE_ALARM, chi_square, independence
from foredraft.testing.toys import (
    Prefix,
    Toy,
    dense_law,
    one_hot,
    prefixes,
    random_laws,
    sampler_for,
    text_error,
    toy,
    toys,
)
from foredraft.verify import Case, OutcomeLaw, Verifier, mutations

__all__ = [
    "BROKEN",
    "EXACT",
    "FALSE_ALARM",
    "Cut",
    "Prefix",
    "Toy",
    "ToyConstraint",
    "adjusted_row",
    "cache_violations",
    "chi_square",
    "constrained",
    "dense_law",
    "draw_law",
    "expected_accepted",
    "growth_violations",
    "holds_exactly",
    "impossible_draws",
    "independence",
    "invisibility_violations",
    "kept_noise_violations",
    "law_error",
    "one_hot",
    "outcome_table",
    "plain_text",
    "prefix_violations",
    "prefixes",
    "random_laws",
    "run_audited",
    "same",
    "sampler_for",
    "some_ids",
    "text_error",
    "toy",
    "toys",
    "verifier_error",
    "walk_law_error",
    "walk_violations",
]

BROKEN = 1e-3
"""The least error that a seeded bug must cause in a law that otherwise holds to EXACT."""

Cut = Callable[[Prefix], int]


# --- toys ---------------------------------------------------------------------------------------------------------


class ToyConstraint:
    """A constraint given by the set of ids that may follow each output, for prompts of one token."""

    def __init__(self, may_follow: Callable[[Prefix], frozenset[int]]) -> None:
        self.may_follow = may_follow
        self.allows_drafts = True

    def allowed(self, history: Sequence[int], drafted: Sequence[int]) -> Bits:
        ids = self.may_follow((*history[1:], *drafted))
        return np.array([sum(1 << token for token in ids)], dtype=np.uint8)

    def num_allowed(self, history: Sequence[int], drafted: Sequence[int]) -> int:
        places = enumerate(drafted)
        wrong = (i for i, token in places if not has_id(self.allowed(history, drafted[:i]), token))
        return next(wrong, len(drafted))

    def forced(self, history: Sequence[int], drafted: Sequence[int], at_most: int) -> list[int]:
        found: list[int] = []
        while len(found) < at_most and (token := only_id(self.allowed(history, [*drafted, *found]))) is not None:
            found.append(token)
        return found


def some_ids(seed: int, vocab_size: int = 3) -> Callable[[Prefix], frozenset[int]]:
    """Allows a pseudorandom, non-empty set of ids after each prefix."""

    def may_follow(prefix: Prefix) -> frozenset[int]:
        which = hash((seed, *prefix)) % (2**vocab_size - 1) + 1
        return frozenset(token for token in range(vocab_size) if which >> token & 1)

    return may_follow


def constrained(case: Toy, constraint: ToyConstraint, *, told: bool = False) -> Toy:
    """The same target under a constraint. told: whether the drafter is under the constraint as well."""

    def given(laws: Mapping[Prefix, Tensor]) -> dict[Prefix, Tensor]:
        masked = {x: law.clone() for x, law in laws.items()}
        for x, law in masked.items():
            refused = [token for token in range(case.vocab_size) if token not in constraint.may_follow(x)]
            law[refused] = 0
            law /= law.sum()
        return masked

    q = given(case.q) if told else case.q
    return replace(case, p=given(case.p), q=q, settings={"constraint": constraint})


# --- law 1: the output has the target's distribution --------------------------------------------------------------


def law_error(case: Toy, rule: str, cuts: Sequence[Cut] | None = None, **changes: Any) -> float:
    """The largest error in the distribution of the emitted text, compared with the target's, through `verify` in float64.

    Every draft and every outcome is enumerated; the draw itself is integrated exactly. cuts: the ways to decide the draft's length;
    None takes every fixed length. All of them share one ragged batch.
    """
    if cuts is None:
        lengths = [n for n in range(1, case.depth + 1) if case.is_ratio((0,) * n)]
        cuts = [lambda _, n=n: n for n in lengths]  # type: ignore[misc]
    full = case.drafts()
    rows = [x[: cut(x)] for cut in cuts for x in full]
    table = outcome_table(case, rows, rule, **changes)
    worst = 0.0
    for index, _ in enumerate(cuts):
        emitted: dict[Prefix, float] = defaultdict(float)
        for draft, row, outcomes in zip(full, rows[index * len(full) :], table[index * len(full) :], strict=False):
            for num_accepted, token in outcomes.nonzero().tolist():
                emitted[(*row[:num_accepted], token)] += case.odds(draft) * float(outcomes[num_accepted, token])
        worst = max(worst, text_error(case, emitted))
    return worst


def expected_accepted(case: Toy, rule: str) -> float:
    """The exact mean number of accepted tokens of a full-depth draft."""
    drafts = case.drafts()
    table = outcome_table(case, drafts, rule)
    counts = torch.arange(table.shape[1], dtype=torch.float64)
    return sum(case.odds(x) * float((row.sum(-1) * counts).sum()) for x, row in zip(drafts, table, strict=True))


def outcome_table(
    case: Toy,
    drafts: Sequence[Prefix],
    rule: str,
    *,
    padding: tuple[int, int] = (0, CERTAIN),
    proposal: Proposal | None = None,
    **changes: Any,
) -> Tensor:
    """The exact distribution of each row's outcome. -> [B, depth + 1, V], probability of (number accepted, next id).

    Only the draw inside `verify` is replaced: first the draw's own distribution is measured, then each of its results is forced in
    turn to see which outcome follows. Rows without a draft take another code path; their table is the target's distribution at 0
    accepted tokens, so that cuts may include empty drafts. proposal: of these drafts; None makes one from the toy's own
    distributions.
    """
    params = {**case.params, "verification": rule, **changes}
    if proposal is None:
        ratio_rows = [b for b, draft in enumerate(drafts) if case.is_ratio(draft)]
    else:
        ratio_rows = [b for b in range(len(drafts)) if bool((proposal.prob_rows[b] != CERTAIN).any())]
    table = torch.zeros(len(drafts), case.depth + 1, case.vocab_size, dtype=torch.float64)
    laws: list[Tensor] = []

    def measure(c: Case, law: OutcomeLaw, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        laws.append(draw_law(original, c, law))
        return original(c, law, uniforms)

    original = verification.draw
    run = _Run(case, drafts, params, padding, proposal)
    with patch.object(verification, "draw", measure):
        run()
    for b, draft in enumerate(drafts):
        if b not in ratio_rows:
            assert not draft, "a row of certain drafts has no ratio: see walk_law_error"
            table[b, 0] = case.p[()]
    if not laws:
        return table
    (law,) = laws
    assert law.shape[0] == len(ratio_rows)
    for stop, column in product(range(law.shape[1]), range(law.shape[2])):
        share = law[:, stop, column]
        if not bool((share > 0).any()):
            continue
        forced = (torch.full_like(share, stop, dtype=torch.int64), torch.full_like(share, column, dtype=torch.int64))
        with patch.object(verification, "draw", lambda *_, forced=forced: forced):
            verdict = run()
        for b, mass in zip(ratio_rows, share.tolist(), strict=True):
            if mass > 0:
                table[b, verdict.num_accepted[b], verdict.next_ids[b]] += mass
    return table


class _Run:
    """A call of `verify` that can be repeated."""

    def __init__(
        self,
        case: Toy,
        drafts: Sequence[Prefix],
        params: Mapping[str, Any],
        padding: tuple[int, int] = (0, CERTAIN),
        proposal: Proposal | None = None,
        verifier: Verifier | None = None,
    ) -> None:
        samplers = [sampler_for(params, **case.settings)] * len(drafts)
        proposal = proposal or case.proposal(drafts, padding)
        self._verifier = verifier
        self._inputs = (case.target_rows(drafts), proposal, samplers, [(0,)] * len(drafts))

    def __call__(self) -> Verdict:
        return (self._verifier or verification.verify)(*self._inputs)


def draw_law(draw: Callable[..., tuple[Tensor, Tensor]], case: Case, law: OutcomeLaw) -> Tensor:
    """The exact distribution of a draw, [B, K+1, W], from the draw alone. An inverse CDF is monotonic in its uniform number, so each
    value's interval ends where the draw first gives a greater value. That edge is guessed from the weights and checked against the
    draw on both sides, or found by bisection where the guess is wrong."""
    batch, places, _ = case.p.shape
    gap = 2.0**-47

    def shares(weights: Tensor, result: int, first: Tensor | None, matters: Tensor) -> Tensor:
        """[B, n], the mass of each value. weights: [B, n], the guess. first: [B], the first uniform. matters: [B], whether to check."""

        def is_below(uniforms: Tensor, value: int) -> Tensor:
            inside = uniforms.clamp(0, 1 - 2.0**-53)
            drawn = draw(case, law, torch.stack([inside if first is None else first, inside], dim=1))[result]
            return (drawn <= value) & (uniforms < 1) | (uniforms <= 0)

        guesses = weights.cumsum(1) / weights.sum(1, keepdim=True)
        edges = [torch.zeros(batch, dtype=torch.float64)]
        for value in range(weights.shape[1] - 1):
            edge = guesses[:, value].nan_to_num(0.5)
            low, high = edge - gap, edge + gap
            if not bool((is_below(low, value) & ~is_below(high, value) | ~matters).all()):
                low, high = torch.zeros_like(edge), torch.ones_like(edge)
                while bool((high - low > gap).any()):
                    edge = (low + high) / 2
                    below = is_below(edge, value)
                    low, high = torch.where(below, edge, low), torch.where(below, high, edge)
            edges.append(edge.clamp(0, 1))
        edges.append(torch.ones(batch, dtype=torch.float64))
        return torch.diff(torch.stack(edges, dim=1), dim=1).clamp(min=0)

    stops = shares(law.stop, 0, None, torch.ones(batch, dtype=torch.bool))
    middles = stops.cumsum(1) - stops / 2
    parts = []
    for j in range(places):
        weights = law_module.next_weights(case, law, torch.full_like(case.lens, j))
        parts.append(stops[:, j, None] * shares(weights, 1, middles[:, j], stops[:, j] > 0))
    return torch.stack(parts, dim=1)


def verifier_error(case: Toy, rule: str, verifier: Verifier) -> float:
    """law_error for any verifier that is built on `verify`. Besides the draws of rules, it enumerates one token for each sequence that
    the verifier has the target choose or draws from a distribution. Every draft token must be sampled."""
    full = case.drafts()
    drafts = [x[:n] for n in range(1, case.depth + 1) for x in full]
    run = _Run(case, drafts, {**case.params, "verification": rule}, verifier=verifier)
    emitted: list[dict[Prefix, float]] = [defaultdict(float) for _ in range(case.depth)]
    for odds, verdict in _every_verdict(run, case.vocab_size):
        outcomes = zip(drafts, odds.tolist(), verdict.num_accepted, verdict.next_ids, strict=True)
        for b, (draft, mass, stop, token) in enumerate(outcomes):
            if mass > 0:
                emitted[b // len(full)][(*draft[:stop], token)] += mass * case.odds(full[b % len(full)])
    return max(text_error(case, texts) for texts in emitted)


def _every_verdict(run: _Run, vocab_size: int) -> Iterator[tuple[Tensor, Verdict]]:
    """Yields (the verdict's probability in each sequence [B], the verdict)."""
    laws: list[Tensor] = []

    def measure(c: Case, law: OutcomeLaw, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        laws.append(draw_law(original, c, law))
        return original(c, law, uniforms)

    original = verification.draw
    with patch.object(verification, "draw", measure):
        size = len(run().next_ids)
    law = laws[0] if laws else torch.ones(size, 1, 1, dtype=torch.float64)
    for stop, column in product(range(law.shape[1]), range(law.shape[2])):
        for token in range(vocab_size):
            choice = _ForcedChoice(token)
            with choice.patched(), patch.object(verification, "draw", _forced_draw(stop, column)):
                verdict = run()
            if choice.odds is None and token > 0:
                break  # the verifier chose no token
            yield law[:, stop, column] * (1 if choice.odds is None else choice.odds), verdict


def _forced_draw(stop: int, column: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def draw(case: Case, law: OutcomeLaw, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        return case.lens.clamp(max=stop), torch.full_like(case.lens, column)

    return draw


class _ForcedChoice:
    """Gives the same token wherever one is drawn outside a rule. odds: [B], the probability of that; None until one was drawn."""

    def __init__(self, token: int) -> None:
        self.odds: Tensor | None = None
        self._token = token

    def patched(self) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(patch.object(verification, "pending_choice", self._choice))
        stack.enter_context(patch.object(mutations, "inverse_cdf", self._inverse_cdf))
        return stack

    def _choice(self, logits: Tensor, rows: Sequence[Row], **options: Any) -> Pending[Choice]:
        if rows[0].sampler.is_greedy:
            return pending_choice(logits, rows, **options)
        probs = token_probs_of(adjusted(logits, rows).logits, rows).dense(logits.shape[1])
        return Pending.of(Choice(self._inverse_cdf(probs).tolist()))

    def _inverse_cdf(self, weights: Tensor, uniforms: Tensor | None = None) -> Tensor:
        assert self.odds is None, "one token for each sequence"
        self.odds = weights[:, self._token] / weights.sum(1)
        return torch.full((len(weights),), self._token)


# --- law 1 where rows only compare ids ----------------------------------------------------------------------------


def walk_law_error(case: Toy) -> float:
    """law_error for certain drafts of an unseeded request, whose target tokens are drawn independently of the draft. Every
    combination of the target's own tokens is enumerated."""
    (draft,) = case.drafts()
    emitted: dict[Prefix, float] = defaultdict(float)
    run = _Run(case, [draft], case.params)
    for own in case.texts():
        odds = math.prod(float(case.p[draft[:i]][token]) for i, token in enumerate(own))
        choice = Pending.of(Choice(list(own)))
        with patch.object(verification, "pending_choice", lambda *_, choice=choice, **__: choice):
            verdict = run()
        emitted[(*draft[: verdict.num_accepted[0]], verdict.next_ids[0])] += odds
    return text_error(case, emitted)


def walk_violations(
    walk: Callable[[Sequence[int], Sequence[int]], tuple[Sequence[int], int]], vocab_size: int, depth: int
) -> int:
    """How often the output is wrong, over every target text and every draft of every length. Right is the text as far as the draft
    agrees with it, and one token more; the target's tokens after the first rejection are arbitrary."""
    count = 0
    for text, draft, garbage in product(
        product(range(vocab_size), repeat=depth + 1), product(range(vocab_size), repeat=depth), range(vocab_size)
    ):
        common = next((i for i in range(depth) if text[i] != draft[i]), depth)
        for length in range(depth + 1):
            stood = min(common, length)
            own_ids = [text[i] if i <= stood else garbage for i in range(length + 1)]
            path, next_id = walk(own_ids, draft[:length])
            count += (list(path), next_id) != (list(range(stood)), text[stood])
    return count


def invisibility_violations(
    case: Toy, *, seeds: Sequence[int | None], verifier: Verifier | None = None, **params: Any
) -> int:
    """How many drafts change the text of a greedy (seeds [None], temperature 0) or seeded request from what the target writes token by
    token. Every draft of every length, sampled ones included, is in one batch."""
    drafts = [x[:n] for n in range(case.depth + 1) for x in product(range(case.vocab_size), repeat=n)]
    drafts = list(dict.fromkeys(drafts))
    count = 0
    for seed in seeds:
        samplers = [sampler_for({**params, "seed": seed}, **case.settings) for _ in drafts]
        text = plain_text(case, sampler_for({**params, "seed": seed}, **case.settings))
        rows, proposal = case.target_rows(drafts), case.proposal(drafts)
        verdict = (verifier or verification.verify)(rows, proposal, samplers, [(0,)] * len(drafts))
        for draft, n, token in zip(drafts, verdict.num_accepted, verdict.next_ids, strict=True):
            common = next((i for i, x in enumerate(draft) if x != text[i]), len(draft))
            count += (*draft[:n], token) != text[: common + 1]
    return count


def plain_text(case: Toy, sampler: Sampler) -> Prefix:
    """The text that the target writes alone, one token at a time."""
    text: Prefix = ()
    while len(text) <= case.depth:
        text = (*text, choose(case.logits[text][None], [Row(sampler, (0, *text))]).ids[0])
    return text


# --- the draw, the noise and the prefix ---------------------------------------------------------------------------


def impossible_draws(draw: Callable[[Tensor, Tensor], Tensor]) -> int:
    """How many draws of an inverse CDF have weight 0, with the uniform number at 0, near 1 and at every interval edge."""
    count = 0
    for weights in product((0.0, 0.25, 0.5, 1e-300), repeat=4):
        if not any(weights):
            continue
        law = torch.tensor([weights], dtype=torch.float64)
        borders = (law.cumsum(1) / law.sum()).clamp(max=1 - 2.0**-53)[0]
        uniforms = torch.cat([torch.tensor([0.0, 2.0**-53, 1 - 2.0**-53], dtype=torch.float64), borders])
        columns = draw(law.expand(len(uniforms), -1), uniforms)
        count += int((law[0, columns] == 0).sum())
    return count


def kept_noise_violations(pick: Callable[..., tuple[Tensor, Tensor | None]], num_seeds: int = 200) -> int:
    """How often a seeded draw from the kept ids differs from the draw from the same distribution over the whole vocabulary."""
    from foredraft.sampling import TokenProbs, token_probs_of

    generator = torch.Generator().manual_seed(0)
    count = 0
    for seed in range(num_seeds):
        row = Row(sampler_for({"seed": seed, "top_k": 5}), (0,))
        kept = token_probs_of(2 * torch.randn(1, 40, generator=generator, dtype=torch.float64), [row])
        assert kept.ids is not None
        count += int(pick(kept, [row])[0]) != int(pick(TokenProbs(kept.dense(40)), [row])[0])
    return count


def prefix_violations(params: Mapping[str, Any], **settings: Any) -> int:
    """How often a row's logits depend on more than its prefix, which may be split into history and draft anywhere. Histories and drafts
    that grow and rewind are compared with a new sampler. A history may contain tokens that a later one lacks: a drafter's history may
    end in tokens that are not committed yet."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(8, generator=generator, dtype=torch.float64)
    prompt, used = [1, 2, 2], sampler_for(params, prompt=[1, 2, 2], **settings)
    output = [2, 5, 5, 7, 1]
    count = 0
    for start in range(len(output) + 1):
        history = prompt + output[:start]
        for drafted in ([], output[start:], [7, 7, 7], output[start : start + 1], [6], [], [5, 6]):
            fresh = adjusted_row(sampler_for(params, prompt=prompt, **settings), logits, history + drafted)
            for split in ((history, drafted), (history + drafted, [])):
                count += not torch.equal(adjusted_row(used, logits, *split), fresh)
    return count


def adjusted_row(sampler: Sampler, logits: Tensor, history: Sequence[int], drafted: Sequence[int] = ()) -> Tensor:
    """The logits of one row before the temperature; the row must not fail. logits: [V] -> [V]"""
    out, failed = adjusted(logits[None], [Row(sampler, history, drafted)])
    assert not failed, failed
    return out[0]


# --- growth, cache, agreement of target and draft -----------------------------------------------------------------


def growth_violations() -> int:
    """How many verified blocks of up to 4 tokens do not reach the text whole and in order, where nothing ends the text."""
    count = 0
    for num_drafted in range(4):
        for num_accepted in range(num_drafted + 1):
            sequence = TokenSequence(0, [9, 8], sampler_for({}), max_len=50, speculative_tokens=4)
            for block in range(3):
                new = [10 * block + i for i in range(num_accepted + 1)]
                before = list(sequence.tokens)
                kept = sequence.commit(new, num_drafted)
                count += sequence.tokens != before + new or kept != len(new)
    return count


def cache_violations(engine: Engine, sequences: Sequence[TokenSequence]) -> int:
    """Law 3 between steps: for how many verified sequences the target's cache does not hold exactly history[:-1], or holds keys and
    values that differ from those of a fresh pass."""
    return sum(
        not holds_exactly(engine.model, engine.cache, s.seq_id, s.tokens[:-1])
        for s in sequences
        if s.num_output and not s.is_finished and s.num_preemptions == 0
    )


def holds_exactly(model: LanguageModel, cache: Any, seq_id: int, tokens: Sequence[int]) -> bool:
    """Whether a cache holds these tokens and the keys and values of a fresh pass over them, in every layer. Bit for bit where the
    model's rows are exact."""
    held = cache.region(seq_id)
    if list(held.tokens) != list(tokens):
        return False
    fresh = model.new_cache(MemoryPool(1 << 40))
    fresh.reserve(0, len(tokens))
    model.read([Read(0, list(tokens), 1)], fresh)
    return all(
        same(a, b, exact=model.traits.row_exact)
        for layer in fresh.region(0).layers
        for a, b in zip(held.layer(layer), fresh.region(0).layer(layer), strict=True)
    )


def same(a: Tensor, b: Tensor, *, exact: bool) -> bool:
    if exact:
        return torch.equal(a, b)
    tolerance = 1e-4 if a.dtype == torch.float32 else 5e-2
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def run_audited(engine: Engine, sequences: Sequence[TokenSequence], num_steps: int) -> int:
    """Step the engine, and count the cache violations after each step."""
    count = 0
    for _ in range(num_steps):
        if engine.has_work:
            engine.step()
            count += cache_violations(engine, sequences)
    return count
