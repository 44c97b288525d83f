"""Systems that take turns, with fake programs that answer at once and report made-up times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import contest, loading
from benchmarks.peers.contest import Field, Plan
from benchmarks.peers.first_token import Case, markdown, measure, parse_case
from benchmarks.peers.model_sets import ModelSet
from benchmarks.peers.systems import AUTO, HEAD, PLAIN, WITHOUT_GAMMA, Peer
from benchmarks.peers.workers.client import WorkerError
from benchmarks.peers.workers.protocol import Job, Settings

SECONDS = {"fast": 1.0, "slow": 4.0}
"""The seconds for a request of one prompt, by precision."""
REQUESTS = [[[1, 2, 3]], [[4, 5, 6]], [[7, 8, 9]]]


class FakeWorker:
    """Replaces a process: γ = 3 takes half of the time, and all others take twice the time."""

    started: list[FakeWorker]
    jobs: list[tuple[str, Job]]

    def __init__(self, module: str, environment: str, settings: Settings) -> None:
        if settings.precision == "absent":
            raise WorkerError("not for this processor")
        self.settings, self.facts, self.is_open = settings, {"version": "1"}, True
        self.started.append(self)

    def ask(self, job: Job) -> dict[str, Any]:
        assert self.is_open
        self.jobs.append((self.settings.precision, job))
        if self.settings.precision == "failing" and job.prompts == REQUESTS[1]:
            raise WorkerError("out of memory")
        factor = {0: 1.0, 3: 0.5}.get(job.gamma, 2.0)
        seconds = SECONDS.get(self.settings.precision, 1.0) * factor * len(job.prompts)
        ids = [[0] * job.max_tokens for _ in job.prompts]
        return {"seconds": seconds, "ids": ids, "stats": dict.fromkeys(("passes", "spec_steps", "drafted", "accepted"))}

    def close(self) -> None:
        self.is_open = False


@pytest.fixture(autouse=True)
def workers(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    FakeWorker.started, FakeWorker.jobs = [], []
    monkeypatch.setattr(contest, "Worker", FakeWorker)
    monkeypatch.setattr(contest.time, "sleep", lambda seconds: None)
    return FakeWorker


def peer(precision: str, *, separate: bool = False) -> Peer:
    return Peer(f"fake-{precision}", "fake_worker", precision, 4, (PLAIN, "ngram"), separate=separate)


def plan(requests: list[Any] = REQUESTS) -> Plan:
    return Plan(Path("models"), 1, 1, 8, 0.0, (2, 3), requests, [[[0]]])


@pytest.mark.parametrize("separate", [False, True])
def test_every_mode_runs_at_its_fastest_gamma(separate: bool) -> None:
    with Field(plan()) as field:
        field.enter(peer("fast", separate=separate), [PLAIN, "ngram"])
        assert [(one.mode, one.gamma) for one in field.contenders] == [(PLAIN, 0), ("ngram", 3)]
        assert sum(worker.is_open for worker in FakeWorker.started) == (2 if separate else 1)
        field.measure()
    assert [one.seconds for one in field.contenders] == [[1.0] * 3, [0.5] * 3]
    assert not any(worker.is_open for worker in FakeWorker.started)


def test_a_mode_without_gamma_runs_once() -> None:
    with Field(plan()) as field:
        field.enter(Peer("fake", "fake_worker", "fast", 4, WITHOUT_GAMMA), WITHOUT_GAMMA)
        assert [(contender.mode, contender.gamma) for contender in field.contenders] == [
            (PLAIN, 0),
            (AUTO, 0),
            (HEAD, 0),
        ]
    assert {job.gamma for _, job in FakeWorker.jobs} == {0}
    assert len(FakeWorker.jobs) == 3  # for warm-up


def test_the_first_system_rotates() -> None:
    with Field(plan()) as field:
        for precision in ("fast", "slow"):
            field.enter(peer(precision), [PLAIN])
        FakeWorker.jobs.clear()
        field.measure()
    assert [name for name, _ in FakeWorker.jobs] == ["fast", "slow", "slow", "fast", "fast", "slow"]


def test_a_program_that_fails_is_excluded_with_the_reason() -> None:
    with Field(plan()) as field:
        for precision in ("fast", "absent", "failing"):
            field.enter(peer(precision), [PLAIN])
        field.measure()
    assert [one.peer.precision for one in field.contenders] == ["fast"]
    assert field.skipped == {"fake-absent plain": "not for this processor", "fake-failing plain": "out of memory"}


def test_a_program_whose_environment_is_not_set_up_is_skipped() -> None:
    with Field(plan()) as field:
        field.enter(Peer("theirs", "fake_worker", "int4", 4, environment="nowhere"), [PLAIN])
    assert field.skipped == {"theirs": "not set up: python -m benchmarks.peers.compare --setup nowhere"}


@pytest.fixture
def model_set(tmp_path: Path) -> ModelSet:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(
        '{"hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,'
        ' "num_key_value_heads": 1, "head_dim": 2, "vocab_size": 10, "max_position_embeddings": 64}'
    )
    return ModelSet("toy", "Toy", tmp_path, ("target",), lambda tokenizer, count: [])


def test_the_first_token_of_a_batch_is_timed(model_set: ModelSet) -> None:
    case, batch = Case(3, 2), [[1, 2, 3], [4, 5, 6]]
    one_token = Plan(model_set.folder, 1, 2, 1, 0.0, (), [batch, batch], [batch])
    found = measure(model_set, [peer("fast"), peer("slow")], case, one_token)
    assert {job.max_tokens for _, job in FakeWorker.jobs} == {1}
    assert [(row["system"], row["seconds"]) for row in found["rows"]] == [("fake-fast", 2.0), ("fake-slow", 8.0)]
    fast = found["rows"][0]
    assert fast["prompt_tokens_per_second"] == 3 * 2 / 2.0
    # of one prompt: 2 layers of 144 for each token and 48 for attention, 40 for the head
    assert fast["billion_multiplications_per_second"] == pytest.approx(2 * (2 * (144 * 3 + 48) + 40) / 2.0 / 1e9)
    report = {"models": "toy", "machine": {"threads": 1}, "cases": [{"case": "3x2", **found}]}
    assert "| fake-slow | 3 | 2 | 8.000 (8.000 to 8.000) | 1 | 0 |" in markdown(report)


def test_a_program_is_restarted_for_every_load(model_set: ModelSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "Worker", FakeWorker)
    found = loading.measure([peer("fast"), peer("absent")], model_set, REQUESTS[0], 1, 3)
    assert len(FakeWorker.started) == len(found["seconds"]["fake-fast"]) == 3
    assert not any(worker.is_open for worker in FakeWorker.started)
    assert {job.max_tokens for _, job in FakeWorker.jobs} == {1}
    assert found["skipped"] == {"fake-absent": "not for this processor"}
    report = {"models": "toy", "machine": {"threads": 1}, **found, "seconds": {"fake-fast": [3.0, 1.0, 2.0]}}
    assert "| fake-fast | 2.0 | 1.0 | 3.0 |" in loading.markdown(report)


def test_a_case_is_a_length_and_a_batch() -> None:
    assert parse_case("512x16") == Case(512, 16)
    for wrong in ("512", "x", "0x1", "4x-1"):
        with pytest.raises(ValueError):  # noqa: PT011
            parse_case(wrong)
