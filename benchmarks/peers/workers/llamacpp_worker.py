"""llama.cpp: its own server, one per mode and γ, asked over HTTP with token ids.

Prompt caching is off. Fixed when a server starts: the drafter and γ. A batch is as many requests at once as slots.
"""

from __future__ import annotations

import atexit
import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.peers.workers.protocol import Count, Counts, Ids, Job, Run, Settings, serve

_SERVER = Path(sys.prefix) / "bin" / "llama-server"
_START_SECONDS = 120


def load(settings: Settings) -> tuple[dict[str, str], Any]:
    url = _start(settings)

    def write(job: Job) -> tuple[Ids, Count]:
        if (job.mode, job.gamma) != (settings.mode, settings.gamma):
            raise ValueError("this server was started for another mode")
        with ThreadPoolExecutor(len(job.prompts)) as pool:
            answers = list(pool.map(lambda prompt: _ask(url, _request(prompt, job)), job.prompts))
        return [answer["tokens"] for answer in answers], lambda: Counts() if job.mode == "plain" else _counts(answers)

    def pipeline(job: Job) -> Run:
        return write

    return _versions(), pipeline


def _versions() -> dict[str, str]:
    """Compiled for this machine's processor by the set-up."""
    told = subprocess.run([_SERVER, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"version:\s*(.+)", told.stdout + told.stderr)
    source = (Path(sys.prefix) / "source-version").read_text().strip()
    return {"llama.cpp": found.group(1) if found else "unknown", "source": source}


def _start(settings: Settings) -> str:
    port = _free_port()
    log = sys.stderr
    server = subprocess.Popen([_SERVER, *_arguments(settings, port)], stdout=log, stderr=log)
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


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(timeout=10)
    except subprocess.TimeoutExpired:
        server.kill()


def _arguments(settings: Settings, port: int) -> list[str]:
    slots = max(settings.batch, 1)
    threads = str(settings.threads)
    arguments = ["--model", _model(settings, "target"), "--host", "127.0.0.1", "--port", str(port), "--offline"]
    arguments += ["--threads", threads, "--threads-batch", threads, "--poll", "0", "--threads-http", str(slots + 1)]
    arguments += ["--parallel", str(slots), "--ctx-size", str(slots * settings.context), "--cache-ram", "0", "--no-ui"]
    if settings.mode == "draft_model":
        arguments += ["--spec-type", "draft-simple", "--spec-draft-n-max", str(settings.gamma)]
        arguments += ["--model-draft", _model(settings, "draft"), "--threads-draft", threads]
    elif settings.mode == "ngram":
        # the default n-gram, 12 tokens, hardly ever comes twice in a text this short
        arguments += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3"]
        arguments += ["--spec-ngram-simple-size-m", str(settings.gamma)]
    elif settings.mode != "plain":
        raise ValueError(f"no mode {settings.mode}")
    return arguments


def _model(settings: Settings, name: str) -> str:
    return str(settings.models / f"{name}-{settings.precision}.gguf")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _request(prompt: list[int], job: Job) -> dict[str, Any]:
    request: dict[str, Any] = {
        "prompt": prompt,
        "n_predict": job.max_tokens,
        "ignore_eos": True,
        "return_tokens": True,
        "cache_prompt": False,
        "temperature": job.temperature,
        "samplers": ["temperature"],
    }
    if job.temperature > 0:
        request["seed"] = job.seed
    else:
        request |= {"samplers": ["top_k"], "top_k": 1}
    return request


def _ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/completion", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def _counts(answers: list[dict[str, Any]]) -> Counts:
    timings = [answer["timings"] for answer in answers]
    accepted = sum(one.get("draft_n_accepted", 0) for one in timings)
    written = sum(len(answer["tokens"]) for answer in answers)
    return Counts(written - accepted, None, sum(one.get("draft_n", 0) for one in timings), accepted)


if __name__ == "__main__":
    serve(load)
