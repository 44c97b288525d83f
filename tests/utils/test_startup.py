"""The start of a command: Ctrl-C during imports, and settings of libraries."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import foredraft
from foredraft.utils import startup

SCRIPT = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal: a job in the background ignores it

from importlib.abc import MetaPathFinder

MODULE = sys.argv[1]

class Interrupt(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from foredraft.__main__ import main
sys.argv = ["foredraft", *sys.argv[2:]]
main()
"""


def interrupted_at(module: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, module, *args],
        env=os.environ | {"PYTHONPATH": str(Path(foredraft.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


SOME_MODULES = ("foredraft.cli", "typer", "torch", "transformers")
OTHER_MODULES = ("torch._dynamo", "tokenizers", "transformers.modeling_utils", "foredraft.llm", "rich.console")


@pytest.mark.parametrize(
    "module", [*SOME_MODULES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHER_MODULES)]
)
def test_an_interrupt_while_modules_are_imported_ends_quietly(module: str) -> None:
    done = interrupted_at(module, "generate", "x", "--max-tokens", "1")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_changes_for_the_start_are_undone() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        startup.begin()
        assert not gc.isenabled()
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        startup.ready()
        assert gc.isenabled()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
        gc.enable()
        gc.unfreeze()


def test_a_foreign_signal_handler_is_kept() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a background job of a shell
    try:
        startup.begin()
        startup.ready()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
        gc.unfreeze()


@pytest.mark.parametrize("name", foredraft.__all__)
def test_public_names_can_be_imported(name: str) -> None:
    assert getattr(foredraft, name).__name__


def test_importing_the_package_imports_nothing_slow() -> None:
    names = ("torch", "transformers", "numpy")
    script = (
        "import sys, foredraft; from foredraft import SamplingParams, ForedraftError; SamplingParams(temperature=0.5); "
        f"print([n for n in {names} if n in sys.modules])"
    )
    source = str(Path(foredraft.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_generating_imports_only_what_it_needs() -> None:
    names = ("matplotlib", "pandas", "fastapi", "uvicorn", "ray", "trimesh", "sklearn", "foredraft.certificate")
    script = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print([n for n in {names} if n in sys.modules], file=sys.stderr))\n"
        "from foredraft.__main__ import main\n"
        "sys.argv = ['foredraft', 'generate', 'Once', '--max-tokens', '2', '--json']\n"
        "main()\n"
    )
    source = str(Path(foredraft.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.strip() == "[]"
