"""Users' own verification rules: they are used only for requests that name them, and errors name the rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from foredraft import LLM, ForedraftError, RequestError, SamplingParams
from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.verify import Case, OutcomeLaw, Rule, rejection_law, verify
from tests.laws import chi_square, random_laws, sampler_for, toy

PROMPT = "Once upon a time"


def never_accepts(case: Case) -> OutcomeLaw:
    stop = torch.zeros_like(case.p[..., 0])
    stop[:, 0] = 1
    return OutcomeLaw(stop, torch.zeros_like(stop))


def counting(rule: Rule) -> tuple[Rule, list[int]]:
    calls: list[int] = []

    def counted(case: Case) -> OutcomeLaw:
        calls.append(len(case.lens))
        return rule(case)

    return counted, calls


def raises(case: Case) -> OutcomeLaw:
    raise ValueError("no such thing")


def llm_with(**rules: Any) -> LLM:
    return LLM(speculative_tokens=4, device="cpu", verification_rules=rules)


def test_only_requests_that_name_a_rule_use_it() -> None:
    mine, calls = counting(rejection_law)
    llm = llm_with(mine=mine)
    llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0.9))
    assert not calls
    llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0.9, verification="mine"))
    assert calls
    found = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0, verification="mine"))[0]
    plain = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0, speculative_tokens=0))[0]
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids


def test_a_rule_decides_what_is_accepted() -> None:
    llm = llm_with(never=never_accepts)
    llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0.9, verification="never"))
    assert llm.engine.stats.num_draft_tokens > 0
    assert llm.engine.stats.num_accepted_tokens == 0


def test_other_drafters_over_the_same_models_keep_the_rules() -> None:
    llm = llm_with(never=never_accepts).with_drafter("draft_model", 2)
    llm.generate(PROMPT, SamplingParams(max_tokens=6, temperature=0.9, verification="never"))
    assert llm.engine.stats.num_accepted_tokens == 0


def test_an_unknown_rule_is_refused_with_the_known_ones() -> None:
    llm = llm_with(mine=rejection_law)
    with pytest.raises(ForedraftError, match="one of block, rejection, coupled, mine, not 'magic'"):
        llm.generate(PROMPT, SamplingParams(verification="magic"))
    with pytest.raises(ForedraftError, match="not 'mine'"):
        LLM(device="cpu").generate(PROMPT, SamplingParams(verification="mine"))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"block": rejection_law}, "name of its own"),
        ({"": rejection_law}, "name of its own"),
        ({"mine": 3}, "function of"),
    ],
)
def test_objects_that_are_no_rules_are_refused_at_once(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(ForedraftError, match=message):
        llm_with(**rules)


def test_a_seed_still_needs_shared_noise() -> None:
    with pytest.raises(ForedraftError, match="a seed needs verification 'coupled'"):
        SamplingParams(seed=1, verification="mine")


def broken(change: Callable[[OutcomeLaw], Any]) -> Rule:
    return lambda case: change(rejection_law(case))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (raises, "the verification rule 'mine' raised ValueError: no such thing"),
        (broken(lambda law: None), "must return an OutcomeLaw, not NoneType"),
        (broken(lambda law: OutcomeLaw(law.stop[:, 1:], law.scale)), "must return stop as"),
        (broken(lambda law: OutcomeLaw(law.stop * torch.nan, law.scale)), "returned a stop that is not finite"),
        (broken(lambda law: OutcomeLaw(law.stop / 2, law.scale)), "do not sum to 1"),
        (broken(lambda law: OutcomeLaw(-law.stop, law.scale)), "a stop below 0"),
    ],
)
def test_a_failing_rule_ends_only_its_own_requests(rule: Rule, message: str) -> None:
    llm = llm_with(mine=rule)
    params = [
        SamplingParams(max_tokens=12, temperature=0.9, verification=name) for name in ("mine", "block", "rejection")
    ]
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate([PROMPT] * 3, params)
    reasons = [output.outputs[0].finish_reason for output in caught.value.outputs]
    assert reasons == ["error", "length", "length"]


def test_texts_under_an_own_rule_have_the_targets_distribution() -> None:
    """Through `verify`, in float64, with drafts drawn from q. The first token is counted."""
    case, num = toy(random_laws(21, 1.5), random_laws(22, 1.5), depth=1), 3000
    generator = torch.Generator().manual_seed(2)
    drafts = [(int(i),) for i in torch.multinomial(case.q[()], num, replacement=True, generator=generator)]
    samplers = [sampler_for({"verification": "mine"}, seed=5)] * num
    rules = {"mine": rejection_law}
    verdict = verify(case.target_rows(drafts), case.proposal(drafts), samplers, [(0,)] * num, rules=rules)
    taken = zip(drafts, verdict.num_accepted, verdict.next_ids, strict=True)
    first = torch.tensor([draft[0] if stood else token for draft, stood, token in taken])
    assert chi_square(torch.bincount(first, minlength=3), case.p[()] * num) > 1e-6


def test_rows_that_only_compare_ids_never_call_the_rule() -> None:
    class Copies:
        def propose(self, requests: list[DraftRequest]) -> Proposal:
            return Proposal.certain([[request.tokens[-1]] * request.max_len for request in requests])

        def forget(self, seq_ids: list[int]) -> None:
            """There is no state to drop."""

    mine, calls = counting(rejection_law)
    llm = LLM(method=Copies(), speculative_tokens=2, device="cpu", verification_rules={"mine": mine})
    llm.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0.9, verification="mine"))
    assert not calls
