"""Folders for files that outlive a process."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from foredraft.errors import ForedraftError


def user_folders() -> list[Path]:
    """The user's cache folder, if there is one, then a folder for temporary files. Try them in this order."""
    folders = [Path(tempfile.gettempdir()) / f"foredraft-{os.getuid()}"]
    root = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # a user without a home
        folders.insert(0, (Path(root) if root else Path.home() / ".cache") / "foredraft")
    return folders


def is_ours(file: Path) -> bool:
    """Whether a file exists, and it and its folder are this user's: in a folder of another user, it could be exchanged at any time.
    False too if the folder must not be searched."""
    try:
        return stat.S_ISREG(file.lstat().st_mode) and all(_is_users(path) for path in (file, file.parent))
    except OSError:
        return False


def can_write(folder: Path) -> bool:
    """Whether this user owns the folder, which is created if necessary, and may write to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return os.access(folder, os.W_OK) and _is_users(folder)
    except OSError:
        return False


def _is_users(path: Path) -> bool:
    """Whether this user owns a path, and the link if it is one."""
    return path.lstat().st_uid == path.stat().st_uid == os.getuid()


def check_replaceable(file: Path, beginning: bytes) -> None:
    """Raises ForedraftError for an existing file that does not begin like those that are written here, so that a wrong name replaces
    nothing. Empty files and devices may be written to."""
    try:
        if not file.is_file():
            return
        with file.open("rb") as stream:
            found = stream.read(len(beginning))
    except OSError:  # whoever writes to it says why
        return
    if found and found.lower() != beginning:
        raise ForedraftError(
            f"{file}: exists, and was not written by this command: give another file, or remove it first"
        )


def make_directory(directory: Path) -> None:
    """Create the directory of a report. Raises ForedraftError if that fails. Call this before a long measurement."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ForedraftError(f"{directory}: cannot be used as the report's directory: {error.strerror}") from None


@contextmanager
def report_directory(directory: Path) -> Iterator[None]:
    """See make_directory. A new directory is removed again if the body raises before anything is written to it."""
    is_new = not directory.exists()
    make_directory(directory)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # not empty
            if is_new:
                directory.rmdir()
        raise
