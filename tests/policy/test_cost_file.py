"""One process stores its costs and another loads them. Unusable files are ignored, with one warning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from foredraft.policy import CostFile, CostModel

SUBJECT = {"machine": "here", "target": "some", "drafters": ["a", "b"]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder for foredraft, replaced by a temporary one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "foredraft"


def measured() -> CostModel:
    costs = CostModel()
    for _ in range(10):
        costs.record_step(1, 1, 0.010, sampled=False)
        costs.record_draft("a", 1, 4, 0, 0.003, sampled=False)
    return costs


def path_of(file: CostFile) -> Path:
    assert file.path is not None
    return file.path


def test_saved_costs_are_loaded(folder: Path) -> None:
    CostFile.of(SUBJECT).save(measured())
    assert CostFile.of(dict(reversed(SUBJECT.items()))).load().as_dict() == measured().as_dict()
    assert path_of(CostFile.of(SUBJECT)).parent == folder


@pytest.mark.slow
def test_another_process_finds_saved_costs() -> None:
    CostFile.of(SUBJECT).save(measured())
    code = (
        "import json, sys; from foredraft.policy import CostFile;"
        "print(json.dumps(CostFile.of(json.loads(sys.argv[1])).load().as_dict()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, json.dumps(SUBJECT)], capture_output=True, text=True, check=True, env=os.environ
    )
    assert json.loads(result.stdout) == json.loads(json.dumps(measured().as_dict()))


@pytest.mark.parametrize("other", [{"machine": "there"}, {"target": "another"}, {"drafters": ["b", "a"]}], ids=str)
def test_costs_of_another_subject_are_not_used(other: dict[str, object]) -> None:
    CostFile.of(SUBJECT).save(measured())
    assert CostFile.of({**SUBJECT, **other}).load().step_time(1, 1, sampled=False) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"null",
        b"\xff\xfe",
        b'{"steps": {}}',
        b'{"steps": 1, "drafts": 2, "reading": 3}',
        b'{"steps": {"greedy": [[1, 1, NaN]], "sampled": []}, "drafts": [], "reading": {}, "tree_factors": {}}',
    ],
    ids=str,
)
def test_a_damaged_file_is_replaced_with_one_warning(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    file = CostFile.of(SUBJECT)
    path_of(file).write_bytes(content)
    costs = file.load()
    assert costs.step_time(1, 1, sampled=False) is None
    (record,) = caplog.records
    assert str(file.path) in record.getMessage()
    assert "\n" not in record.getMessage()
    file.save(measured())
    assert CostFile.of(SUBJECT).load().as_dict() == measured().as_dict()


def test_another_users_file_is_not_read(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    file = CostFile.of(SUBJECT)
    file.save(measured())
    monkeypatch.setattr(os, "getuid", lambda: path_of(file).stat().st_uid + 1)
    assert file.load().step_time(1, 1, sampled=False) is None
    assert not caplog.records


def test_an_unwritable_folder_is_reported_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = CostFile.of(SUBJECT)
    folder.rmdir()
    folder.write_text("no folder")
    for _ in range(3):
        file.save(measured())
    assert len(caplog.records) == 1


def test_a_failed_write_leaves_the_old_file_and_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    file = CostFile.of(SUBJECT)
    file.save(measured())
    monkeypatch.setattr(os, "replace", full)
    file.save(CostModel())
    assert len(caplog.records) == 1
    assert list(folder.iterdir()) == [path_of(CostFile.of(SUBJECT))]
    assert CostFile.of(SUBJECT).load().as_dict() == measured().as_dict()


def test_without_a_path_nothing_is_stored_or_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = CostFile(None)
    file.save(measured())
    assert file.load().step_time(1, 1, sampled=False) is None
    assert not caplog.records
