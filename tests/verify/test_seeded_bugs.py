"""Tests of the tests: every seeded bug must break a law that holds without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import foredraft.drafters.draft_model as draft_model_module
import foredraft.sampling.noise as noise_module
import foredraft.verify as verification
import foredraft.verify.law as law_module
from foredraft.certificate.controls import stops_at_first_failure, token_residual, uncapped_scale
from foredraft.engine.cache import KVCache, Region
from foredraft.engine.engine import Engine
from foredraft.engine.sequence import TokenSequence
from foredraft.model import LanguageModel
from foredraft.sampling import Choice, Row, Sampler, SamplingParams, pick
from foredraft.sampling.token_probs import inverse_cdf
from foredraft.verify import Case, OutcomeLaw, Rule, next_weights, walk
from tests.laws import (
    BROKEN,
    EXACT,
    Toy,
    dense_law,
    growth_violations,
    impossible_draws,
    invisibility_violations,
    kept_noise_violations,
    law_error,
    one_hot,
    prefix_violations,
    random_laws,
    run_audited,
    toy,
    walk_law_error,
    walk_violations,
)

RATIO_RULES = ["block", "rejection"]
PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}


def case() -> Toy:
    """Laws far enough apart, and near enough, that every branch of every rule is taken."""
    return toy(random_laws(21, 1.5), random_laws(22, 1.5), depth=2)


# --- verification -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_no_residual(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def from_p(c: Case, law: OutcomeLaw, stop: Tensor) -> Tensor:
        return c.p[torch.arange(len(stop)), stop]

    assert law_error(case(), rule) <= EXACT
    monkeypatch.setattr(law_module, "next_weights", from_p)
    assert law_error(case(), rule) > BROKEN


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_residual_with_p_and_q_exchanged(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def exchanged(c: Case, law: OutcomeLaw, stop: Tensor) -> Tensor:
        rows = torch.arange(len(stop))
        right = next_weights(c, law, stop)
        wrong = (c.q[rows, stop.clamp(max=c.q.shape[1] - 1)] - c.p[rows, stop]).clamp(min=0)
        return torch.where((stop < c.lens)[:, None], wrong, right)

    monkeypatch.setattr(law_module, "next_weights", exchanged)
    assert law_error(case(), rule) > BROKEN


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_bonus_from_the_wrong_column(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def early(c: Case, law: OutcomeLaw, stop: Tensor) -> Tensor:
        bonus = c.p[torch.arange(len(stop)), (c.lens - 1).clamp(min=0)]
        return torch.where((stop == c.lens)[:, None], bonus, next_weights(c, law, stop))

    monkeypatch.setattr(law_module, "next_weights", early)
    assert law_error(case(), rule) > BROKEN


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_bonus_from_the_last_column_of_the_padded_batch(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a ragged batch shows it."""

    def padded(c: Case, law: OutcomeLaw, stop: Tensor) -> Tensor:
        return torch.where((stop == c.lens)[:, None], c.p[:, -1], next_weights(c, law, stop))

    monkeypatch.setattr(law_module, "next_weights", padded)
    only_full: list[Callable[[tuple[int, ...]], int]] = [lambda _: 2]
    assert law_error(case(), rule, only_full) <= EXACT
    assert law_error(case(), rule) > BROKEN


@pytest.mark.parametrize("bug", [stops_at_first_failure, token_residual, uncapped_scale])
def test_block_verification_with_a_mistake(bug: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """These are among those that a certificate has to reject."""
    assert law_error(case(), "block") <= EXACT
    monkeypatch.setattr(verification, "RULES", {"block": bug})
    assert law_error(case(), "block") > BROKEN


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_acceptance_of_everything(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_stand(c: Case) -> OutcomeLaw:
        stop = torch.nn.functional.one_hot(c.lens, c.p.shape[1]).to(c.p.dtype)
        return OutcomeLaw(stop, torch.ones_like(stop))

    monkeypatch.setattr(verification, "RULES", {rule: all_stand})
    assert law_error(case(), rule) > BROKEN


def test_acceptance_where_the_uniform_equals_the_ratio() -> None:
    """u <= p/q in place of u < p/q accepts a token of p = 0 where u is 0: no mass, so no law of mass sees it."""

    def at_or_below(weights: Tensor, uniforms: Tensor) -> Tensor:
        cumulated = weights.cumsum(-1)
        return torch.searchsorted(cumulated, uniforms[:, None] * cumulated[:, -1:], right=False)[:, 0]

    assert impossible_draws(inverse_cdf) == 0
    assert impossible_draws(at_or_below) > 0


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_draft_token_dropped_because_its_own_q_is_low(rule: str) -> None:
    honest = case()

    def drop(draft: tuple[int, ...]) -> int:
        return next((i for i, x in enumerate(draft) if float(honest.q[draft[:i]][x]) < 0.4), len(draft))

    assert law_error(honest, rule, [drop]) > BROKEN
    assert law_error(honest, rule, [lambda draft: min(drop(draft) + 1, len(draft))]) <= EXACT


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_softmax_q_for_a_greedy_draft(rule: str) -> None:
    """The drafter takes the argmax, and says it drew it."""
    honest = case()
    argmax = {x: one_hot(int(law.argmax())) for x, law in honest.q.items()}
    assert law_error(Toy(3, 2, honest.logits, honest.p, argmax), rule) <= EXACT
    assert law_error(Toy(3, 2, honest.logits, honest.p, argmax, named=honest.q), rule) > BROKEN


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_q_before_its_temperature(rule: str) -> None:
    honest = case()
    warped = {x: dense_law(law.log(), temperature=0.5) for x, law in honest.q.items()}
    assert law_error(Toy(3, 2, honest.logits, honest.p, warped, named=honest.q), rule) > BROKEN


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_laws_named_one_place_off(rule: str) -> None:
    honest = case()
    shifted = {x: honest.q[x[:-1]] for x in honest.q}
    assert law_error(Toy(3, 2, honest.logits, honest.p, honest.q, named=shifted), rule) > BROKEN


def test_certain_drafts_weighed_against_their_own_target_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk that goes on past the first token that does not stand, and one that takes the wrong column."""

    def counts_all(own: Tensor, ids: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(ids.shape[1])[None] < lens[:, None]
        n = ((own[:, : ids.shape[1]] == ids) & places).sum(1)
        return n, own.gather(1, n[:, None])[:, 0]

    def takes_last(own: Tensor, ids: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        return walk(own, ids, lens)[0], own.gather(1, lens[:, None])[:, 0]

    honest = case()
    q = {x: one_hot(sum(x) % 3) for x in honest.q}
    certain = Toy(3, 2, honest.logits, honest.p, q, certain=frozenset({0, 1}))
    assert walk_law_error(certain) <= EXACT
    for bug in (counts_all, takes_last):
        assert walk_violations(bug, 3, 2) > 0
        monkeypatch.setattr(verification, "walk", bug)
        assert walk_law_error(certain) > BROKEN


def test_greedy_that_is_not_one_hot(monkeypatch: pytest.MonkeyPatch) -> None:
    def sampled(logits: Tensor, rows: Sequence[Row], *, margins: bool = False) -> Choice:
        return Choice(torch.multinomial(torch.softmax(logits, -1), 1, generator=torch.Generator())[:, 0])

    assert invisibility_violations(case(), seeds=[None], temperature=0.0) == 0
    monkeypatch.setattr(verification, "choose", sampled)
    assert invisibility_violations(case(), seeds=[None], temperature=0.0) > 0


def test_seeded_rows_that_weigh_p_against_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lossless in distribution, but the text would depend on the draft."""
    assert invisibility_violations(case(), seeds=range(5)) == 0
    monkeypatch.setattr(verification, "_needs_ratio", lambda proposal, sampler, b: int(proposal.lens[b]) > 0)
    monkeypatch.setattr(SamplingParams, "verifier", property(lambda self: "block"))
    assert invisibility_violations(case(), seeds=range(5)) > 0


# --- noise and prefix ---------------------------------------------------------------------------------------------


def test_noise_indexed_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    right = noise_module.exponentials

    def by_rank(keys: Sequence[int], ids: Tensor) -> Tensor:
        return right(keys, torch.arange(ids.shape[-1]))

    assert kept_noise_violations(pick) == 0
    monkeypatch.setattr(noise_module, "exponentials", by_rank)
    assert kept_noise_violations(pick) > 0


def test_noise_of_a_state_instead_of_a_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draw takes the next noise: rows of rejected drafts use it up."""
    calls = iter(range(10**9))
    monkeypatch.setattr(Row, "noise_key", property(lambda self: hash((self.sampler.params.seed, next(calls)))))
    assert invisibility_violations(case(), seeds=range(5)) > 0


def test_penalties_that_do_not_see_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Sampler.warp
    law = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    loop = toy(lambda _: law, lambda _: law, depth=2)
    greedy: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 3.0}
    assert prefix_violations(PENALTIES) == 0
    assert invisibility_violations(loop, seeds=[None], **greedy) == 0
    monkeypatch.setattr(Sampler, "warp", lambda self, logits, history, drafted: right(self, logits, history, []))
    assert prefix_violations(PENALTIES) > 0
    assert invisibility_violations(loop, seeds=[None], **greedy) > 0


def test_counts_that_keep_a_rejected_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.sampling.counts.TokenCounts._remove", lambda self, token: None)
    assert prefix_violations(PENALTIES) > 0


@pytest.mark.parametrize(
    "params",
    [{"min_tokens": 3}, {"logits_processors": [lambda prefix, logits: logits - sum(prefix[-2:])]}],
    ids=["min", "own"],
)
def test_masks_and_processors_that_do_not_see_the_draft(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Sampler.warp
    assert prefix_violations(params, end_ids=[4], bad_words=[(5, 7)]) == 0
    monkeypatch.setattr(Sampler, "warp", lambda self, logits, history, drafted: right(self, logits, history, []))
    assert prefix_violations(params, end_ids=[4], bad_words=[(5, 7)]) > 0


# --- growth, cache, agreement -------------------------------------------------------------------------------------


def test_the_first_token_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TokenSequence.commit
    assert growth_violations() == 0
    monkeypatch.setattr(TokenSequence, "commit", lambda self, new_ids, n: right(self, new_ids[1:] or new_ids, n))
    assert growth_violations() > 0


MakeEngine = Callable[..., Engine]


def wrong_draft(vocab_size: int) -> Any:
    from foredraft.drafters import ScriptedDrafter

    return ScriptedDrafter(
        lambda request: [(request.tokens[-1] + 7 * i + 1) % vocab_size for i in range(request.max_len)]
    )


def audited_violations(make_engine: MakeEngine, num_steps: int) -> tuple[int, list[TokenSequence]]:
    engine = make_engine(wrong_draft(4096))
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    sequences = [engine.add(list(range(10, 10 + n)), greedy.resolve({})) for n in (3, 9, 20)]
    return run_audited(engine, sequences, num_steps), sequences


def test_rejected_tokens_kept_in_the_cache(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    count, sequences = audited_violations(make_engine, 4)
    assert count == 0
    assert {sequence.error for sequence in sequences} == {None}
    monkeypatch.setattr(
        Region, "keep_prefix_of", lambda self, wanted, at_most=None: max(0, len(wanted) - len(self.tokens))
    )
    assert audited_violations(make_engine, 1)[0] > 0
    _, sequences = audited_violations(make_engine, 2)
    # the pending token counts as read
    assert all("rows of logits are wanted of" in str(sequence.error) for sequence in sequences)


def self_draft_misses(make_engine: MakeEngine, target: LanguageModel, **params: Any) -> int:
    """How many draft tokens fall where the target drafts for itself: with shared noise, and greedily, none. Bit for bit
    where rows are exact, hence the embedded pair in bfloat16."""
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


def test_noise_one_position_off_between_draft_and_target(
    make_engine: MakeEngine, target: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Row):
        __slots__ = ()

        @property
        def position(self) -> int:
            return super().position + 1

    monkeypatch.setattr(draft_model_module, "Row", Late)
    assert self_draft_misses(make_engine, target, temperature=1.0, seed=4) > 0


def test_a_draft_model_that_never_reads_its_last_token(
    make_engine: MakeEngine, target: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hole after full acceptance: no distribution shows it, only the acceptance does."""
    right = KVCache.keep_prefix_of

    def with_a_hole(self: KVCache, seq_id: int, wanted: Sequence[int], at_most: int | None = None) -> int:
        before = self.num_held(seq_id)
        unread = right(self, seq_id, wanted, at_most)
        if unread == 2 and before == len(wanted) - 2:  # fully accepted: it is one behind
            self.region(seq_id).tokens.append(wanted[before])
        return unread

    monkeypatch.setattr(KVCache, "keep_prefix_of", with_a_hole)
    assert self_draft_misses(make_engine, target, temperature=1.0, seed=4) > 0


def test_the_laws_hold_without_a_bug() -> None:
    """What monkeypatching left behind would show here."""
    for rule in RATIO_RULES:
        assert law_error(case(), rule) <= EXACT
    assert invisibility_violations(case(), seeds=range(3)) == 0
    assert float(random_laws(1, 1)(()).sum()) == pytest.approx(1)
