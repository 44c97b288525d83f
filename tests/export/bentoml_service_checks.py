"""Run by the interpreter of an environment with BentoML: serves exported services one after another, and reports their answers. JSON on
standard input and on the last line of standard output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PORT = 18741
START_SECONDS = 240

# the package of vLLM for processors has a command that looks for the package of vLLM for GPUs, and fails
VLLM_COMMAND = """#!/bin/sh
test "$1" = serve || exit 2
model=$2
shift 2
exec "{python}" -m vllm.entrypoints.openai.api_server --model "$model" "$@" {options}
"""
QUICK_AND_EXACT = "--dtype float32 --max-model-len 256 --enforce-eager"


@contextmanager
def serving(service: str, vllm_python: str) -> Iterator[None]:
    """BentoML with a service in Python, which finds vLLM under its usual name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "service.py").write_text(service)
        command = folder / "bin" / "vllm"
        command.parent.mkdir()
        command.write_text(VLLM_COMMAND.format(python=vllm_python, options=QUICK_AND_EXACT))
        command.chmod(0o755)
        variables = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "BENTOML_DO_NOT_TRACK": "True"}
        process = subprocess.Popen(
            [sys.executable, "-m", "bentoml", "serve", "service:VLLM", "--port", str(PORT)],
            cwd=folder,
            env=variables,
            stdout=sys.stderr,
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(timeout=60)


def answer(model: str, prompt: str) -> str:
    """The answer to a request, once the service is ready."""
    asked = {"model": model, "prompt": prompt, "max_tokens": 32, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                text: str = json.load(response)["choices"][0]["text"]
            return text
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > end:
                raise
            time.sleep(1)


def main() -> None:
    asked = json.load(sys.stdin)
    answers = {}
    for name, service in asked["services"].items():
        with serving(service, asked["vllm_python"]):
            answers[name] = answer(asked["model"], asked["prompt"])
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
