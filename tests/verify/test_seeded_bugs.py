"""Tests of the tests: every seeded bug must break a law that holds without it. The broken verifiers, caches and drafters are those of
the certificate's catalogue; the other bugs are in single functions, and are patched in here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import foredraft.drafters._drafts as drafts_module
import foredraft.sampling.noise as noise_module
import foredraft.verify as verification
import foredraft.verify.law as law_module
from foredraft.certificate.controls import CONTROLS, Control
from foredraft.certificate.report import DRAWN, GREEDY, SAMPLED, SEEDED
from foredraft.drafters import ScriptedDrafter
from foredraft.drafters._drafts import Draft, as_proposal, extend
from foredraft.engine.cache import KVCache
from foredraft.engine.engine import Engine
from foredraft.engine.proposal import Drafter, DraftRequest, Proposal
from foredraft.engine.region import Region
from foredraft.engine.sequence import TokenSequence
from foredraft.model import LanguageModel
from foredraft.sampling import Row, Sampler, SamplingParams, TokenProbs, pick
from foredraft.sampling.token_probs import inverse_cdf
from foredraft.testing import DrafterContract
from foredraft.verify import Case, OutcomeLaw, Verifier, next_weights, verify, walk
from foredraft.verify.mutations import drops_unlikely_drafts
from tests.laws import (
    BROKEN,
    EXACT,
    FALSE_ALARM,
    Toy,
    growth_violations,
    impossible_draws,
    independence,
    invisibility_violations,
    kept_noise_violations,
    law_error,
    one_hot,
    prefix_violations,
    random_laws,
    run_audited,
    sampler_for,
    toy,
    verifier_error,
    walk_law_error,
    walk_violations,
)

MakeEngine = Callable[..., Engine]

RATIO_RULES = ["block", "rejection"]
PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}


def case() -> Toy:
    """Distributions that differ enough, and overlap enough, that every branch of every rule is taken."""
    return toy(random_laws(21, 1.5), random_laws(22, 1.5), depth=2)


# --- the catalogue of broken verifiers ----------------------------------------------------------------------------

BROKEN_DRAFTERS = [c for c in CONTROLS if c.drafter]
DRAWS = [
    c
    for c in CONTROLS
    if {SAMPLED, DRAWN} & set(c.kinds) and not c.target and not c.drafter and c.needs != "rows in step"
]
CHOICES = [(c, kind) for c in CONTROLS for kind in (GREEDY, SEEDED) if kind in c.kinds and not c.target]


FLAT = torch.full((3,), 1 / 3, dtype=torch.float64)


def case_for(control: Control) -> Toy:
    """A toy in which the bug shows: with long drafts, or with a first q of which no token is dropped, where the bug needs that."""
    size, depth = (2, 4) if control.needs == "deep" else (3, 2)
    p, q = random_laws(31, 1.5, vocab_size=size), random_laws(32, 1.5, vocab_size=size)
    if control.verifier is drops_unlikely_drafts:
        return toy(p, lambda prefix: q(prefix) if prefix else FLAT, depth=depth)
    return toy(p, q, vocab_size=size, depth=depth)


@pytest.mark.parametrize("control", DRAWS, ids=lambda control: control.name)
def test_a_broken_verifier_breaks_law_1(control: Control) -> None:
    toy_case = case_for(control)
    for rule in ["block"] if control.needs == "block" else RATIO_RULES:
        assert verifier_error(toy_case, rule, verify) <= EXACT
        assert verifier_error(toy_case, rule, control.verifier) > BROKEN


@pytest.mark.parametrize(("control", "kind"), CHOICES, ids=lambda x: x if isinstance(x, str) else x.name)
def test_a_broken_verifier_breaks_law_2(control: Control, kind: str) -> None:
    seeds: list[int | None] = [None] if kind == GREEDY else list(range(5))
    params: dict[str, Any] = {"temperature": 0.0} if kind == GREEDY else {}
    if control.needs == "penalties":
        params["frequency_penalty"] = 1.5
    assert invisibility_violations(case(), seeds=seeds, **params) == 0
    assert invisibility_violations(case(), seeds=seeds, verifier=control.verifier, **params) > 0


def test_reusing_noise_in_the_next_step_is_detected() -> None:
    """The tokens of consecutive steps must be independent."""

    def odds(verifier: Verifier) -> float:
        toy_case, sampler = case(), sampler_for({})
        rows, nothing = toy_case.target_rows([()]), toy_case.proposal([()])
        ids = [verifier(rows, nothing, [sampler], [(0,)]).next_ids[0] for _ in range(2000)]
        return independence(torch.tensor(ids[::2]), torch.tensor(ids[1::2]), toy_case.vocab_size)

    (control,) = (control for control in CONTROLS if control.needs == "rows in step")
    assert odds(verify) > FALSE_ALARM
    assert odds(control.verifier) < FALSE_ALARM


class WithSiblings:
    """Makes trees of a drafter's chains, with a wrong sibling before each token."""

    grows_trees = True

    def __init__(self, chains: Drafter) -> None:
        self._chains = chains

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        halved = [replace(request, max_len=request.max_len // 2) for request in requests]
        chains = self._chains.propose(halved).draft_ids
        ids = [[each for token in chain for each in (token ^ 1, token)] for chain in chains]
        return Proposal.certain(ids, [[i // 2 * 2 - 1 for i in range(len(row))] for row in ids])

    def forget(self, seq_ids: list[int]) -> None:
        self._chains.forget(seq_ids)


@pytest.mark.parametrize(
    ("control", "as_drafted"),
    [(c, lambda drafter: drafter) for c in CONTROLS if c.target]
    + [(c, WithSiblings) for c in CONTROLS if c.target and SAMPLED in c.kinds],
    ids=lambda x: getattr(x, "name", "trees" if x is WithSiblings else "chains"),
)
def test_a_broken_cache_breaks_law_3(
    control: Control, as_drafted: Callable[[Drafter], Drafter], make_engine: MakeEngine, target: LanguageModel
) -> None:
    """With drafts that are partly wrong, in texts that are long enough."""

    def violations(model: LanguageModel) -> int:
        drafts = ScriptedDrafter(lambda request: texts[request.seq_id][len(request.tokens) :], corrupt_every=9)
        engine = make_engine(as_drafted(drafts), model=model)
        greedy = SamplingParams(temperature=0.0, max_tokens=24, speculative_tokens=3 * width).resolve({})
        sequences = [engine.add(prompt, greedy) for prompt in prompts]
        texts.update({sequence.seq_id: text for sequence, text in zip(sequences, written, strict=True)})
        return run_audited(engine, sequences, 6)

    width = 2 if as_drafted is WithSiblings else 1
    prompts = [list(range(10, 10 + n)) for n in (5, 70)]
    written = plain_texts(make_engine, prompts)
    texts: dict[int, list[int]] = {}
    assert control.target is not None
    assert violations(target) == 0
    assert violations(control.target(target)) > 0


class ToyHead:
    """Draws draft token i from softmax(the newest token's features rotated by i), whatever the tokens before it are."""

    taps = (0,)

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        drafts = [Draft(request, request.max_len if request.has_all_features else 0) for request in requests]
        token_probs: list[TokenProbs] = []
        for draft in drafts:
            features = draft.request.features
            while draft.has_room:
                assert features is not None
                place = draft.request.num_forced + len(draft.ids)
                logits = 3 * features.since(len(features) - 1).roll(place, 1)
                extend([draft], logits, logits.shape[1], token_probs)
        return as_proposal(drafts, token_probs)

    def forget(self, seq_ids: list[int]) -> None:
        """There is no state to drop."""


class HeadContract(DrafterContract):
    vocab_size = feature_size = 16
    invisible = False

    def __init__(self, broken: Callable[[Drafter], Drafter] = lambda drafter: drafter) -> None:
        self._broken = broken

    def make_drafter(self, vocab_size: int) -> Drafter:
        return self._broken(ToyHead())


@pytest.mark.parametrize("control", BROKEN_DRAFTERS, ids=lambda control: control.name)
def test_a_broken_drafter_breaks_law_4(control: Control) -> None:
    """It is wrong at every token of a draft, not only at the first."""
    assert control.drafter is not None
    HeadContract().test_drawn_ids_come_from_the_law_they_name()
    broken = HeadContract(control.drafter)
    with pytest.raises(AssertionError, match="draft token 1 is not drawn from the distribution it names"):
        broken.test_drawn_ids_come_from_the_law_they_name()
    named, drawn_from = (next(contract._draws()) for contract in (broken, HeadContract()))
    assert named.draft_ids == drawn_from.draft_ids
    by_token = [
        proposal.token_probs.after(rows[place]).dense(16)[0]
        for place in range(3)
        for proposal, (rows,) in ((named, named.draft_prob_rows), (drawn_from, drawn_from.draft_prob_rows))
    ]
    assert not any(torch.equal(a, b) for a, b in zip(by_token[::2], by_token[1::2], strict=True))


def plain_texts(make_engine: MakeEngine, prompts: Sequence[list[int]]) -> list[list[int]]:
    engine = make_engine("none")
    sequences = [engine.add(p, SamplingParams(temperature=0.0, max_tokens=24).resolve({})) for p in prompts]
    while engine.has_work:
        engine.step()
    return [list(sequence.tokens) for sequence in sequences]


# --- verification -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_bonus_token_from_the_last_column_of_the_padded_batch_is_detected(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a ragged batch shows this bug."""

    def padded(c: Case, law: OutcomeLaw, stop: Tensor) -> Tensor:
        return torch.where((stop == c.lens)[:, None], c.p[:, -1], next_weights(c, law, stop))

    monkeypatch.setattr(law_module, "next_weights", padded)
    only_full: list[Callable[[tuple[int, ...]], int]] = [lambda _: 2]
    assert law_error(case(), rule, only_full) <= EXACT
    assert law_error(case(), rule) > BROKEN


def test_accepting_where_the_uniform_equals_the_ratio_is_detected() -> None:
    """u <= p/q instead of u < p/q accepts a token of p = 0 where u is 0. That has probability 0, so law 1 cannot detect it."""

    def at_or_below(weights: Tensor, uniforms: Tensor) -> Tensor:
        cumulated = weights.cumsum(-1)
        return torch.searchsorted(cumulated, uniforms[:, None] * cumulated[:, -1:], right=False)[:, 0]

    assert impossible_draws(inverse_cdf) == 0
    assert impossible_draws(at_or_below) > 0


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_draft_may_end_after_a_token_whose_own_q_is_low(rule: str) -> None:
    """The bug is in the catalogue: ending the draft before that token, which was already drawn."""
    honest = case()

    def end(draft: tuple[int, ...]) -> int:
        first = next((i for i, x in enumerate(draft) if float(honest.q[draft[:i]][x]) < 0.4), len(draft))
        return min(first + 1, len(draft))

    assert law_error(honest, rule, [end]) <= EXACT


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_naming_softmax_q_for_a_greedy_draft_is_detected(rule: str) -> None:
    """The drafter takes the argmax, but claims to have drawn it."""
    honest = case()
    argmax = {x: one_hot(int(law.argmax())) for x, law in honest.q.items()}
    assert law_error(Toy(3, 2, honest.logits, honest.p, argmax), rule) <= EXACT
    assert law_error(Toy(3, 2, honest.logits, honest.p, argmax, named=honest.q), rule) > BROKEN


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_naming_distributions_one_position_off_is_detected(rule: str) -> None:
    honest = case()
    shifted = {x: honest.q[x[:-1]] for x in honest.q}
    assert law_error(Toy(3, 2, honest.logits, honest.p, honest.q, named=shifted), rule) > BROKEN


def test_a_broken_walk_along_certain_drafts_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """One walk continues after the first rejected token, the other takes its last token from the wrong column."""

    def counts_all(own_ids: Sequence[int], draft_ids: Sequence[int], parents: None = None) -> tuple[range, int]:
        num_equal = sum(own == token for own, token in zip(own_ids, draft_ids, strict=False))
        return range(num_equal), own_ids[num_equal]

    def takes_last(own_ids: Sequence[int], draft_ids: Sequence[int], parents: None = None) -> tuple[Sequence[int], int]:
        return walk(own_ids, draft_ids)[0], own_ids[len(draft_ids)]

    honest = case()
    q = {x: one_hot(sum(x) % 3) for x in honest.q}
    certain = Toy(3, 2, honest.logits, honest.p, q, certain=frozenset({0, 1}))
    assert walk_law_error(certain) <= EXACT
    for bug in (counts_all, takes_last):
        assert walk_violations(bug, 3, 2) > 0
        monkeypatch.setattr(verification, "walk", bug)
        assert walk_law_error(certain) > BROKEN


def test_verifying_seeded_rows_by_ratio_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is lossless in distribution, but the text depends on the draft."""
    assert invisibility_violations(case(), seeds=range(5)) == 0
    monkeypatch.setattr(verification, "_needs_ratio", lambda proposal, sampler, b: int(proposal.lens[b]) > 0)
    monkeypatch.setattr(SamplingParams, "verifier", property(lambda self: "block"))
    assert invisibility_violations(case(), seeds=range(5)) > 0


# --- noise and prefix ---------------------------------------------------------------------------------------------


def test_noise_indexed_by_rank_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    right = noise_module.exponentials

    def by_rank(keys: Sequence[int], ids: Tensor) -> Tensor:
        return right(keys, torch.arange(ids.shape[-1]))

    assert kept_noise_violations(pick) == 0
    monkeypatch.setattr(noise_module, "exponentials", by_rank)
    assert kept_noise_violations(pick) > 0


def test_noise_by_call_instead_of_position_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """If every draw takes the next noise, rows of rejected drafts use it up."""
    calls = iter(range(10**9))
    monkeypatch.setattr(Row, "noise_key", property(lambda self: hash((self.sampler.params.seed, next(calls)))))
    assert invisibility_violations(case(), seeds=range(5)) > 0


def test_penalties_that_do_not_see_the_draft_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Sampler.warp
    law = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    loop = toy(lambda _: law, lambda _: law, depth=2)
    greedy: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 3.0}
    assert prefix_violations(PENALTIES) == 0
    assert invisibility_violations(loop, seeds=[None], **greedy) == 0
    monkeypatch.setattr(Sampler, "warp", lambda self, logits, history, drafted: right(self, logits, history, []))
    assert prefix_violations(PENALTIES) > 0
    assert invisibility_violations(loop, seeds=[None], **greedy) > 0


def test_counts_that_keep_a_rejected_draft_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.sampling.counts.TokenCounts._remove", lambda self, token: None)
    assert prefix_violations(PENALTIES) > 0


@pytest.mark.parametrize(
    "params",
    [{"min_tokens": 3}, {"logits_processors": [lambda prefix, logits: logits - sum(prefix[-2:])]}],
    ids=["min", "own"],
)
def test_masks_and_processors_that_do_not_see_the_draft_are_detected(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Sampler.warp
    assert prefix_violations(params, end_ids=[4], bad_words=[(5, 7)]) == 0
    monkeypatch.setattr(Sampler, "warp", lambda self, logits, history, drafted: right(self, logits, history, []))
    assert prefix_violations(params, end_ids=[4], bad_words=[(5, 7)]) > 0


# --- growth, cache, agreement -------------------------------------------------------------------------------------


def test_dropping_the_first_token_of_a_block_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TokenSequence.commit
    assert growth_violations() == 0
    monkeypatch.setattr(TokenSequence, "commit", lambda self, new_ids, n: right(self, new_ids[1:] or new_ids, n))
    assert growth_violations() > 0


def wrong_draft(vocab_size: int) -> Any:
    return ScriptedDrafter(
        lambda request: [(request.tokens[-1] + 7 * i + 1) % vocab_size for i in range(request.max_len)]
    )


def audited_violations(make_engine: MakeEngine, num_steps: int) -> tuple[int, list[TokenSequence]]:
    engine = make_engine(wrong_draft(4096))
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    sequences = [engine.add(list(range(10, 10 + n)), greedy.resolve({})) for n in (3, 9, 20)]
    return run_audited(engine, sequences, num_steps), sequences


def test_keeping_rejected_tokens_in_the_cache_is_detected(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, sequences = audited_violations(make_engine, 4)
    assert count == 0
    assert {sequence.error for sequence in sequences} == {None}
    monkeypatch.setattr(
        Region, "keep_prefix_of", lambda self, wanted, at_most=None: max(0, len(wanted) - len(self.tokens))
    )
    assert audited_violations(make_engine, 1)[0] > 0
    _, sequences = audited_violations(make_engine, 2)
    # the pending token counts as read
    assert all("rows of logits were requested for" in str(sequence.error) for sequence in sequences)


def self_draft_misses(make_engine: MakeEngine, target: LanguageModel, **params: Any) -> int:
    """The number of rejected draft tokens when the target drafts for itself: with shared noise, and greedily, 0. That needs exact rows,
    hence the embedded target in bfloat16."""
    engine = make_engine("draft_model", draft_model=target)
    chosen = SamplingParams(max_tokens=12, **params).resolve({})
    sequences = [engine.add([5, 900 + i, 77, 300], chosen, child=i) for i in range(3)]
    while engine.has_work:
        engine.step()
    assert all(s.num_output >= 1 for s in sequences)
    return engine.stats.num_evaluated_tokens - engine.stats.num_accepted_tokens


SELF_DRAFT: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.2, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("params", SELF_DRAFT, ids=str)
def test_a_target_that_drafts_for_itself_is_never_rejected(
    params: dict[str, Any], make_engine: MakeEngine, target: LanguageModel
) -> None:
    if not target.traits.row_exact:
        pytest.skip("this machine's kernels do not give exact rows")
    assert self_draft_misses(make_engine, target, **params) == 0


def test_noise_one_position_off_between_draft_and_target_is_detected(
    make_engine: MakeEngine, target: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Row):
        __slots__ = ()

        @property
        def position(self) -> int:
            return super().position + 1

    monkeypatch.setattr(drafts_module, "Row", Late)
    assert self_draft_misses(make_engine, target, temperature=1.0, seed=4) > 0


def test_a_draft_model_that_never_reads_its_last_token_is_detected(
    make_engine: MakeEngine, target: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hole after full acceptance changes no distribution, only the acceptance rate."""
    right = KVCache.keep_prefix_of

    def with_a_hole(self: KVCache, seq_id: int, wanted: Sequence[int], at_most: int | None = None) -> int:
        before = self.num_held(seq_id)
        unread = right(self, seq_id, wanted, at_most)
        if unread == 2 and before == len(wanted) - 2:  # fully accepted: the cache is one token behind
            self.region(seq_id).tokens.append(wanted[before])
        return unread

    monkeypatch.setattr(KVCache, "keep_prefix_of", with_a_hole)
    assert self_draft_misses(make_engine, target, temperature=1.0, seed=4) > 0


def test_the_laws_hold_without_a_bug() -> None:
    """This would fail if monkeypatching left anything behind."""
    for rule in RATIO_RULES:
        assert law_error(case(), rule) <= EXACT
    assert invisibility_violations(case(), seeds=range(3)) == 0
    assert float(random_laws(1, 1)(()).sum()) == pytest.approx(1)
