"""The command line. Text and JSON go to standard output, everything about them to standard error.

Exit codes: 0; 1 where `check` does not pass; 2 for a mistake in the input, told in one line; 130 after Ctrl-C; 141 when a pipe's reader went away.
What is slow to import is imported where it is used, so that help is quick. A command is one file, named here.
"""

from foredraft.cli import bench, chat, check, demo, generate, inspect, serve, trace, train, tune
from foredraft.cli.app import app, main

__all__ = ["app", "bench", "chat", "check", "demo", "generate", "inspect", "main", "serve", "trace", "train", "tune"]
