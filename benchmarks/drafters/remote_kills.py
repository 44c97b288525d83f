"""What happens to texts when their draft server is killed repeatedly.

A draft server drafts for texts, half of them greedy and half of them seeded. While they are being written, its process gets SIGKILL,
and its keeper starts another one. Reports how many texts differ from plain decoding's (none may), and how long it took until there were
drafts again.

    python -m benchmarks.drafters.remote_kills [--kills 50] [--batch 8] [--ray]
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foredraft import LLM, SamplingParams
from foredraft.draft_server import DraftServerSettings
from foredraft.draft_server.kept import KeptServer
from foredraft.draft_server.supervised import supervised_server
from foredraft.model import EMBEDDED, LoadOptions
from foredraft.text.request import Request

PROMPTS = [
    f"Once upon a time, there was a little {name}"
    for name in ["girl", "boy", "dog", "cat", "bird", "fish", "tree", "star"]
]
LENGTH = 160
PATIENCE = 60.0


def params_of(batch: int) -> list[SamplingParams]:
    """Parameters of greedy and seeded texts, half of each."""
    samplings: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 5}]
    return [SamplingParams(max_tokens=LENGTH, ignore_eos=True, **samplings[i % 2]) for i in range(batch)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def num_drafted(llm: LLM) -> int:
    return llm.engine.stats.num_draft_tokens


def texts_of(requests: list[Request]) -> list[list[int]]:
    return [list(request.output().outputs[0].token_ids) for request in requests]


def started(llm: LLM, params: list[SamplingParams]) -> list[Request]:
    requests = [llm.frontend.prepare(prompt, each) for prompt, each in zip(PROMPTS, params, strict=False)]
    for request in requests:
        llm.frontend.start(request)
    return requests


class Trial:
    """The texts of one LLM while its draft server is killed."""

    def __init__(self, llm: LLM, params: list[SamplingParams], expected: list[list[int]]) -> None:
        self.llm, self.params, self.expected = llm, params, expected
        self.num_texts = self.num_wrong = 0
        self._requests: list[Request] = []

    def step(self) -> None:
        """Run one step. When all texts have ended, compare them and start again."""
        if not self.llm.engine.has_work:
            self.compare()
            self._requests = started(self.llm, self.params)
        self.llm.engine.step()

    def finish(self) -> None:
        while self.llm.engine.has_work:
            self.llm.engine.step()
        self.compare()

    def compare(self) -> None:
        for text, expected in zip(texts_of(self._requests), self.expected, strict=False):
            self.num_texts += 1
            self.num_wrong += text != expected
        self._requests = []

    def drafts_within(self, seconds: float) -> float | None:
        """Seconds until something was drafted, or None if nothing was within the limit."""
        began, before = time.monotonic(), num_drafted(self.llm)
        while time.monotonic() - began < seconds:
            self.step()
            if num_drafted(self.llm) > before:
                return time.monotonic() - began
        return None


def run(kills: int, batch: int, pid: Callable[[], int], llm: LLM) -> dict[str, Any]:
    params = params_of(batch)
    outputs = llm.with_drafter("none").generate(PROMPTS[:batch], params)
    trial, seconds = Trial(llm, params, [list(o.outputs[0].token_ids) for o in outputs]), list[float | None]()
    for number in range(kills):
        if trial.drafts_within(PATIENCE) is None:
            raise SystemExit("no drafts came, so there is nothing to kill")
        for _ in range(3 + number % 17):  # so that kills hit different positions in the text
            trial.step()
        os.kill(pid(), signal.SIGKILL)
        llm.engine.step()  # its request may have been answered before the kill
        seconds.append(trial.drafts_within(PATIENCE))
        print(f"{number + 1}: drafts again after {seconds[-1]} s", flush=True)
    trial.finish()
    back = [each for each in seconds if each is not None]
    return {
        "kills": kills,
        "batch": batch,
        "texts": trial.num_texts,
        "texts that differ": trial.num_wrong,
        "kills without return": kills - len(back),
        "seconds until drafts": {"median": statistics.median(back), "max": max(back)},
        "load average": os.getloadavg()[0],
    }


@contextmanager
def serving(address: str, key: bytes, *, by_ray: bool) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the id of the process that drafts."""
    settings = DraftServerSettings(os.fspath(EMBEDDED / "draft"), None, LoadOptions(device="cpu"), 1 << 28)
    if by_ray:
        with supervised_server(settings, address, key, cluster=None, num_threads=1) as actor:
            import ray

            yield lambda: int(ray.get(actor.pid.remote()))
        return
    server = KeptServer(settings, address, key, 1)
    threading.Thread(target=server.keep, daemon=True).start()
    try:
        yield lambda: server.pid or 0
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--ray", action="store_true", help="let Ray run the keeper")
    arguments = parser.parse_args()
    key, address = secrets.token_hex(16), f"tcp://127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder, serving(address, key.encode(), by_ray=arguments.ray) as pid:
        file = Path(folder, "key")
        file.write_text(key)
        given = {"address": address, "key_file": str(file), "max_wait": 0.25}
        llm = LLM(draft_server=given, speculative_tokens=4, num_threads=1, device="cpu", cache_memory=1 << 28)
        print(json.dumps(run(arguments.kills, arguments.batch, pid, llm), indent=2))


if __name__ == "__main__":
    main()
