"""Compares plain decoding with speculation: the same request, run with and without drafts on one engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from foredraft.bench.figures import first_difference, formula_acceptance_length, repeated_share
from foredraft.engine.stats import SpeculationStats
from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.sampling import SamplingParams
from foredraft.text.outputs import RequestOutput
from foredraft.text.request import Prompt

# the one of eight candidates on which the embedded target repeats itself least; its acceptance rate is near their median
DEMO_PROMPT = (
    "def binary_search(items, target):\n"
    '    """Return the index of target in the sorted list items, or -1 if it is not there."""'
)
# one of eight candidates: SmolLM2 answers it sensibly, and repeats itself about as much as ordinary code does
DEMO_QUESTION = "Write a Python class for a stack with push, pop and peek, then show how to use it."
NUM_RUNS = 5
BUDGET = 20.0
_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Side:
    """Plain or speculative decoding: medians over the runs, times in seconds."""

    tokens_per_second: float
    inter_token_latency: float | None
    time_to_first_token: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same request decoded plainly and with drafts, num_runs times each.

    stats: summed over the speculative runs. identical: whether all runs of both sides wrote the same tokens;
    None if that is not promised (sampling without a seed). first_difference: the output position of the first token
    that differs. repeated_share: the share of output tokens inside an 8-gram that occurs more than once; a looping text flatters
    every drafter.
    """

    method: str
    speculative_tokens: int | str
    num_runs: int
    num_tokens: int
    plain: Side
    speculative: Side
    stats: SpeculationStats
    identical: bool | None
    first_difference: int | None
    repeated_share: float

    @property
    def speedup(self) -> float:
        """The ratio of the median tokens per second."""
        return self.speculative.tokens_per_second / self.plain.tokens_per_second

    @property
    def formula_acceptance_length(self) -> float | None:
        """τ computed from the measured α alone; None if no draft token was verified."""
        return formula_acceptance_length(self.stats)

    def as_dict(self) -> dict[str, Any]:
        """Everything the table shows, for JSON; ratios without a denominator are null."""
        fields = asdict(self)
        fields["stats"] |= {
            "mean_acceptance_length": self.stats.mean_acceptance_length,
            "draft_acceptance_rate": self.stats.draft_acceptance_rate,
            "conditional_acceptance": self.stats.conditional_acceptance,
        }
        return fields | {"speedup": self.speedup, "formula_acceptance_length": self.formula_acceptance_length}


def demo_prompt(llm: LLM) -> tuple[str, Prompt]:
    """The prompt as shown, and the prompt itself: a question in the model's chat template, or code to complete if it has none."""
    if llm.tokenizer is None or not llm.tokenizer.chat_template:
        return DEMO_PROMPT, DEMO_PROMPT
    return f"> {DEMO_QUESTION}\n\n", llm.chat_prompt([{"role": "user", "content": DEMO_QUESTION}])


def compare(
    llm: LLM,
    prompt: Prompt,
    params: SamplingParams,
    speculative_tokens: int | str,
    *,
    num_runs: int = NUM_RUNS,
    budget: float = BUDGET,
    progress: Callable[[], None] | None = None,
) -> Comparison:
    """Run the request alternately with and without drafts, after one short warm-up each.

    num_runs: of each; fewer, but at least one, if `budget` seconds run out. progress: called after each run.

    Raises ForedraftError if there is nothing to compare, or if the request cannot be served.
    """
    if llm.method == "none" or speculative_tokens == 0:
        raise ForedraftError("nothing to compare: both sides would be plain decoding; give a drafter and draft tokens")
    variants = (replace(params, speculative_tokens=0), replace(params, speculative_tokens=speculative_tokens))
    runs: tuple[list[RequestOutput], list[RequestOutput]] = ([], [])
    num_warm_up = min(params.max_tokens or _WARM_UP_TOKENS, _WARM_UP_TOKENS)
    for variant in variants:
        _run(llm, prompt, replace(variant, min_tokens=0, max_tokens=num_warm_up))
    started = time.perf_counter()
    while len(runs[0]) < num_runs and (not runs[0] or time.perf_counter() - started < budget):
        # alternate which one goes first, so that neither always runs in the state that the other left
        for side in (0, 1) if len(runs[0]) % 2 == 0 else (1, 0):
            runs[side].append(_run(llm, prompt, variants[side]))
            if progress is not None:
                progress()
    return _compared(llm, params, speculative_tokens, *runs)


def _run(llm: LLM, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    # every run must prefill the prompt: keys and values retained from the previous run would favour the second one
    llm.engine.drop_retained()
    return llm.generate([prompt], params)[0]


def _compared(
    llm: LLM,
    params: SamplingParams,
    speculative_tokens: int | str,
    plain: list[RequestOutput],
    speculative: list[RequestOutput],
) -> Comparison:
    texts = [_token_ids(output) for output in (*plain, *speculative)]
    differences = (first_difference(*pair) for text in texts for pair in zip(texts[0], text, strict=True))
    difference = next((position for position in differences if position is not None), None)
    is_promised = params.seed is not None or _is_greedy(plain[0], llm, params)
    return Comparison(
        method=llm.method,
        speculative_tokens=speculative_tokens,
        num_runs=len(plain),
        num_tokens=round(median(sum(map(len, text)) for text in texts)),
        plain=_side(plain),
        speculative=_side(speculative),
        stats=sum((output.metrics.stats for output in speculative), SpeculationStats()),
        identical=difference is None if is_promised else None,
        first_difference=difference if is_promised else None,
        repeated_share=repeated_share(texts[0][0]),
    )


def _is_greedy(output: RequestOutput, llm: LLM, params: SamplingParams) -> bool:
    """Whether the request is greedy. The checkpoint's own temperature applies if the request gives none."""
    return llm.frontend.prepare(output.prompt_token_ids, params).params.is_greedy


def _side(outputs: list[RequestOutput]) -> Side:
    metrics = [output.metrics for output in outputs]
    gaps = [m.inter_token_latency for m in metrics if m.inter_token_latency is not None]
    return Side(
        tokens_per_second=median(m.tokens_per_second or 0.0 for m in metrics),
        inter_token_latency=median(gaps) if gaps else None,
        time_to_first_token=median(m.time_to_first_token or 0.0 for m in metrics),
    )


def _token_ids(output: RequestOutput) -> list[list[int]]:
    return [text.token_ids for text in output.outputs]
