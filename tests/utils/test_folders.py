"""Directories of reports are created before a measurement, and removed again if it fails before it wrote anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from foredraft.errors import ForedraftError
from foredraft.utils.folders import report_directory


def fail_in(directory: Path, *, file: str | None = None) -> None:
    with report_directory(directory):
        if file is not None:
            (directory / file).write_text("")
        raise ForedraftError("no")


def test_a_new_directory_is_removed_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ForedraftError, match=r"^no$"):
        fail_in(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_files_and_older_directories_are_kept(tmp_path: Path) -> None:
    with pytest.raises(ForedraftError):
        fail_in(tmp_path / "new", file="report.md")
    (tmp_path / "old").mkdir()
    with pytest.raises(ForedraftError):
        fail_in(tmp_path / "old")
    assert (tmp_path / "new" / "report.md").exists()
    assert (tmp_path / "old").exists()


def test_the_directory_is_kept_after_a_success(tmp_path: Path) -> None:
    with report_directory(tmp_path / "deep" / "new"):
        pass
    assert (tmp_path / "deep" / "new").is_dir()


def test_an_impossible_directory_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ForedraftError, match="cannot be used as the report's directory: Not a directory"),
        report_directory(tmp_path / "file" / "new"),
    ):
        pass
