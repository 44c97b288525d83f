"""The command line. Results go to standard output, everything about them to standard error.

Exit codes: 0; 1 if `check` does not pass; 2 for a mistake in the input, reported in one line; 130 after Ctrl-C; 141 if the
reader of a pipe is gone. Slow modules are imported where they are used, so that help and mistakes are quick. Each command is
a file or a folder, listed here.
"""

from foredraft.cli import bench, chat, check, demo, draft_server, export, generate, inspect, serve, trace, train, tune
from foredraft.cli.app import app, main

__all__ = [
    "app",
    "bench",
    "chat",
    "check",
    "demo",
    "draft_server",
    "export",
    "generate",
    "inspect",
    "main",
    "serve",
    "trace",
    "train",
    "tune",
]
