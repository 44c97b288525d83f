"""What all checks of a certificate share: models, parameters, prompts, and how much is looked at.

Work is planned, in tokens and draws, from the budget and from how fast this machine is when it is idle. So a busy machine
takes longer over the same work, and what a check can find does not depend on what else the machine does. A limit remains:
where that would take more than OVERTIME times the budget of wall-clock time, less work is planned, and what is left then is
cut; the certificate says so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from foredraft.certificate.drafts import InTurn
from foredraft.certificate.report import GREEDY, SEEDED
from foredraft.certificate.texts import Subject, Text, Trial, row_noise, without_drafts
from foredraft.engine.methods import NO_DRAFT
from foredraft.llm import LLM
from foredraft.sampling import AUTO, SamplingParams
from foredraft.text.request import Prompt

DRAFT_LEN = 4
"""Draft tokens of a step where their number is left to the policy."""

OVERTIME = 1.5
"""The most that a busy machine may take, in budgets."""

_IDENTITY_SHARE, _SAMPLED_SHARE = 0.4, 0.3
"""Of the budget: for the checks of identity and their controls, and for the texts of the distribution check."""
_DRAWS_PER_SECOND = 10_000
"""Tokens of the verification check for each second of the budget; a processor draws several times as many."""
_MOST_DRAWS = 900_000

_NUM_MEASURED = 4
"""Prompts that are completed to measure the speed."""
_NUM_COMPLETIONS = 9
"""How often all prompts are completed for the checks of identity, controls included, about."""
_MOST_COPIES = 8

PROMPTS = (
    "def fibonacci(n):",
    'def count_words(text):\n    """Return how often each word of the text occurs."""',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):",
    "import os\nimport sys\n\ndef main():\n    parser =",
    "for row in rows:\n    for column in columns:\n        total +=",
    "Once upon a time there was a little girl who",
    "The dog saw a cat on the wall. The cat",
    'Tom and his mother went to the park. "Look," said Tom,',
    "The capital of France is",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,",
    "red green blue red green blue red green",
    "| name | age | town |\n|---|---|---|\n| Ann | 31 | Rome |\n|",
)
"""Completed where the user gives none: code, prose, lists and tables, some of which repeat themselves."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """seconds: of the budget, from `began`, wall-clock time."""

    seconds: float
    began: float = field(default_factory=time.perf_counter)

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.began

    def is_over(self, *, budgets: float = OVERTIME) -> bool:
        return self.spent > budgets * self.seconds


@dataclass(frozen=True, slots=True)
class Setting:
    """params: the request's, complete. length: tokens of a text, at most. num_tokens, num_draws: that the checks of the
    distribution and of verification look at, at most. noise: how far a logit may be off (texts.row_noise)."""

    llm: LLM
    params: SamplingParams
    prompts: Sequence[Prompt]
    length: int
    deadline: Deadline
    num_tokens: int
    num_draws: int = _MOST_DRAWS
    noise: float = 0.0

    @property
    def is_auto(self) -> bool:
        """Whether the policy decides on drafters and numbers."""
        return self.has_drafter and self._speculative_tokens == AUTO

    @property
    def gamma(self) -> int:
        """Draft tokens of a step in the checks, at most."""
        return DRAFT_LEN if isinstance(self._speculative_tokens, str) else self._speculative_tokens

    @property
    def _speculative_tokens(self) -> int | str:
        wanted = self.params.speculative_tokens
        return self.llm.speculative_tokens if wanted is None else wanted

    @property
    def has_drafter(self) -> bool:
        return NO_DRAFT not in self.llm.drafters

    @property
    def drafters(self) -> list[str]:
        """All of them if the policy decides; a fixed number of draft tokens comes from the first."""
        names = list(self.llm.drafters)
        return names if self.is_auto else names[:1]

    @property
    def drafts_line(self) -> str:
        """How drafts are requested."""
        tokens = f"{self.gamma} draft tokens a step from {' and '.join(self.drafters)}"
        if not self.is_auto:
            return tokens if self.has_drafter else "none"
        in_turn = " in turn" if len(self.drafters) > 1 else ""
        return (
            f"{tokens}{in_turn}, so that there are some; what the policy itself chooses is tested in the texts of auto"
        )

    @property
    def seed(self) -> int:
        """Of all noise of the certificate."""
        return self.params.seed or 0

    @property
    def num_copies(self) -> int:
        """Texts of a prompt in the checks of identity: as many as the request wants, in pairs (drafts.py), up to a limit."""
        return min(2 * -(-self.params.n // 2), _MOST_COPIES)

    def params_of(self, kind: str) -> SamplingParams:
        base = replace(
            self.params,
            n=1,
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
        """is_auto: draft as the LLM's own policy decides, if the parameters leave it the number."""
        return Trial(subject, self.seed, None if is_auto else InTurn(self.drafters), self.gamma, script)


def measured(setting: Setting) -> tuple[Setting, list[str]]:
    """Measure the speed and plan the work. -> (the setting with that plan, what it leaves out)"""
    prompts = setting.prompts[:_NUM_MEASURED]
    params = replace(
        setting.params_of(GREEDY),
        max_tokens=min(8, setting.length),
        min_tokens=0,
        stop=(),
        stop_token_ids=(),
        ignore_eos=setting.params.structured_outputs is None,
    )
    trial = setting.trial(Subject(setting.llm))
    trial.write(prompts[:1], params)  # what only a first pass has to do
    wall, processor = time.perf_counter(), time.process_time()
    texts = trial.write(prompts, without_drafts(params))
    # where other processes run in between, the wall clock goes on and the process's own does not
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    rate = sum(len(text.output_ids) for text in texts) / max(min(wall, processor), 1e-6)
    plan, left_out = planned(setting, rate * share_in_time(wall, processor))
    return replace(plan, noise=row_noise(setting.llm.target, texts[0].tokens)), left_out


def share_in_time(wall: float, processor: float) -> float:
    """Of the work planned for an idle machine, the share that fits into OVERTIME budgets on this one. wall, processor: seconds
    that the same work took by either clock; other processes ran in the difference."""
    return min(1.0, OVERTIME * processor / max(wall, 1e-6))


def planned(setting: Setting, rate: float) -> tuple[Setting, list[str]]:
    """rate: tokens that plain decoding writes in a second. -> (the setting with this plan, what it leaves out)"""
    budget, num_prompts = setting.deadline.seconds, len(setting.prompts)
    affordable = _IDENTITY_SHARE * budget * rate / _NUM_COMPLETIONS * 2 / setting.num_copies
    length = int(min(setting.length, max(8, affordable / num_prompts)))
    num_kept = max(1, min(num_prompts, int(affordable / length)))
    num_tokens = max(length, min(setting.num_tokens, int(_SAMPLED_SHARE * budget * rate)))
    num_draws = max(1, min(setting.num_draws, int(_DRAWS_PER_SECOND * budget)))
    left_out = []
    if length < setting.length:
        left_out.append(f"what comes behind {length} tokens of a text, of {setting.length}: raise --budget")
    if num_kept < num_prompts:
        left_out.append(f"{num_prompts - num_kept} of {num_prompts} prompts: raise --budget")
    if setting.params.n > setting.num_copies:
        left_out.append(f"texts {setting.num_copies + 1} to {setting.params.n} of a prompt")
    prompts = setting.prompts[:num_kept]
    return replace(setting, prompts=prompts, length=length, num_tokens=num_tokens, num_draws=num_draws), left_out
