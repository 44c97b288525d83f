"""The tests of what is drawn: bets on sampled texts, and on the verifier alone."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from foredraft.certificate.betting import FALSE_ALARM, Bets
from foredraft.certificate.controls import DRAWN, SAMPLED
from foredraft.certificate.distribution import Judge
from foredraft.certificate.draws import Draws, Pair, narrowed, pairs_of, sharpened, telling
from foredraft.certificate.report import CheckResult
from foredraft.certificate.setting import SHARE, Setting
from foredraft.certificate.testing import Found, Rejection
from foredraft.certificate.trial import Subject, Text
from foredraft.certificate.wording import bets_line, bets_odds, finite
from foredraft.sampling import SamplingParams

_DRAWN_PER_TOKEN = 32
"""So many tokens does the test of the verifier alone look at, for each of the other test: it needs no model."""

_NUM_PAIRS = 32
_NUM_IDS = 512
_CANDIDATES = 256
_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class _Sample:
    bets: Bets
    texts: Sequence[Text]
    num_drafted: int
    num_sampled: int

    @property
    def num_tokens(self) -> int:
        return sum(len(text.output_ids) for text in self.texts)


class DistributionTest:
    """Every token of a text was drawn from the target's law. pairs: laws that target and drafters had on the way."""

    name, kind = "distribution", SAMPLED

    def __init__(self, setting: Setting, real: Subject) -> None:
        self.pairs: list[Pair] = []
        self._setting = setting
        self._real = real
        self._num_tokens = 0

    def run(self) -> Found:
        found = self._sample(self._real, self._setting.num_tokens, SHARE * self._setting.budget)
        self._num_tokens = found.num_tokens
        bets = found.bets
        share = bets.smallest_share("draft stands") if "draft stands" in bets.bets else None
        likeliest = bets.smallest_share("likeliest")
        result = CheckResult(
            self.name, self.kind, len(found.texts), found.num_tokens, found.num_drafted, not bets.is_rejected,
            bets_line(bets), bets_odds(share, likeliest),
            {**_figures(bets), "smallest_unverified_share": share, "smallest_likeliest_share": likeliest},
            FALSE_ALARM,
        )  # fmt: skip
        return Found([result], found.num_drafted, found.num_sampled)

    def reject(self, subject: Subject, seconds: float) -> Rejection:
        found = self._sample(subject, self._num_tokens, seconds)
        return _rejection(self.name, found.bets, found.num_tokens, self._num_tokens)

    def _sample(self, subject: Subject, num_tokens: int, seconds: float) -> _Sample:
        """Round after round of texts, until there are num_tokens, or the time is up, or the bets are won."""
        started = time.perf_counter()
        setting, all_prompts = self._setting, self._setting.prompts
        trial = setting.trial(subject)
        judge = Judge(setting.llm.target, with_drafts=setting.drafts_at_all, border=setting.noise)
        bets, texts = judge.new_bets(), list[Text]()
        num_prompts, n = self._round(num_tokens)
        params = replace(setting.params_of(SAMPLED), n=n)
        seen, turn = 0, 0
        while seen < num_tokens and not bets.is_rejected:
            # in turn, where a round has fewer prompts than there are
            some = [all_prompts[(turn + i) % len(all_prompts)] for i in range(num_prompts)]
            turn += num_prompts
            found = trial.write(some, params)
            judge.settle(bets, found)
            if not self.pairs and trial.num_sampled:
                self.pairs = self._telling_pairs(found, params)
            texts += [text._replace(firsts={}) for text in found]
            seen += sum(len(text.output_ids) for text in found)
            if time.perf_counter() - started > seconds:
                break
        return _Sample(bets, texts, trial.num_drafted, trial.num_sampled)

    def _telling_pairs(self, texts: list[Text], params: SamplingParams) -> list[Pair]:
        pairs = pairs_of(self._setting.llm.target, texts, _CANDIDATES)
        half = _NUM_PAIRS // 2
        return narrowed([*telling(pairs, params, half), *telling(sharpened(pairs), params, half)], params, _NUM_IDS)

    def _round(self, num_tokens: int) -> tuple[int, int]:
        """(prompts, texts of each) of one round: an eighth of all tokens, and of the time for them."""
        affordable = SHARE * self._setting.budget * self._setting.rate / 2
        wanted = min(num_tokens, affordable) / _ROUNDS / self._setting.length
        prompts = max(1, min(len(self._setting.prompts), int(wanted / 2)))
        return prompts, 2 * max(1, int(wanted / 2 / prompts))


class VerificationTest:
    """The same for the verifier alone, on laws of the models: draws.py."""

    name, kind = "verification", DRAWN

    def __init__(self, setting: Setting, real: Subject, pairs: Sequence[Pair]) -> None:
        self._setting = setting
        self._real = real
        self._pairs = pairs
        self._num_tokens = 0

    def run(self) -> Found:
        if not self._pairs:
            return Found([], 0, 0, ["verification of drawn drafts: none was drawn from a law, ids are only compared"])
        most = _DRAWN_PER_TOKEN * self._setting.num_tokens
        bets, draws = self._draw(self._real, most, SHARE / 2 * self._setting.budget)
        self._num_tokens = draws.num_tokens
        result = CheckResult(
            self.name, self.kind, draws.num_steps, draws.num_tokens, draws.num_drafted, not bets.is_rejected,
            bets_line(bets), bets_odds(None, None), _figures(bets), FALSE_ALARM,
        )  # fmt: skip
        return Found([result], draws.num_drafted, draws.num_drafted)

    def reject(self, subject: Subject, seconds: float) -> Rejection:
        bets, draws = self._draw(subject, self._num_tokens, seconds)
        return _rejection(self.name, bets, draws.num_tokens, self._num_tokens)

    def _draw(self, subject: Subject, num_tokens: int, seconds: float) -> tuple[Bets, Draws]:
        started = time.perf_counter()
        setting = self._setting
        params = setting.params_of(SAMPLED)
        draws, bets = Draws(self._pairs, params, setting.gamma, subject.verifier, setting.seed), Draws.new_bets()
        while draws.num_tokens < num_tokens and not bets.is_rejected:
            draws.settle(bets)
            if time.perf_counter() - started > seconds:
                break
        return bets, draws


def _rejection(name: str, bets: Bets, num_seen: int, num_tokens: int) -> Rejection:
    """num_tokens: that the real verifier was tried on."""
    return Rejection(name if bets.is_rejected else None, num_seen, bets.power_at(num_tokens / max(num_seen, 1)))


def _figures(bets: Bets) -> dict[str, Any]:
    return {
        "log10_evidence": finite(bets.log_evidence),
        "log10_limit": -math.log10(FALSE_ALARM),
        "num_impossible": bets.num_impossible,
    }
