"""Progress bars while a model loads: only on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from foredraft.kernels import load_kernels, why_none
from foredraft.model.progress import with_bar
from tests.model import zoo
from tests.model.gguf.writing import write_model

LOAD = "import sys; from foredraft.model import LoadOptions, load_model; load_model(sys.argv[1], LoadOptions(device='cpu'))"


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return write_model(zoo.random_model(zoo.SPECIES["llama"].config()), tmp_path / "model.gguf", "Q4_0")


def output_on_a_terminal(command: list[str]) -> str:
    """The output of a command whose standard error is a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(command, stderr=theirs)
    os.close(theirs)
    parts = []
    try:
        while part := os.read(ours, 1 << 16):
            parts.append(part)
    except OSError:  # Linux: the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0
    return b"".join(parts).decode()


def test_a_progress_bar_does_not_change_the_items(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(with_bar(range(5), "Counting")) == [0, 1, 2, 3, 4]
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.skipif(load_kernels() is None, reason=f"no kernels: {why_none()}")
def test_a_gguf_file_shows_bars_on_a_terminal(gguf_file: Path) -> None:
    output = output_on_a_terminal([sys.executable, "-c", LOAD, str(gguf_file)])
    for phase, total in (("Reading", 2), ("Packing", 2), ("Checking", 8)):
        assert re.search(rf"{phase}: .*\b0/{total}\b", output), output
    assert output.rstrip(" ").endswith("\r"), "the last bar is still there"


@pytest.mark.slow
def test_a_gguf_file_shows_nothing_on_a_pipe(gguf_file: Path) -> None:
    result = subprocess.run([sys.executable, "-c", LOAD, str(gguf_file)], capture_output=True, text=True, check=True)
    assert result.stderr == ""
