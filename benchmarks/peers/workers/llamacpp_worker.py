"""llama.cpp: its own server, one per mode and γ, which gets token ids over HTTP.

Prompt caching is off. A server's drafter and γ are fixed when it starts. A batch is sent as concurrent requests, one per slot.
The n-gram drafter matches three tokens: the default of 12 hardly ever occurs twice in texts this short.
"""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.peers.workers import llamacpp_program
from benchmarks.peers.workers.protocol import Count, Counts, Ids, Job, Run, Settings, serve


def load(settings: Settings) -> tuple[dict[str, str], Any]:
    server = _server()
    target, draft = (settings.models / f"{name}-{settings.precision}.gguf" for name in ("target", "draft"))
    url = server.start(settings, (target, draft))

    def write(job: Job) -> tuple[Ids, Count]:
        if (job.mode, job.gamma) != (settings.mode, settings.gamma):
            raise ValueError("this server was started for another mode")
        with ThreadPoolExecutor(len(job.prompts)) as pool:
            answers = list(pool.map(lambda prompt: _ask(url, _request(prompt, job)), job.prompts))
        return [answer["tokens"] for answer in answers], lambda: Counts() if job.mode == "plain" else _counts(answers)

    def pipeline(job: Job) -> Run:
        return write

    return server.facts(), pipeline


def _server() -> Any:
    """The compiled program if there is one, otherwise the wheel's server."""
    if llamacpp_program.PROGRAM.exists():
        return llamacpp_program
    from benchmarks.peers.workers import llamacpp_wheel

    return llamacpp_wheel


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
