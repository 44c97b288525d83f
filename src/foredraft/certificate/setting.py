"""What all checks of a certificate share: models, parameters, prompts, and the amount of work.

The work, in tokens and draws, is planned from the budget and from the speed of this machine when it is idle. So a busy machine
takes longer for the same work, and what a check can find does not depend on the machine's load. There is one limit: if the
work would take more than OVERTIME times the budget of wall-clock time, less is planned; anything unfinished at that limit is
cut, and the certificate says so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from foredraft.certificate.controls import Control
from foredraft.certificate.report import GREEDY, SEEDED
from foredraft.certificate.texts import InTurn, Text, Trial, row_noise, shortened
from foredraft.engine.methods import NO_DRAFT
from foredraft.llm import LLM
from foredraft.sampling import AUTO, SamplingParams
from foredraft.text.request import Prompt

BUDGET = 120.0
OVERTIME = 1.5
"""The most wall-clock time that a busy machine may take, in budgets."""
MAX_TOKENS = 96
NUM_TOKENS = 12_288
"""For the distribution check."""
DRAFT_LEN = 4
"""Draft tokens per step where the policy decides on their number."""

_IDENTITY_SHARE, _SAMPLED_SHARE = 0.4, 0.3
"""Shares of the budget: for the checks of identity and their controls, and for the texts of the distribution check."""
_DRAWS_PER_SECOND, _MOST_DRAWS = 10_000, 900_000
"""Tokens of the verification check: per second of the budget (a processor draws several times as many), and at most."""
_NUM_COMPLETIONS = 9
"""Roughly how often all prompts are completed for the checks of identity, including their controls."""
_NUM_MEASURED, _MEASURED_LEN = 4, 8
"""Prompts completed to measure the speed, and tokens of each."""
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
"""Used if the user gives none: code, prose, lists and tables, some of which repeat themselves."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The budget: `seconds` of wall-clock time from `began`."""

    seconds: float
    began: float = field(default_factory=time.perf_counter)

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.began

    def is_over(self, *, budgets: float = OVERTIME) -> bool:
        return self.spent > budgets * self.seconds


@dataclass(frozen=True, slots=True)
class Setting:
    """params: the request's, complete. gamma: the most draft tokens of a step. drafters: the names of the drafters in use; empty
    for plain decoding. is_auto: whether the LLM's policy decides on both. length: the most tokens of a text. num_tokens,
    num_draws: the most that the distribution and verification checks look at. noise: how far a logit may be off
    (texts.row_noise). left_out: what the plan leaves out, one line each."""

    llm: LLM
    params: SamplingParams
    prompts: Sequence[Prompt]
    gamma: int
    drafters: Sequence[str]
    is_auto: bool
    length: int
    deadline: Deadline
    num_tokens: int
    num_draws: int = _MOST_DRAWS
    noise: float = 0.0
    left_out: Sequence[str] = ()

    @property
    def drafts_line(self) -> str:
        """A description of how drafts are requested."""
        if not self.drafters:
            return "none"
        tokens = f"{self.gamma} draft tokens per step from {' and '.join(self.drafters)}"
        if not self.is_auto:
            return tokens
        in_turn = " in turn" if len(self.drafters) > 1 else ""
        return f"{tokens}{in_turn}, so that something is drafted; what the policy itself chooses is tested in the auto texts"

    @property
    def seed(self) -> int:
        """The seed of all the certificate's noise."""
        return self.params.seed or 0

    @property
    def num_copies(self) -> int:
        """Texts per prompt in the checks of identity: the request's n, rounded up to pairs (texts.InTurn), up to a limit."""
        return min(2 * -(-self.params.n // 2), _MOST_COPIES)

    def params_of(self, kind: str) -> SamplingParams:
        """The parameters of one text of this kind (report.py)."""
        base = shortened(replace(self.params, n=1, speculative_tokens=self.gamma), self.length)
        if kind == GREEDY:
            return replace(base, temperature=0.0, seed=None, verification=None)
        if kind == SEEDED:
            return replace(base, seed=self.seed, verification=None)
        rule = None if base.verification == "coupled" else base.verification
        return replace(base, seed=None, verification=rule)

    def trial(self, control: Control | None = None, script: Sequence[Text] = (), *, is_auto: bool = False) -> Trial:
        """control: None for the real verifier. script: see Trial. is_auto: whether the LLM's own policy decides on drafts."""
        policy = None if is_auto else InTurn(self.drafters or [NO_DRAFT], self.llm.tree_shape)
        return Trial(self.llm, control, policy, seed=self.seed, length=self.gamma, script=script)


def setting_of(
    llm: LLM, params: SamplingParams | None, prompts: Sequence[Prompt], budget: float, num_tokens: int
) -> Setting:
    """The setting before anything is measured. Parameters are complete, except that those irrelevant to exactness are dropped."""
    resolved = llm.frontend.prepare([0], params or SamplingParams(max_tokens=MAX_TOKENS)).params
    length = resolved.max_tokens or MAX_TOKENS
    chosen = replace(resolved, logprobs=None, prompt_logprobs=None, max_tokens=length)
    draft_len = resolved.speculative_tokens or llm.speculative_tokens
    drafters = [name for name in llm.drafters if name != NO_DRAFT]
    is_auto = bool(drafters) and draft_len == AUTO
    return Setting(
        llm,
        chosen,
        list(prompts),
        gamma=DRAFT_LEN if isinstance(draft_len, str) else draft_len,
        # with a fixed number of draft tokens, only the first drafter is used
        drafters=drafters if is_auto else drafters[:1],
        is_auto=is_auto,
        length=length,
        deadline=Deadline(budget),
        num_tokens=num_tokens,
    )


def measured(setting: Setting) -> Setting:
    """Measure the speed and the noise of rows, and plan the work."""
    prompts = setting.prompts[:_NUM_MEASURED]
    params = replace(
        shortened(setting.params_of(GREEDY), _MEASURED_LEN),
        min_tokens=0,
        stop=(),
        stop_token_ids=(),
        ignore_eos=setting.params.structured_outputs is None,
    )
    trial = setting.trial()
    trial.write(prompts[:1], params)  # warm up
    wall, processor = time.perf_counter(), time.process_time()
    texts = trial.write(prompts, params)
    # while other processes run, wall-clock time passes but this process's time does not
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    rate = sum(len(text.output_ids) for text in texts) / max(min(wall, processor), 1e-6)
    plan = planned(setting, rate * share_in_time(wall, processor))
    return replace(plan, noise=row_noise(setting.llm.target, texts[0].tokens, texts[0].source))


def share_in_time(wall: float, processor: float) -> float:
    """The share of the work planned for an idle machine that fits into OVERTIME budgets on this one. wall, processor: seconds
    that the same work took on either clock; the difference went to other processes."""
    return min(1.0, OVERTIME * processor / max(wall, 1e-6))


def planned(setting: Setting, rate: float) -> Setting:
    """rate: tokens generated per second, with drafts."""
    budget, num_prompts, copies = setting.deadline.seconds, len(setting.prompts), setting.num_copies
    affordable = _IDENTITY_SHARE * budget * rate / _NUM_COMPLETIONS * 2 / copies
    length = int(min(setting.length, max(8, affordable / num_prompts)))
    num_kept = max(1, min(num_prompts, int(affordable / length)))
    left_out = []
    if length < setting.length:
        left_out.append(f"tokens after the first {length} of each text, of {setting.length}: raise --budget")
    if num_kept < num_prompts:
        left_out.append(f"{num_prompts - num_kept} of {num_prompts} prompts: raise --budget")
    if setting.params.n > copies:
        left_out.append(f"texts {copies + 1} to {setting.params.n} of each prompt")
    return replace(
        setting,
        prompts=setting.prompts[:num_kept],
        length=length,
        num_tokens=max(length, min(setting.num_tokens, int(_SAMPLED_SHARE * budget * rate))),
        num_draws=max(1, min(setting.num_draws, int(_DRAWS_PER_SECOND * budget))),
        left_out=left_out,
    )
