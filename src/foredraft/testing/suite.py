"""Running a contract: a class whose methods named test_* each hold one clause."""

from __future__ import annotations


def run_suite(contract: object, subject: str) -> None:
    """Every clause, and then one AssertionError that names all that were broken. subject: what is tested, by name.

    pytest collects a subclass's clauses by itself; this is for everybody else.
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
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        return f"- {name.removeprefix('test_').replace('_', ' ')}: {kind}{error}"
    return None


def name_of(subject: object) -> str:
    return str(getattr(subject, "__name__", type(subject).__name__))
