"""The whole certificate, on the embedded pair."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foredraft import LLM, Certificate, Drafter, ForedraftError, SamplingParams, check
from foredraft.certificate.betting import FALSE_ALARM
from foredraft.certificate.by_identity import IdentityTest
from foredraft.certificate.certify import Check, setting_of
from foredraft.certificate.controls import CONTROLS, DRAWN, GREEDY, SAMPLED, SEEDED, Seen, applying
from foredraft.certificate.prompts import PROMPTS
from foredraft.certificate.setting import DRAFT_LEN, measured
from foredraft.certificate.trial import Subject
from foredraft.drafters import REGISTRY, ScriptedDrafter

DRAWN_DRAFTS = {"draft_model", "self-int8"}


def passed(found: Certificate) -> None:
    assert found.passed, found.reason
    assert all(one.passed for one in found.checks)
    assert all(control.rejected for control in found.controls)
    json.dumps(found.as_dict(), allow_nan=False)


def names(found: Certificate) -> set[str]:
    return {control.name for control in found.controls}


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(REGISTRY))
def test_every_drafter_passes_and_every_broken_verifier_is_rejected(method: str) -> None:
    found = check(LLM(method=method), SamplingParams(max_tokens=32, temperature=0.8), budget=150.0)
    passed(found)
    expected = {control.name for control in CONTROLS if not control.needs or method != "none"}
    if method not in DRAWN_DRAFTS:
        expected -= {control.name for control in CONTROLS if control.needs in ("sampled", "block")}
    assert names(found) == expected
    if method in DRAWN_DRAFTS:
        assert {one.name for one in found.checks} >= {"verification", "distribution"}


@pytest.mark.slow
def test_a_drafter_of_the_users_own_passes() -> None:
    drafter: Drafter = ScriptedDrafter(lambda request: list(request.tokens[-8:]), corrupt_every=5)
    found = check(LLM(method=drafter), SamplingParams(max_tokens=24, temperature=1.0, top_p=0.95), budget=60.0)
    passed(found)
    assert found.method == "ScriptedDrafter"


@pytest.mark.slow
def test_penalties_masks_and_float32_pass() -> None:
    params = SamplingParams(max_tokens=20, temperature=0.9, top_k=40, repetition_penalty=1.2, min_tokens=4)
    found = check(LLM(method="ngram", dtype="float32"), params, budget=60.0)
    passed(found)
    assert not found.row_exact
    assert found.tie > 0


def quick(llm: LLM, **params: Any) -> Check:
    """A certificate of four prompts and short texts."""
    chosen = SamplingParams(**{"max_tokens": 24, "temperature": 0.8, **params})
    return Check(setting_of(llm, chosen, PROMPTS[:4], 60.0, 600), lambda _: None)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM()


def test_temperature_zero_leaves_out_what_is_drawn(llm: LLM) -> None:
    found = quick(llm, temperature=0.0).run()
    passed(found)
    assert {one.kind for one in found.checks} == {GREEDY, f"{GREEDY}, auto"}
    assert any("nothing is drawn" in line for line in found.left_out)
    assert found.false_alarm == 0.0


@pytest.mark.parametrize("kind", [GREEDY, SEEDED])
def test_identity_and_the_forced_check_reject_what_is_broken(llm: LLM, kind: str) -> None:
    setting, _ = measured(setting_of(llm, SamplingParams(max_tokens=24, temperature=0.8), PROMPTS[:4], 60.0, 600))
    test = IdentityTest(setting, Subject(llm), kind)
    found = test.run()
    assert all(one.passed for one in found.results)
    seen = Seen(found.num_drafted, found.num_sampled, "block", setting.gamma)
    controls = applying(kind, seen)
    assert controls
    subjects = {
        one.name: Subject(llm, one.verifier, one.target(llm.target) if one.target else None) for one in controls
    }
    assert [name for name, subject in subjects.items() if test.reject(subject, 60.0).by is None] == []


def test_drafts_are_tested_whatever_the_policy_chooses(llm: LLM) -> None:
    found = quick(llm, temperature=0.0).run()
    assert found.speculative_tokens == DRAFT_LEN
    assert all(one.num_drafted for one in found.checks if one.kind == GREEDY)
    drafted_by_choice = any(one.num_drafted for one in found.checks if one.kind != GREEDY)
    assert drafted_by_choice != any("policy chooses" in line for line in found.left_out)


def test_a_fixed_number_is_asked_of_the_first_drafter_only(llm: LLM) -> None:
    several = llm.with_drafter("suffix+draft_model", 3)
    setting = setting_of(several, None, PROMPTS, 60.0, 600)
    assert (setting.gamma, setting.drafters, setting.is_auto) == (3, ["suffix"], False)
    auto = setting_of(several, SamplingParams(speculative_tokens="auto"), PROMPTS, 60.0, 600)
    assert (auto.gamma, auto.drafters, auto.is_auto) == (DRAFT_LEN, ["suffix", "draft_model"], True)


@pytest.mark.slow
def test_several_drafters_are_tested_in_turn(llm: LLM) -> None:
    found = check(llm.with_drafter("suffix+draft_model"), SamplingParams(max_tokens=32, temperature=0.8), budget=150.0)
    passed(found)
    assert {one.kind for one in found.checks} >= {GREEDY, SEEDED, SAMPLED, DRAWN}
    assert names(found) == {control.name for control in CONTROLS}
    assert found.false_alarm == 2 * FALSE_ALARM
    assert "in turn" in found.drafts


def test_a_control_that_is_not_rejected_makes_it_inconclusive(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from foredraft.certificate import controls
    from foredraft.verify import verify

    monkeypatch.setattr(controls, "CONTROLS", (replace(controls.CONTROLS[0], verifier=verify),))
    found = quick(llm, temperature=0.0).run()
    assert (found.verdict, found.passed) == ("inconclusive", False)
    assert found.reason is not None
    assert "accept all" in found.reason


def test_a_broken_engine_fails(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is broken for every subject, plain decoding apart, is found by the tests themselves."""
    from foredraft.certificate import certify, trial
    from foredraft.certificate.controls import _verifier, accepts_everything

    broken = _verifier(accepts_everything)
    monkeypatch.setattr(certify, "Subject", lambda llm, *rest: trial.Subject(llm, *(rest or (broken,))))
    found = quick(llm, temperature=0.0).run()
    assert found.verdict == "failed"
    assert found.reason is not None
    assert "identity" in found.reason


def test_the_llm_is_left_as_it_was(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0)
    before = llm.generate("def area(r):", params)[0].outputs[0].token_ids
    used = llm.engine.pool.used
    passed(quick(llm, temperature=0.0).run())
    assert llm.engine.pool.used <= used
    assert llm.generate("def area(r):", params)[0].outputs[0].token_ids == before


def test_what_cannot_be_honoured_is_refused(llm: LLM) -> None:
    for settings in ({"budget": 0.0}, {"prompts": []}, {"num_tokens": 0}):
        with pytest.raises(ForedraftError):
            check(llm, **settings)  # type: ignore[arg-type]
    stream = llm.stream("def area(r):", SamplingParams(max_tokens=50))
    next(stream)
    with pytest.raises(ForedraftError, match="running"):
        check(llm)
    stream.close()
