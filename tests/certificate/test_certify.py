"""The whole certificate, on the embedded pair."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from foredraft import LLM, Certificate, Drafter, ForedraftError, SamplingParams, StructuredOutputs, check
from foredraft.certificate import Certification
from foredraft.certificate.betting import FALSE_ALARM, Bets, BettingCheck
from foredraft.certificate.controls import CONTROLS, Control, controls_for
from foredraft.certificate.distribution import EVERY_TOKEN, bet_on_texts, distribution_check
from foredraft.certificate.identity import IdentityCheck
from foredraft.certificate.report import DRAWN, GREEDY, SAMPLED, SEEDED
from foredraft.certificate.setting import (
    BUDGET,
    DRAFT_LEN,
    MAX_TOKENS,
    NUM_TOKENS,
    PROMPTS,
    Deadline,
    Setting,
    measured,
    planned,
    setting_of,
    share_in_time,
)
from foredraft.certificate.verification import verification_check
from foredraft.drafters import REGISTRY, SELF_DRAFTS, ScriptedDrafter
from tests.draft_servers import remote_settings
from tests.heads.fitted_heads import fitted_settings
from tests.heads.random_heads import OWN_DRAFT_METHODS, head_settings
from tests.methods import all_methods


def passed(certificate: Certificate) -> None:
    assert certificate.passed, certificate.reason
    assert all(result.passed for result in certificate.checks)
    assert all(control.rejected for control in certificate.controls)
    json.dumps(certificate.as_dict(), allow_nan=False)


def names(certificate: Certificate) -> set[str]:
    return {control.name for control in certificate.controls}


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(set(REGISTRY) - {*OWN_DRAFT_METHODS, *SELF_DRAFTS}))
def test_every_drafter_passes_and_every_broken_verifier_is_rejected(method: str) -> None:
    llm = LLM(method=method, **remote_settings(method))
    certificate = check(llm, SamplingParams(max_tokens=96, temperature=0.8), budget=300.0)
    passed(certificate)
    expected = {control.name for control in CONTROLS if control.needs in ("", "rows in step") or method != "none"}
    expected -= {"counts ahead"}
    expected -= {"features one off"}
    if method != "draft_model":
        expected -= {control.name for control in CONTROLS if control.needs in ("sampled", "block", "deep")}
        expected -= {"noise again"} if method != "none" else set()
    assert names(certificate) == expected
    if method == "draft_model":
        assert {result.name for result in certificate.checks} >= {"verification", "distribution"}


@pytest.mark.slow
@pytest.mark.parametrize("method", [*OWN_DRAFT_METHODS, *SELF_DRAFTS])
def test_no_check_fails_with_other_drafts(method: str) -> None:
    """These heads are not trained, nor is the draft to read mask tokens. Faults that show only in accepted drafts would need a larger
    budget."""
    settings: dict[str, Any] = {}
    if method in OWN_DRAFT_METHODS:
        settings = head_settings(method) if method in ("peagle", "dflash", "pard") else fitted_settings(method)
    llm = LLM(method=method, **settings)
    certificate = check(llm, SamplingParams(max_tokens=96, temperature=0.8), budget=20.0)
    assert all(result.passed for result in certificate.checks)
    assert {result.name for result in certificate.checks} >= {"identity", "teacher-forced", "distribution"}
    assert any(control.rejected for control in certificate.controls)


@pytest.mark.parametrize("method", all_methods(["eagle", "medusa", "eagle+suffix"]))
def test_a_head_that_reports_q_of_features_one_off_is_rejected(method: str) -> None:
    """The head itself is not rejected on as many tokens. Random heads have a nearly flat q, which hardly affects texts. A head that
    takes turns with a lookup drafts only half of the tokens."""
    llm = LLM(method=method, **head_settings(method.partition("+")[0]))
    num_tokens = 1200 if "+" in method else 600
    setting = measured(setting_of(llm, SamplingParams(max_tokens=24, temperature=0.8), PROMPTS[:3], 200.0, num_tokens))
    sampled = distribution_check(setting)
    run = sampled.run()
    assert run.results[0].passed
    assert run.num_by_heads > 0
    assert broken("features one off") in controls_for(SAMPLED, run, setting.params_of(SAMPLED))[0]
    assert is_rejected(sampled, broken("features one off"))


@pytest.mark.slow
def test_a_users_own_drafter_passes() -> None:
    drafter: Drafter = ScriptedDrafter(lambda request: list(request.tokens[-8:]), corrupt_every=5)
    certificate = check(LLM(method=drafter), SamplingParams(max_tokens=24, temperature=1.0, top_p=0.95), budget=200.0)
    passed(certificate)
    assert certificate.method == "ScriptedDrafter"


@pytest.mark.slow
def test_penalties_masks_and_float32_pass() -> None:
    params = SamplingParams(max_tokens=20, temperature=0.9, top_k=40, repetition_penalty=1.2, min_tokens=4)
    certificate = check(LLM(method="ngram", dtype="float32"), params, budget=200.0)
    passed(certificate)
    assert not certificate.row_exact
    assert certificate.tie > 0


def quick(llm: LLM, **params: Any) -> Certification:
    """A certificate of four prompts and short texts."""
    chosen = SamplingParams(**{"max_tokens": 24, "temperature": 0.8, **params})
    return Certification(setting_of(llm, chosen, PROMPTS[:4], 200.0, 600), lambda _: None)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM()


def test_at_temperature_zero_checks_of_draws_are_left_out(llm: LLM) -> None:
    certificate = quick(llm, temperature=0.0).run()
    passed(certificate)
    assert {result.kind for result in certificate.checks} == {GREEDY, f"{GREEDY}, auto"}
    assert any("nothing is drawn" in line for line in certificate.left_out)
    assert certificate.false_alarm == 0.0


@pytest.mark.parametrize("kind", [GREEDY, SEEDED])
def test_the_identity_check_rejects_its_controls(llm: LLM, kind: str) -> None:
    setting = measured(setting_of(llm, SamplingParams(max_tokens=64, temperature=0.8), PROMPTS[:4], 200.0, 600))
    test = IdentityCheck(setting, kind)
    run = test.run()
    assert all(result.passed for result in run.results)
    controls, _ = controls_for(kind, run, setting.params_of(kind))
    assert controls
    assert [control.name for control in controls if not is_rejected(test, control)] == []


def test_drafts_are_tested_whatever_the_policy_chooses(llm: LLM) -> None:
    certificate = quick(llm, temperature=0.0).run()
    assert certificate.speculative_tokens == DRAFT_LEN
    assert all(result.num_drafted for result in certificate.checks if result.kind == GREEDY)
    drafted_by_choice = any(result.num_drafted for result in certificate.checks if result.kind != GREEDY)
    assert drafted_by_choice != any("policy chooses" in line for line in certificate.left_out)


def test_a_fixed_number_is_requested_from_the_first_drafter_only(llm: LLM) -> None:
    several = llm.with_drafter("suffix+draft_model", 3)
    setting = setting_of(several, None, PROMPTS, 60.0, 600)
    assert (setting.gamma, setting.drafters, setting.is_auto) == (3, ["suffix"], False)
    auto = setting_of(several, SamplingParams(speculative_tokens="auto"), PROMPTS, 60.0, 600)
    assert (auto.gamma, auto.drafters, auto.is_auto) == (DRAFT_LEN, ["suffix", "draft_model"], True)


@pytest.mark.slow
def test_several_drafters_are_tested_in_turn(llm: LLM) -> None:
    certificate = check(
        llm.with_drafter("suffix+draft_model"), SamplingParams(max_tokens=96, temperature=0.8), budget=300.0
    )
    passed(certificate)
    assert {result.kind for result in certificate.checks} >= {GREEDY, SEEDED, SAMPLED, DRAWN}
    assert names(certificate) >= {control.name for control in CONTROLS} - {
        "counts ahead", "noise again", "features one off",
    }  # fmt: skip
    assert certificate.false_alarm == 2 * FALSE_ALARM
    assert "in turn" in certificate.drafts


def test_a_control_that_is_not_rejected_makes_it_inconclusive(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from foredraft.certificate import controls
    from foredraft.verify import verify

    monkeypatch.setattr(controls, "CONTROLS", (replace(controls.CONTROLS[0], verifier=verify),))
    certificate = quick(llm, temperature=0.0).run()
    assert (certificate.verdict, certificate.passed) == ("inconclusive", False)
    assert certificate.reason is not None
    assert "accept all" in certificate.reason


def test_a_broken_engine_fails(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults of the engine itself, except in plain decoding, are found by the checks."""
    from foredraft.certificate import texts
    from foredraft.verify.mutations import accepts_everything

    monkeypatch.setattr(texts, "verify", accepts_everything)
    certificate = quick(llm, temperature=0.0).run()
    assert certificate.verdict == "failed"
    assert certificate.reason is not None
    assert "identity" in certificate.reason


def test_the_llm_is_not_changed(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0)
    before = llm.generate("def area(r):", params)[0].outputs[0].token_ids
    used = llm.engine.pool.used
    passed(quick(llm, temperature=0.0).run())
    assert llm.engine.pool.used <= used
    assert llm.generate("def area(r):", params)[0].outputs[0].token_ids == before


def test_unsupported_parameters_are_refused(llm: LLM) -> None:
    for settings in ({"budget": 0.0}, {"prompts": []}, {"num_tokens": 0}):
        with pytest.raises(ForedraftError):
            check(llm, **settings)  # type: ignore[arg-type]
    stream = llm.stream("def area(r):", SamplingParams(max_tokens=50))
    next(stream)
    with pytest.raises(ForedraftError, match="running"):
        check(llm)
    stream.close()


def broken(name: str) -> Control:
    return next(control for control in CONTROLS if control.name == name)


def is_rejected(test: IdentityCheck | BettingCheck, control: Control) -> bool:
    result = test.reject(control)
    return result is not None and result.rejected


def at_the_default_budget(method: str, **params: Any) -> Setting:
    """The work that `check` plans, without a deadline, since the machine may be busy."""
    chosen = SamplingParams(**{"max_tokens": MAX_TOKENS, "temperature": 0.8, **params})
    setting = measured(setting_of(LLM(method=method), chosen, PROMPTS, BUDGET, NUM_TOKENS))
    assert not setting.left_out
    return replace(setting, deadline=Deadline(3600.0))


@pytest.mark.slow
def test_small_or_late_faults_are_rejected() -> None:
    """A residual that is wrong after three tokens, a q whose temperature is off by 2 %, noise reused in the next step, and keys and
    values that are stale after 68 tokens."""
    setting = at_the_default_budget("draft_model")
    for kind in (GREEDY, SEEDED):
        test = IdentityCheck(setting, kind)
        assert all(result.passed for result in test.run().results)
        assert is_rejected(test, broken("stale far on"))
    sampled = distribution_check(setting)
    assert sampled.run().results[0].passed
    assert is_rejected(sampled, broken("noise again"))
    drawn = verification_check(setting, sampled.texts)
    assert drawn is not None
    assert drawn.run().results[0].passed
    for name in ("late residual", "warmer q"):
        assert is_rejected(drawn, broken(name)), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "temperature"), [("draft_model", 0.8), ("suffix+draft_model", 1.5)], ids=["grown", "merged"]
)
def test_with_trees_each_broken_verifier_of_sampled_texts_is_rejected(method: str, temperature: float) -> None:
    llm = LLM(method=method, speculative_token_tree=[[0], [1], [0, 0], [0, 1], [1, 0]])
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature)
    setting = replace(measured(setting_of(llm, params, PROMPTS, BUDGET, NUM_TOKENS)), deadline=Deadline(3600.0))
    sampled = distribution_check(setting)
    run = sampled.run()
    assert run.results[0].passed
    controls, _ = controls_for(SAMPLED, run, setting.params_of(SAMPLED))
    assert {"stale cache", "one too many", "lost token"} <= {control.name for control in controls}
    assert [control.name for control in controls if not is_rejected(sampled, control)] == []


@pytest.mark.slow
def test_reusing_noise_in_plain_decoding_is_rejected() -> None:
    setting = at_the_default_budget("none")
    test = distribution_check(setting)
    assert test.run().results[0].passed
    assert is_rejected(test, broken("noise again"))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize(
    "form",
    [
        {"regex": r"(the cat of the day is [a-z ]{3,10}; ){2}"},
        {"choice": ["yes", "no, never"]},
        {"json": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}},
        {"grammar": 'start: "one " ("two " | "three ")~1..3 "four"'},
    ],
    ids=lambda form: next(iter(form)),
)
def test_constrained_texts_are_checked(method: str, form: dict[str, Any]) -> None:
    """With forced tokens, drafts that the grammar cuts, and an independent walk through the grammar."""
    params = SamplingParams(max_tokens=40, temperature=0.8, structured_outputs=StructuredOutputs(**form))
    setting = measured(setting_of(LLM(method=method), params, PROMPTS[:3], 200.0, 300))
    for test in (
        IdentityCheck(setting, GREEDY),
        IdentityCheck(setting, SEEDED),
        distribution_check(setting),
    ):
        run = test.run()
        assert run.num_drafted
        assert [result.detail for result in run.results if not result.passed] == []


def test_a_token_that_the_grammar_refuses_is_impossible() -> None:
    """The check walks through the grammar itself, independently of the engine's walk."""
    form = StructuredOutputs(regex="[a-z ]{60}")
    params = SamplingParams(max_tokens=20, temperature=0.8, structured_outputs=form)
    setting = measured(setting_of(LLM(method="ngram"), params, PROMPTS[:2], 200.0, 100))
    (text, *_) = setting.trial().write(PROMPTS[:1], setting.params_of(SAMPLED))
    wrong = setting.llm.text_tokenizer.encode("7")[-1]
    changed = text._replace(tokens=[*text.tokens[:-3], wrong, *text.tokens[-2:]])
    good, bad = Bets(EVERY_TOKEN), Bets(EVERY_TOKEN)
    bet_on_texts(good, setting.llm.target, [text], setting.noise)
    bet_on_texts(bad, setting.llm.target, [changed], setting.noise)
    assert good.num_impossible == 0
    assert bad.num_impossible >= 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GREEDY, SEEDED])
def test_counting_forced_tokens_too_early_is_rejected(kind: str) -> None:
    """With a grammar that forces tokens and a penalty, drafts contain tokens that the penalty must not count yet. The drafter copies, so
    only the verifier counts tokens."""
    form = StructuredOutputs(regex=r"(name of the [a-z ]{3,8}: the cat of the day is [a-z ]{3,10}; ){4}")
    params = SamplingParams(max_tokens=64, temperature=0.8, frequency_penalty=-0.5, structured_outputs=form)
    setting = measured(setting_of(LLM(method="ngram"), params, PROMPTS[:4], 200.0, 300))
    test = IdentityCheck(setting, kind)
    run = test.run()
    assert all(result.passed for result in run.results)
    assert broken("counts ahead") in controls_for(kind, run, setting.params_of(kind))[0]
    assert is_rejected(test, broken("counts ahead"))


@pytest.mark.slow
def test_all_parameters_of_generate_are_accepted(llm: LLM) -> None:
    """Each kind of text keeps the parameters that shape it."""
    params = SamplingParams(
        n=3, max_tokens=24, temperature=0.8, top_p=0.95, top_k=60, min_p=0.01, repetition_penalty=1.1,
        presence_penalty=0.3, frequency_penalty=0.2, logit_bias={5: -1.0}, bad_words=["cat"], min_tokens=30 - 8,
        stop=[". The"], stop_token_ids=[7], logits_processors=[lambda prefix, logits: logits * (1 + len(prefix) % 2 / 8)],
        prefix_caching=False,
    )  # fmt: skip
    setting = measured(setting_of(llm.with_drafter("ngram"), params, PROMPTS[:2], 200.0, 100))
    assert not setting.left_out
    assert setting.num_copies == 4
    for kind in (GREEDY, SEEDED, SAMPLED):
        asked = setting.params_of(kind)
        for name in (
            "stop",
            "stop_token_ids",
            "logit_bias",
            "bad_words",
            "min_tokens",
            "frequency_penalty",
            "prefix_caching",
        ):
            assert getattr(asked, name) == getattr(params, name), name
    for test in (
        IdentityCheck(setting, GREEDY),
        IdentityCheck(setting, SEEDED),
        distribution_check(setting),
    ):
        assert [result.detail for result in test.run().results if not result.passed] == []


def test_work_is_planned_by_the_budget_not_by_the_clock(llm: LLM) -> None:
    """A larger budget plans more work, up to a maximum, and what a small budget leaves out is reported."""
    params = SamplingParams(max_tokens=96, temperature=0.8)
    plans = [
        planned(setting_of(llm, params, PROMPTS, budget, NUM_TOKENS), rate=500.0) for budget in (2.0, 20.0, 2000.0)
    ]
    work = [(plan.length * len(plan.prompts), plan.num_tokens, plan.num_draws) for plan in plans]
    assert work == sorted(work)
    assert work[-1] == (96 * len(PROMPTS), NUM_TOKENS, 900_000)
    assert plans[0].left_out
    assert not plans[-1].left_out


@pytest.mark.parametrize(
    ("wall", "processor", "share"), [(1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (1.5, 1.0, 1.0), (3.0, 1.0, 0.5)]
)
def test_a_machine_slower_than_the_overtime_allows_gets_less_work(wall: float, processor: float, share: float) -> None:
    assert share_in_time(wall, processor) == pytest.approx(share)


def test_a_slow_machine_does_not_cut_a_check_short(llm: LLM) -> None:
    """The clock only matters for the overtime."""
    setting = measured(setting_of(llm, SamplingParams(max_tokens=16, temperature=0.8), PROMPTS[:2], 100.0, 100))
    late = replace(setting, deadline=Deadline(100.0, began=time.perf_counter() - 140.0))
    test = IdentityCheck(late, GREEDY)
    assert all(result.passed for result in test.run().results)
    assert is_rejected(test, broken("accept all"))


def test_work_left_out_for_lack_of_time_is_reported(llm: LLM) -> None:
    certificate = Certification(
        replace(
            setting_of(llm, SamplingParams(max_tokens=16, temperature=0.0), PROMPTS[:2], 100.0, 100),
            deadline=Deadline(100.0, began=time.perf_counter() - 151.0),
        ),
        lambda _: None,
    ).run()
    assert certificate.verdict == "inconclusive"
    assert certificate.reason is not None
    [untested] = [line for line in certificate.left_out if "not fully tested within 150 s" in line]
    assert "accept all (greedy)" in untested
    num_untested = untested.count(",") + 1
    assert certificate.reason == f"time ran out before {num_untested} broken verifiers were tested: raise --budget"
    assert certificate.controls == []
