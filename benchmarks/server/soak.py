"""A server under load for a while: is it stable, and are its texts correct?

    python -m benchmarks.server.soak [--seconds 180] [--warm-up 15] [--clients 64] [--cut 0.2]

Starts `foredraft serve` with the embedded pair and sends requests from many streaming clients at once, some of which disconnect at
random. Then it checks four things: errors and stuck requests; the server's memory in the last minute against the first; the used cache
memory when idle, before and after; and every finished greedy text against that of `LLM.generate`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.common.prompts import code_prompts, story_prompts
from benchmarks.server.http_client import ask
from foredraft import LLM, SamplingParams


class Server:
    """The server in its own process."""

    def __init__(self, *args: str) -> None:
        command = [sys.executable, "-m", "foredraft.cli", "serve", "--port", "0", *args]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.startswith("{") and json.loads(line)["event"] == "listening":
                self.url: str = json.loads(line)["url"]
                break
        else:
            raise SystemExit("the server did not start")

    def read_log(self) -> list[dict[str, Any]]:
        """Read the log to its end. -> lines of level warning or worse. Meant for a thread."""
        assert self._process.stderr is not None
        lines = [json.loads(line) for line in self._process.stderr if line.startswith("{")]
        return [line for line in lines if line["level"] not in ("info", "debug")]

    @property
    def resident(self) -> int:
        """Resident memory in bytes."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) * 1024

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return float(next(line for line in text.splitlines() if line.startswith(f"foredraft:{name} ")).split()[1])

    def end(self) -> int:
        self._process.terminate()
        return self._process.wait(60)


async def soak(server: Server, prompts: list[str], args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(args.seed)
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    texts: dict[tuple[str, int], set[str]] = {}
    memory: list[tuple[float, int]] = []
    started = time.monotonic() + args.warm_up
    end = started + args.seconds

    async def one_client() -> None:
        while time.monotonic() < end:
            prompt, num_tokens = rng.choice(prompts), rng.choice((16, 48, 96))
            cut_after = rng.randrange(12) if rng.random() < args.cut else None
            body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True}
            try:
                answer = await asyncio.wait_for(ask(server.url, body, cut_after=cut_after), 120)
            except TimeoutError:
                outcomes["stuck"] += 1
                continue
            except OSError as error:
                outcomes["error"] += 1
                wrong.append(repr(error))
                continue
            if answer.is_cut:
                outcomes["cancelled"] += 1
            elif answer.is_complete:
                outcomes["finished"] += 1
                texts.setdefault((prompt, num_tokens), set()).add(answer.texts[0])
            else:
                outcomes["error"] += 1
                wrong.append(f"status {answer.status}")

    async def watch() -> None:
        while time.monotonic() < end:
            if time.monotonic() >= started:
                memory.append((time.monotonic() - started, server.resident))
            await asyncio.sleep(0.5)

    await asyncio.gather(watch(), *(one_client() for _ in range(args.clients)))
    return {"outcomes": dict(outcomes), "wrong": wrong[:10], "texts": texts, "memory": memory}


def until_idle(server: Server) -> float:
    """Seconds until nothing runs or waits."""
    started = time.monotonic()
    while server.metric("num_requests_running") or server.metric("num_requests_waiting"):
        if time.monotonic() - started > 60:
            raise SystemExit("requests are stuck")
        time.sleep(0.1)
    return time.monotonic() - started


def differences(texts: dict[tuple[str, int], set[str]]) -> int:
    """How many of the finished texts are not what the engine writes without a server."""
    llm = LLM()
    asked = sorted(texts)
    params = [SamplingParams(max_tokens=num_tokens, temperature=0) for _, num_tokens in asked]
    outputs = llm.generate([prompt for prompt, _ in asked], params)
    return sum(texts[key] != {output.outputs[0].text} for key, output in zip(asked, outputs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--warm-up", type=float, default=15, help="seconds before measuring, in which the cache fills")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--cut", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache-memory", default="128MiB", help="finished texts fill it up, so keep it small")
    parser.add_argument("--output", type=Path, help="save the result as JSON")
    args = parser.parse_args()
    prompts = [*code_prompts(12), *story_prompts(12)]
    server = Server("--cache-memory", args.cache_memory)
    with ThreadPoolExecutor(1) as pool:
        log = pool.submit(server.read_log)
        before = server.metric("kv_cache_usage_perc")
        results = asyncio.run(soak(server, prompts, args))
        idle_after = until_idle(server)
        after = server.metric("kv_cache_usage_perc")
        tokens = server.metric("generation_tokens_total")
        exit_code = server.end()
        warnings = log.result()
    window = min(60.0, args.seconds / 3)
    first = mean(size for at, size in results["memory"] if at <= window)
    last = mean(size for at, size in results["memory"] if at >= args.seconds - window)
    result = {
        "outcomes": results["outcomes"],
        "wrong": results["wrong"],
        "tokens_per_second": tokens / (args.warm_up + args.seconds),
        "memory_first": first,
        "memory_last": last,
        "memory_growth": last / first - 1,
        "idle_after_seconds": idle_after,
        "cache_before": before,
        "cache_after": after,
        "distinct_requests": len(results["texts"]),
        "different_texts": differences(results["texts"]),
        "exit_code": exit_code,
        "warnings": warnings[:10],
        "memory": results["memory"],
    }
    print(json.dumps({name: value for name, value in result.items() if name != "memory"}, indent=1))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
