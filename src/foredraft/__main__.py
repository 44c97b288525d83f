"""The console script, and `python -m foredraft`. It handles Ctrl-C before it imports anything large."""

from __future__ import annotations

from foredraft.utils import startup


def main() -> None:
    startup.begin()
    from foredraft.cli import main as run

    run()


if __name__ == "__main__":
    main()
