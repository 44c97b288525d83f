"""One process stores what its controller has measured, and another loads it. Unusable files are ignored, with one warning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from foredraft.policy import ControllerState, CostModel, StateFile

COSTS = b'{"costs": {"steps": {"greedy": [[1, 1, %s]], "sampled": []}, "drafts": [], "reading": {}, "tree_factors": {}}'
LEVELS = [
    b"3",
    b'{"a": 1}',
    b'{"a": [[1]]}',
    b'{"a": [[[-1]]]}',
    b'{"a": [[[NaN]]]}',
    b'{"a": [[["x"]]]}',
    b'{"a": [[[1%s]]]}' % (400 * b"0"),
]
SUBJECT = {"machine": "here", "target": "some", "drafters": ["a", "b"]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder for foredraft, replaced by a temporary one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "foredraft"


def measured() -> ControllerState:
    costs = CostModel()
    for _ in range(10):
        costs.record_step(1, 1, 0.010, sampled=False)
        costs.record_draft("a", 1, 4, 0, 0.003, sampled=False)
    return ControllerState(costs.known(), {"a": [[[8.0, 2.0], [6.0, 1.0]]]}, {"a": [[[1.5]]]})


def path_of(file: StateFile) -> Path:
    assert file.path is not None
    return file.path


def test_a_saved_state_is_loaded(folder: Path) -> None:
    StateFile.of(SUBJECT).save(measured())
    assert StateFile.of(dict(reversed(SUBJECT.items()))).load().as_dict() == measured().as_dict()
    assert path_of(StateFile.of(SUBJECT)).parent == folder


def test_a_cache_folder_that_cannot_be_searched_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user may not read the home of another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("x" * 300)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = StateFile.of(SUBJECT)
    file.save(measured())
    assert path_of(file).parent.parent == tmp_path
    assert StateFile.of(SUBJECT).load().as_dict() == measured().as_dict()


@pytest.mark.slow
def test_another_process_finds_a_saved_state() -> None:
    StateFile.of(SUBJECT).save(measured())
    code = (
        "import json, sys; from foredraft.policy import StateFile;"
        "print(json.dumps(StateFile.of(json.loads(sys.argv[1])).load().as_dict()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, json.dumps(SUBJECT)], capture_output=True, text=True, check=True, env=os.environ
    )
    assert json.loads(result.stdout) == json.loads(json.dumps(measured().as_dict()))


@pytest.mark.parametrize("other", [{"machine": "there"}, {"target": "another"}, {"drafters": ["b", "a"]}], ids=str)
def test_the_state_of_another_subject_is_not_used(other: dict[str, object]) -> None:
    StateFile.of(SUBJECT).save(measured())
    assert StateFile.of({**SUBJECT, **other}).load() == ControllerState()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"null",
        b"\xff\xfe",
        b'{"costs": {"steps": {}}}',
        b'{"costs": {"steps": 1, "drafts": 2, "reading": 3}, "chains": {}, "trees": {}}',
        COSTS % b"NaN" + b', "chains": {}, "trees": {}}',
        COSTS % b"0.1",
        COSTS % (b"1" + 400 * b"0") + b', "chains": {}, "trees": {}}',
        100_000 * b"[",
        *(COSTS % b"0.1" + b', "chains": %s, "trees": {}}' % levels for levels in LEVELS),
    ],
    ids=lambda content: str(content[:80]),
)
def test_a_damaged_file_is_replaced_with_one_warning(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    file = StateFile.of(SUBJECT)
    path_of(file).write_bytes(content)
    assert file.load() == ControllerState()
    (record,) = caplog.records
    assert str(file.path) in record.getMessage()
    assert "\n" not in record.getMessage()
    file.save(measured())
    assert StateFile.of(SUBJECT).load().as_dict() == measured().as_dict()


def test_another_users_file_is_not_read(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    file = StateFile.of(SUBJECT)
    file.save(measured())
    monkeypatch.setattr(os, "getuid", lambda: path_of(file).stat().st_uid + 1)
    assert file.load() == ControllerState()
    assert not caplog.records


def test_an_unwritable_folder_is_reported_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = StateFile.of(SUBJECT)
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

    file = StateFile.of(SUBJECT)
    file.save(measured())
    monkeypatch.setattr(os, "replace", full)
    file.save(ControllerState())
    assert len(caplog.records) == 1
    assert list(folder.iterdir()) == [path_of(StateFile.of(SUBJECT))]
    assert StateFile.of(SUBJECT).load().as_dict() == measured().as_dict()


def test_without_a_path_nothing_is_stored_or_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = StateFile(None)
    file.save(measured())
    assert file.load() == ControllerState()
    assert not caplog.records
