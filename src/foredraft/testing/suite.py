"""Runs a contract: a class in which each method named test_* checks one clause."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import foredraft
from foredraft.errors import one_line

_LIBRARIES = (Path(foredraft.__file__).parent, *map(Path, map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))))
"""Folders of code that is not the subject's."""


def run_suite(contract: object, subject: str) -> None:
    """Run every clause, then raise one AssertionError that names all broken ones. subject: the name of the tested object.

    pytest collects the clauses of a subclass itself; this is for use without pytest.
    """
    clauses = [name for name in dir(contract) if name.startswith("test_")]
    broken = [found for name in clauses if (found := _broken(contract, name)) is not None]
    if broken:
        raise AssertionError(
            "\n".join([f"{subject} breaks its contract in {len(broken)} of {len(clauses)} clauses:", *broken])
        )


def _broken(contract: object, name: str) -> str | None:
    try:
        getattr(contract, name)()
    except Exception as error:  # the subject's own code runs inside
        return f"- {name.removeprefix('test_').replace('_', ' ')}: {_reason(error)}"
    return None


def _reason(error: Exception) -> str:
    """In one line. Of an error in the subject's own code, which may be an AssertionError too, also the place."""
    place = _place(error)
    if place is None:
        return str(error) if isinstance(error, AssertionError) else one_line(error)
    return f"{one_line(error)} (at {place})"


def _place(error: Exception) -> str | None:
    """FILE:LINE of the innermost call that is neither ours nor a library's; None if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(Path(frame.filename))]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else None


def _is_own(file: Path) -> bool:
    return file.is_file() and not any(file.is_relative_to(folder) for folder in _LIBRARIES)


def name_of(subject: object) -> str:
    return str(getattr(subject, "__name__", type(subject).__name__))
