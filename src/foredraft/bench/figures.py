"""The figures of a set of runs: counts are summed first, and each ratio is then computed once, from the sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from foredraft.bench.records import GroupRun
from foredraft.bench.statistics import Percentiles
from foredraft.engine.stats import SpeculationStats

_REPEAT = 8


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one configuration, over all its runs or those of a category. Times in seconds.

    num_questions: distinct ones; num_answers: including repeats. seconds: of its own steps, summed over the runs.
    num_repeated_tokens: the tokens inside an 8-gram that occurs more than once in its answer.
    inter_token_latency: between consecutive deliveries of one text; the tokens of one step are one delivery (vLLM's ITL).
    time_per_output_token: a text's mean time from one token to the next after the first (vLLM's TPOT).
    spec_bench_tokens_per_second: Spec-Bench's, the mean of the answers' own tokens per second.
    """

    num_questions: int
    num_answers: int
    num_tokens: int
    seconds: float
    num_repeated_tokens: int
    inter_token_latency: Percentiles | None
    time_per_output_token: Percentiles | None
    time_to_first_token: Percentiles | None
    spec_bench_tokens_per_second: float
    stats: SpeculationStats

    @classmethod
    def of(cls, runs: Sequence[GroupRun]) -> Figures:
        answers = [answer for run in runs for answer in run.answers]
        turns = [turn for answer in answers for turn in answer.turns]
        per_token = [turn.time_per_output_token for turn in turns]
        return cls(
            num_questions=len({answer.question_id for answer in answers}),
            num_answers=len(answers),
            num_tokens=sum(answer.num_tokens for answer in answers),
            seconds=sum(run.seconds for run in runs),
            num_repeated_tokens=sum(num_repeated(turn.token_ids) for turn in turns),
            inter_token_latency=Percentiles.of([gap for turn in turns for gap in turn.gaps]),
            time_per_output_token=Percentiles.of([value for value in per_token if value is not None]),
            time_to_first_token=Percentiles.of([turn.time_to_first_token for turn in turns]),
            spec_bench_tokens_per_second=mean(answer.num_tokens / answer.seconds for answer in answers),
            stats=sum((turn.stats for turn in turns), SpeculationStats()),
        )

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def repeated_share(self) -> float:
        return self.num_repeated_tokens / self.num_tokens

    @property
    def acceptance_by_position(self) -> list[float]:
        """See SpeculationStats."""
        return self.stats.acceptance_by_position

    @property
    def formula_acceptance_length(self) -> float | None:
        return formula_acceptance_length(self.stats)

    @property
    def spec_bench_mean_accepted_tokens(self) -> float | None:
        """Spec-Bench's #MAT: tokens per pass of the target, its own token included, 1.00 for plain decoding."""
        return self.stats.tokens_per_pass


def num_repeated(ids: Sequence[int]) -> int:
    """The number of tokens inside an n-gram of _REPEAT tokens that occurs more than once in the text."""
    grams = [tuple(ids[start : start + _REPEAT]) for start in range(len(ids) - _REPEAT + 1)]
    counts = Counter(grams)
    return len({start + i for start, gram in enumerate(grams) if counts[gram] > 1 for i in range(_REPEAT)})


def repeated_share(ids: Sequence[int]) -> float:
    """The share of tokens that num_repeated counts. A looping text flatters every drafter."""
    return num_repeated(ids) / len(ids) if ids else 0.0


def expected_length(alpha: float, speculative_tokens: int) -> float:
    """τ = (1 - α^(γ+1)) / (1 - α): tokens per target pass if each draft token is accepted independently with probability α."""
    if alpha >= 1.0:
        return float(speculative_tokens + 1)
    return (1.0 - alpha ** (speculative_tokens + 1)) / (1.0 - alpha)


def formula_acceptance_length(stats: SpeculationStats) -> float | None:
    """As expected_length, but for drafts of different lengths and with the measured α; None if nothing was evaluated.

    Of n drafts, d_i have a token at position i: τ = 1 + Σ_i d_i α^(i+1) / n. If all have γ tokens, this equals expected_length.
    """
    alpha = stats.conditional_acceptance
    if alpha is None:
        return None
    expected = sum(num * alpha ** (i + 1) for i, num in enumerate(stats.drafted_per_position))
    return 1.0 + expected / stats.num_spec_steps


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first position at which two texts differ; None if they are the same."""
    if ours == theirs:
        return None
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
