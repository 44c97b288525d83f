"""Whose files and folders are used; and directories of reports, which are created before a measurement and removed again if it fails
before it wrote anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from foredraft.errors import ForedraftError
from foredraft.utils.folders import can_write, check_replaceable, is_ours, report_directory


def owned_by_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the path itself, and not what it links to, another user's."""
    real = os.lstat

    def lstat(asked: str | Path, **more: Any) -> os.stat_result:
        found = real(asked, **more)
        return os.stat_result((*found[:4], found.st_uid + 1, *found[5:])) if Path(asked) == path else found

    monkeypatch.setattr(os, "lstat", lstat)
    monkeypatch.setattr(Path, "lstat", lambda self: lstat(self))


def test_a_file_is_ours_if_its_folder_is_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "folder" / "file"
    file.parent.mkdir()
    assert not is_ours(file)
    file.write_text("")
    (tmp_path / "link").symlink_to(file.parent)
    assert is_ours(file)
    assert is_ours(tmp_path / "link" / "file")
    (file.parent / "linked").symlink_to(file)
    assert not is_ours(file.parent / "linked")
    assert not is_ours(file.parent)
    owned_by_another(file.parent, monkeypatch)
    assert not is_ours(file)
    assert not can_write(file.parent)


def test_a_folder_of_another_user_that_links_to_ours_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "ours")
    owned_by_another(tmp_path / "link", monkeypatch)
    assert not is_ours(tmp_path / "link" / "file")
    assert not can_write(tmp_path / "link")


def test_a_folder_that_cannot_be_searched_is_not_used(tmp_path: Path) -> None:
    """The name is too long for the system. A folder without permission raises OSError too, but not for root."""
    folder = tmp_path / ("x" * 300)
    assert not is_ours(folder / "file")
    assert not can_write(folder)


def test_only_empty_files_and_files_with_our_beginning_are_replaced(tmp_path: Path) -> None:
    file = tmp_path / "file"
    check_replaceable(file, b"<!doctype html>")
    for content in (b"", b"<!doctype html><p>", b"<!DOCTYPE html>"):
        file.write_bytes(content)
        check_replaceable(file, b"<!doctype html>")
    for content in (b"x", b"<!doctype", b"notes <!doctype html>"):
        file.write_bytes(content)
        with pytest.raises(
            ForedraftError, match="file: exists, and was not written by this command: give another file"
        ):
            check_replaceable(file, b"<!doctype html>")
    check_replaceable(Path(os.devnull), b"<!doctype html>")


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
