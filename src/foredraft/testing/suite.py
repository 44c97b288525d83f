"""Runs a contract: a class in which each method named test_* checks one clause."""

from __future__ import annotations


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
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        return f"- {name.removeprefix('test_').replace('_', ' ')}: {kind}{error}"
    return None


def name_of(subject: object) -> str:
    return str(getattr(subject, "__name__", type(subject).__name__))
