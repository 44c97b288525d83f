"""If a drafter fails during a benchmark, the texts are right and the report says that drafts are missing."""

from __future__ import annotations

from foredraft import LLM, DraftRequest, Proposal, SamplingParams
from foredraft.bench import Configuration, Workload, run_bench
from foredraft.bench.failures import failure_warnings
from foredraft.bench.report import as_dict, facts, markdown


class Broken:
    """A drafter that fails at its second draft."""

    def __init__(self) -> None:
        self.num_calls = 0

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        self.num_calls += 1
        if self.num_calls == 2:
            raise ValueError("broken")
        return Proposal.certain([[3] * request.max_len for request in requests])

    def forget(self, seq_ids: list[int]) -> None:
        """There is no state to drop."""


def test_each_failed_drafter_gives_a_line() -> None:
    fallbacks = {("ngram", "failed"): 2, ("ngram", "does_not_pay"): 9, ("suffix", "memory_short"): 1}
    (line,) = failure_warnings(fallbacks, "ngram:4")
    assert line.startswith("ngram:4: drafter ngram failed (2×)")
    assert failure_warnings({("suffix", "memory_short"): 1}) == []
    assert failure_warnings({("suffix", "failed"): 1})[0].startswith("drafter suffix failed (1×)")


def test_a_failed_drafter_is_reported_beside_the_figures() -> None:
    configurations = [Configuration.plain(), Configuration(Broken(), 2)]
    params = SamplingParams(max_tokens=6, temperature=0.0)
    result = run_bench(LLM(num_threads=1), configurations, Workload.of(["def f():"]), params)
    (warning,) = result.warnings
    assert warning.startswith("Broken:2: drafter Broken failed")
    assert as_dict(result)["warnings"] == [warning]
    assert f"warning: {warning}" in facts(result)
    assert f"warning: {warning}" in markdown(result)


def test_without_failures_nothing_is_reported() -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0)
    result = run_bench(LLM(num_threads=1), None, Workload.of(["def f():"]), params)
    assert as_dict(result)["warnings"] == []
    assert not any(line.startswith("warning") for line in facts(result))
