"""The advice from simulated measurements, and the parts of a real run. Nothing here is timed."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft import LLM, DraftRequest, ForedraftError, Proposal, SamplingParams
from foredraft.bench import Configuration, Interval, Ratio, built_in_workload
from foredraft.tune import Finalist, Prediction, TuneResult, as_settings, run_tune
from foredraft.tune.advise import RISK, WORTH, choose
from foredraft.tune.measure import depths_for
from foredraft.tune.report import as_dict, sentences, table_rows

SHORT = SamplingParams(max_tokens=6, temperature=0.0)


class Useless:
    """A drafter that always drafts the same token."""

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        return Proposal.certain([[3] * request.max_len for request in requests])

    def forget(self, seq_ids: list[int]) -> None:
        """There is no state to drop."""


def finalist(name: str, value: float, half_width: float | None = 0.02, batch_size: int = 1) -> Finalist:
    interval = None if half_width is None else Interval(value - half_width, value + half_width)
    return Finalist(Configuration.parse(name, batch_size), None, Ratio(value, interval), 100.0)


def advised(*finalists: Finalist) -> str:
    return choose(finalists).configuration.name


def test_the_fastest_is_advised() -> None:
    assert advised(finalist("suffix:4", 1.3), finalist("ngram:2", 1.4), finalist("suffix:auto", 1.2)) == "ngram:2"
    assert advised(finalist("suffix:4", 1.3), finalist("suffix:auto", 1.31)) == "suffix:auto"


def test_small_or_uncertain_gains_are_not_advised() -> None:
    """A single group of questions, which gives no interval, is the most uncertain."""
    assert advised(finalist("suffix:4", 1.3, 0.4), finalist("ngram:2", 1.1, 0.1)) == "ngram:2"
    assert advised(finalist("suffix:4", 0.5), finalist("suffix:1", 0.8)) == "plain"
    assert advised(finalist("suffix:4", 1.01, 0.01)) == "plain"
    assert advised(finalist("suffix:4", 1.5, None)) == "plain"


def test_the_advice_is_for_every_batch_size() -> None:
    deep = finalist("suffix:8", 1.6), finalist("suffix:8", 0.8, batch_size=8)
    flat = finalist("suffix:2", 1.2), finalist("suffix:2", 1.1, batch_size=8)
    assert advised(*deep, *flat) == "suffix:2"
    assert advised(*deep) == "plain"
    assert [one.configuration.batch_size for one in choose([*deep, *flat]).of] == [1, 8]


def test_predictions_and_measurements_count_equally() -> None:
    """Both measure the times of the same prompts, so that chance in one of them does not decide."""
    configuration = Configuration("suffix", 4)
    predicted = Prediction(configuration, 100.0, Ratio(1.0, Interval(0.9, 1.1)))
    lucky = Finalist(configuration, predicted, Ratio(1.44, Interval(1.4, 1.5)), 100.0)
    assert lucky.expected.value == pytest.approx(1.2)
    assert lucky.expected.interval == Interval(pytest.approx(1.26**0.5), pytest.approx(1.65**0.5))
    assert advised(lucky, finalist("ngram:auto", 1.3)) == "ngram:auto"


speedups = st.lists(
    st.builds(
        finalist,
        st.sampled_from(["suffix:1", "suffix:4", "ngram:2", "draft_model:auto"]),
        st.floats(0.2, 4.0),
        st.one_of(st.none(), st.floats(0.0, 0.2)),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda one: one.configuration.name,
)


@given(speedups)
def test_advice_is_never_much_slower_than_the_best(finalists: list[Finalist]) -> None:
    """Compared with the best configuration that is certain enough, and with plain decoding."""
    advice = choose(finalists)
    certain = [one for one in finalists if one.measured.interval is not None and one.measured.interval.low >= RISK]
    best = max((one.measured.value for one in certain), default=1.0)
    own = 1.0 if advice.is_plain else advice.of[0].measured.value
    assert own >= 1.0
    assert own * WORTH >= best


def test_the_shortest_and_longest_drafts_are_always_run() -> None:
    for most in range(1, 20):
        depths = depths_for(most)
        assert (depths[0], depths[-1]) == (1, most)
        assert len(depths) <= 3


def one_round() -> dict[str, Any]:
    """Arguments of run_tune that give each of its two parts time for one round: the clock advances when a round ends."""
    seconds = 0.0

    def over(share: float) -> None:
        nonlocal seconds
        if share not in (0.0, 0.5):  # the times at which the two parts begin
            seconds += 1000.0

    return {"budget": 10.0, "now": lambda: seconds, "progress": over}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_threads=1, seed=0)


@pytest.fixture(scope="module")
def result(llm: LLM) -> TuneResult:
    """The result for one group of questions at each of two batch sizes."""
    return run_tune(llm, ["suffix", "draft_model"], (1, 2), built_in_workload().first(4), SHORT, most=3, **one_round())


def test_every_drafter_depth_and_batch_size_is_predicted(result: TuneResult) -> None:
    found = {(o.method, o.speculative_tokens, o.batch_size) for o in (p.configuration for p in result.predictions)}
    assert found == {(m, g, b) for m in ("suffix", "draft_model") for g in (1, 2, 3) for b in (1, 2)}
    assert len(result.predictions) == len(found)
    assert all(one.speedup.value > 0 for one in result.predictions)


def test_the_best_few_and_auto_are_run(result: TuneResult) -> None:
    for size in (1, 2):
        of_size = [one for one in result.finalists if one.configuration.batch_size == size]
        best = next(p.configuration.name for p in result.predictions if p.configuration.batch_size == size)
        assert best in {one.configuration.name for one in of_size}
        assert any(one.configuration.speculative_tokens == "auto" for one in of_size)
        assert len(of_size) <= 6


def test_with_one_group_of_questions_plain_decoding_is_advised(result: TuneResult) -> None:
    assert result.advice.is_plain
    assert "Do not speculate" in sentences(result)[0]
    assert "too few prompts" in sentences(result)[0]
    settings, _ = as_settings(result)
    assert (settings.method, settings.speculative_tokens) == ("none", 0)


def test_the_report_has_every_finalist(result: TuneResult) -> None:
    rows = table_rows(result)
    for one in result.finalists:
        head = [str(one.configuration.batch_size), one.configuration.method, str(one.configuration.speculative_tokens)]
        assert head in [row[:3] for row in rows]
    found = as_dict(result)
    assert found["schema"] == "foredraft.tune"
    assert len(found["predicted"]) == len(result.predictions)
    assert found["advice"]["speculate"] is False


def test_a_too_short_budget_cuts_work_and_reports_it(llm: LLM) -> None:
    """On a machine on which each reading of the clock is a second later."""
    seconds = count()
    questions, params = built_in_workload().first(3), SamplingParams(max_tokens=40, temperature=0.0)
    found = run_tune(
        llm, ["suffix", "ngram"], (1,), questions, params, most=3, budget=4.0, now=lambda: float(next(seconds))
    )
    assert {one.configuration.method for one in found.predictions} == {"suffix"}
    assert len(found.finalists) == 1
    said = " ".join(found.cut)
    assert "skipped, because the budget was used up: ngram" in said
    assert f"texts of {found.bench.params.max_tokens} tokens instead of 40" in said
    assert "1 of 3 questions" in said
    assert all(line in sentences(found)[-1] for line in found.cut)
    assert as_dict(found)["settings"]["cut"] == list(found.cut)


def test_nothing_is_left_in_the_engine(llm: LLM, result: TuneResult) -> None:
    llm.engine.drop_retained()
    assert llm.engine.pool.used == 0


def test_a_drafter_can_be_an_object(llm: LLM) -> None:
    found = run_tune(llm, [Useless()], (1,), built_in_workload().first(2), SHORT, most=2, **one_round())
    assert {one.configuration.name for one in found.predictions} == {"Useless:1", "Useless:2"}
    assert found.advice.is_plain


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no drafter": ({"methods": []}, "at least one drafter"),
    "plain decoding": ({"methods": ["none"]}, "always run"),
    "unknown drafter": ({"methods": ["magic"]}, "magic"),
    "batch size 0": ({"batch_sizes": (0,)}, "batch sizes"),
    "no batch size": ({"batch_sizes": ()}, "batch sizes"),
    "no draft token": ({"most": 0}, "at least 1 draft token"),
    "no end": ({"params": SamplingParams(max_tokens=None)}, "max_tokens"),
    "too long": ({"params": SamplingParams(max_tokens=100_000)}, "context"),
    "negative budget": ({"budget": -1.0}, "budget"),
}


@pytest.mark.parametrize(("settings", "words"), BAD.values(), ids=BAD.keys())
def test_configurations_that_cannot_run_are_refused_first(llm: LLM, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ForedraftError, match=words):
        run_tune(llm, **{"budget": 0.001, **settings})
