"""What all tests of a certificate have in common: models, parameters, prompts, and how much time there is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from foredraft.certificate.controls import GREEDY, SEEDED
from foredraft.certificate.reading import row_noise
from foredraft.certificate.trial import Subject, Text, Trial, plain
from foredraft.certificate.turns import InTurn
from foredraft.equipment import NO_DRAFT
from foredraft.llm import LLM
from foredraft.request import Prompt
from foredraft.sampling import AUTO, SamplingParams

DRAFT_LEN = 4
"""Draft tokens of a step where their number is left to the policy."""

SHARE = 0.4
"""Of the budget, for one part of it at most."""

_SOME = 4
_WRITTEN = 14
"""How often all prompts are completed for the tests of identity, controls included, about."""


@dataclass(frozen=True, slots=True)
class Setting:
    """params: the request's, complete. length: tokens of a text. budget: seconds. num_tokens: that the distribution test
    looks at, at most. rate: tokens that plain decoding writes in a second. noise: how far a logit may be off
    (reading.row_noise).
    """

    llm: LLM
    params: SamplingParams
    prompts: Sequence[Prompt]
    length: int
    budget: float
    num_tokens: int
    rate: float = 1.0
    noise: float = 0.0

    @property
    def is_auto(self) -> bool:
        """Whether the policy decides on drafters and numbers."""
        return self.drafts_at_all and self._wanted == AUTO

    @property
    def gamma(self) -> int:
        """Draft tokens of a step in the tests, at most."""
        return DRAFT_LEN if isinstance(self._wanted, str) else self._wanted

    @property
    def _wanted(self) -> int | str:
        wanted = self.params.speculative_tokens
        return self.llm.speculative_tokens if wanted is None else wanted

    @property
    def drafts_at_all(self) -> bool:
        return NO_DRAFT not in self.llm.drafters

    @property
    def drafters(self) -> list[str]:
        """Those that may be asked: a fixed number is asked of the first one."""
        names = list(self.llm.drafters)
        return names if self.is_auto else names[:1]

    @property
    def drafts_line(self) -> str:
        """How drafts are asked for."""
        tokens = f"{self.gamma} draft tokens a step from {' and '.join(self.drafters)}"
        if not self.is_auto:
            return tokens if self.drafts_at_all else "none"
        in_turn = " in turn" if len(self.drafters) > 1 else ""
        return (
            f"{tokens}{in_turn}, so that there are some; what the policy itself chooses is tested in the texts of auto"
        )

    @property
    def seed(self) -> int:
        """Of all noise of the certificate."""
        return self.params.seed or 0

    def params_of(self, kind: str) -> SamplingParams:
        base = replace(
            self.params,
            max_tokens=self.length,
            min_tokens=min(self.params.min_tokens, self.length),
            speculative_tokens=self.gamma,
        )
        if kind == GREEDY:
            return replace(base, temperature=0.0, seed=None, verification=None)
        if kind == SEEDED:
            return replace(base, seed=self.seed, verification=None)
        rule = None if base.verification == "coupled" else base.verification
        return replace(base, seed=None, verification=rule)

    def trial(self, subject: Subject, script: Sequence[Text] = (), *, is_auto: bool = False) -> Trial:
        """is_auto: ask as the LLM's own policy does, if the parameters leave it the number."""
        return Trial(subject, self.seed, None if is_auto else InTurn(self.drafters), self.gamma, script)


def measured(setting: Setting) -> tuple[Setting, list[str]]:
    """How fast this goes, and from that how much of it there will be. -> (the setting for that, what it leaves out)"""
    some = setting.prompts[:_SOME]
    params = replace(setting.params_of(GREEDY), max_tokens=min(8, setting.length), min_tokens=0, ignore_eos=True)
    trial = setting.trial(Subject(setting.llm))
    trial.write(some[:1], params)  # whatever only a first pass has to do
    started = time.perf_counter()
    texts = trial.write(some, plain(params))
    spent = time.perf_counter() - started
    rate = sum(len(text.output_ids) for text in texts) / max(spent, 1e-6)
    affordable = SHARE * setting.budget * rate / _WRITTEN
    num_prompts = len(setting.prompts)
    length = int(min(setting.length, max(8, affordable / num_prompts)))
    num_kept = max(1, min(num_prompts, int(affordable / length)))
    left_out = []
    if num_kept < num_prompts:
        left_out.append(f"{num_prompts - num_kept} of {num_prompts} prompts, for lack of time: raise --budget")
    noise = row_noise(setting.llm.target, texts[0].tokens)
    return replace(setting, prompts=setting.prompts[:num_kept], length=length, rate=rate, noise=noise), left_out
