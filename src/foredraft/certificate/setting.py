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

from foredraft.certificate.controls import Control
from foredraft.certificate.report import GREEDY, SEEDED
from foredraft.certificate.texts import InTurn, Text, Trial, row_noise, shortened
from foredraft.engine.methods import NO_DRAFT
from foredraft.llm import LLM
from foredraft.sampling import AUTO, SamplingParams
from foredraft.text.request import Prompt

BUDGET = 120.0
OVERTIME = 1.5
"""The most that a busy machine may take, in budgets."""
MAX_TOKENS = 96
NUM_TOKENS = 12_288
"""For the distribution check."""
DRAFT_LEN = 4
"""Draft tokens of a step where their number is left to the policy."""

_IDENTITY_SHARE, _SAMPLED_SHARE = 0.4, 0.3
"""Of the budget: for the checks of identity and their controls, and for the texts of the distribution check."""
_DRAWS_PER_SECOND, _MOST_DRAWS = 10_000, 900_000
"""Tokens of the verification check: for each second of the budget (a processor draws several times as many), and at most."""
_NUM_COMPLETIONS = 9
"""How often all prompts are completed for the checks of identity, controls included, about."""
_NUM_MEASURED, _MEASURED_LEN = 4, 8
"""Prompts that are completed to measure the speed, and tokens of each."""
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
    """params: the request's, complete. gamma: draft tokens of a step, at most. drafters: that make them, by name; none for
    plain decoding. is_auto: whether the LLM's policy decides on both. length: tokens of a text, at most. num_tokens,
    num_draws: that the checks of the distribution and of verification look at, at most. noise: how far a logit may be off
    (texts.row_noise). left_out: what the plan leaves out, a line each."""

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
        """How drafts are requested."""
        if not self.drafters:
            return "none"
        tokens = f"{self.gamma} draft tokens a step from {' and '.join(self.drafters)}"
        if not self.is_auto:
            return tokens
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
        """Texts of a prompt in the checks of identity: as many as the request wants, in pairs (texts.InTurn), up to a limit."""
        return min(2 * -(-self.params.n // 2), _MOST_COPIES)

    def params_of(self, kind: str) -> SamplingParams:
        """For one text of this kind (report.py)."""
        base = shortened(replace(self.params, n=1, speculative_tokens=self.gamma), self.length)
        if kind == GREEDY:
            return replace(base, temperature=0.0, seed=None, verification=None)
        if kind == SEEDED:
            return replace(base, seed=self.seed, verification=None)
        rule = None if base.verification == "coupled" else base.verification
        return replace(base, seed=None, verification=rule)

    def trial(self, control: Control | None = None, script: Sequence[Text] = (), *, is_auto: bool = False) -> Trial:
        """control: None for the real verifier. script: see Trial. is_auto: draft as the LLM's own policy decides."""
        policy = None if is_auto else InTurn(self.drafters or [NO_DRAFT], self.llm.tree_shape)
        return Trial(self.llm, control, policy, seed=self.seed, length=self.gamma, script=script)


def setting_of(
    llm: LLM, params: SamplingParams | None, prompts: Sequence[Prompt], budget: float, num_tokens: int
) -> Setting:
    """Before anything is measured. The parameters are complete, without those that exactness does not depend on."""
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
        # a fixed number of draft tokens comes from the first
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
    trial.write(prompts[:1], params)  # what only a first pass has to do
    wall, processor = time.perf_counter(), time.process_time()
    texts = trial.write(prompts, params)
    # while other processes run, the wall clock goes on and the process's own does not
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    rate = sum(len(text.output_ids) for text in texts) / max(min(wall, processor), 1e-6)
    plan = planned(setting, rate * share_in_time(wall, processor))
    return replace(plan, noise=row_noise(setting.llm.target, texts[0].tokens, texts[0].source))


def share_in_time(wall: float, processor: float) -> float:
    """Of the work planned for an idle machine, the share that fits into OVERTIME budgets on this one. wall, processor: seconds
    that the same work took by either clock; other processes ran in the difference."""
    return min(1.0, OVERTIME * processor / max(wall, 1e-6))


def planned(setting: Setting, rate: float) -> Setting:
    """rate: tokens that are written in a second, with drafts."""
    budget, num_prompts, copies = setting.deadline.seconds, len(setting.prompts), setting.num_copies
    affordable = _IDENTITY_SHARE * budget * rate / _NUM_COMPLETIONS * 2 / copies
    length = int(min(setting.length, max(8, affordable / num_prompts)))
    num_kept = max(1, min(num_prompts, int(affordable / length)))
    left_out = []
    if length < setting.length:
        left_out.append(f"what comes behind {length} tokens of a text, of {setting.length}: raise --budget")
    if num_kept < num_prompts:
        left_out.append(f"{num_prompts - num_kept} of {num_prompts} prompts: raise --budget")
    if setting.params.n > copies:
        left_out.append(f"texts {copies + 1} to {setting.params.n} of a prompt")
    return replace(
        setting,
        prompts=setting.prompts[:num_kept],
        length=length,
        num_tokens=max(length, min(setting.num_tokens, int(_SAMPLED_SHARE * budget * rate))),
        num_draws=max(1, min(setting.num_draws, int(_DRAWS_PER_SECOND * budget))),
        left_out=left_out,
    )
