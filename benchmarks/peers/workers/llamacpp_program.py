"""llama.cpp's server as a program compiled for this processor, used if the wheel would not use all of its instructions."""

from __future__ import annotations

import atexit
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from benchmarks.peers.workers.protocol import Settings

PROGRAM = Path(sys.prefix) / "bin" / "llama-server"
_START_SECONDS = 120


def start(settings: Settings, files: tuple[Path, Path]) -> str:
    """-> the server's address. files: the target's and the draft model's. Raises ValueError for a mode that llama.cpp lacks."""
    port = _free_port()
    server = subprocess.Popen([PROGRAM, *_arguments(settings, files, port)], stdout=sys.stderr, stderr=sys.stderr)
    atexit.register(_stop, server)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"llama-server ended with status {server.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1):
                return url
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("llama-server did not become ready")


def facts() -> dict[str, str]:
    run = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"version:\s*(.+)", run.stdout + run.stderr)
    source = (Path(sys.prefix) / "source-version").read_text().strip()
    return {"llama.cpp": version.group(1) if version else "unknown", "compiled from": source}


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(timeout=10)
    except subprocess.TimeoutExpired:
        server.kill()


def _arguments(settings: Settings, files: tuple[Path, Path], port: int) -> list[str]:
    slots = max(settings.batch, 1)
    threads = str(settings.threads)
    arguments = ["--model", str(files[0]), "--host", "127.0.0.1", "--port", str(port), "--offline"]
    arguments += ["--threads", threads, "--threads-batch", threads, "--poll", "0", "--threads-http", str(slots + 1)]
    arguments += ["--parallel", str(slots), "--ctx-size", str(slots * settings.context), "--cache-ram", "0", "--no-ui"]
    if settings.mode == "draft_model":
        arguments += ["--spec-type", "draft-simple", "--spec-draft-n-max", str(settings.gamma)]
        arguments += ["--model-draft", str(files[1]), "--threads-draft", threads]
    elif settings.mode == "ngram":
        arguments += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3"]
        arguments += ["--spec-ngram-simple-size-m", str(settings.gamma)]
    elif settings.mode != "plain":
        raise ValueError(f"no mode {settings.mode}")
    return arguments


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
