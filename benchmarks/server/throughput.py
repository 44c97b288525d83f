"""The server's overhead over the same engine without it.

    python -m benchmarks.server.throughput [--model DIR] [--draft-model DIR] [--quantization int8] [--batch 8] [--rounds 7]

Throughput: a batch of greedy prompts that ignore the end of sequence, run in turn with `LLM.generate`, over HTTP, and over HTTP as
streams, on one engine, with the client in its own process. The result is the median over the rounds of the ratio of tokens per
second. First token under load: while all but one text of a batch are streamed, prompts of several lengths arrive one by one. The
bound follows from the engine's budget of tokens per pass: the number of passes that a prompt needs, plus the one in progress, times
the slowest pass of that time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.paths import MODELS
from benchmarks.common.prompts import code_prompts, story_prompts
from benchmarks.server.http_client import ask
from foredraft import LLM, SamplingParams
from foredraft.engine.step import Step
from foredraft.model import EMBEDDED
from foredraft.server import ServerSettings, create_app
from foredraft.server.http_server import listen, make_server
from foredraft.utils.machine import this_machine


class Passes:
    """An observer of when each step ended, and how long it took."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []

    def observe(self, step: Step) -> None:
        self.steps.append((time.perf_counter(), step.total_time))

    def slowest(self, begin: float, end: float) -> float:
        return max((seconds for at, seconds in self.steps if begin <= at <= end), default=0.0)


class Client:
    """Sends requests from its own process."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.server.throughput", "client", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, bodies: Sequence[dict[str, Any]], delays: Sequence[float] | None = None) -> dict[str, Any]:
        """Send all requests at once, or each after its delay in seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"bodies": list(bodies), "delays": list(delays or ())}) + "\n")
        self._process.stdin.flush()
        results: dict[str, Any] = json.loads(self._process.stdout.readline())
        return results

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


async def client(url: str) -> None:
    """The client's process: reads a job per line, writes a result per line."""

    async def one(body: dict[str, Any], delay: float) -> Any:
        await asyncio.sleep(delay)
        return await ask(url, body)

    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        job = json.loads(line)
        delays = job["delays"] or [0.0] * len(job["bodies"])
        started = time.perf_counter()
        answers = await asyncio.gather(*map(one, job["bodies"], delays))
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "answers": [vars(answer) for answer in answers]}), flush=True)


@contextmanager
def served(llm: LLM) -> Iterator[str]:
    app = create_app(ServerSettings(), lambda: llm)
    listener = listen("127.0.0.1", 0)
    server = make_server(app)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.end()
        thread.join()


def throughput(llm: LLM, http: Client, args: argparse.Namespace) -> dict[str, Any]:
    half = args.batch // 2
    prompts = [*code_prompts(half), *story_prompts(args.batch - half)]
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=0, ignore_eos=True, speculative_tokens=args.speculative_tokens
    )
    body = {
        "max_tokens": args.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "speculative_tokens": args.speculative_tokens,
    }
    stream = {"stream": True, "stream_options": {"include_usage": True}}

    def offline() -> tuple[float, list[str]]:
        started = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - started
        return seconds, [output.outputs[0].text for output in outputs]

    def over_http(**more: Any) -> tuple[float, list[str]]:
        results = http.ask([{**body, "prompt": prompt, **more} for prompt in prompts])
        assert all(answer["is_complete"] for answer in results["answers"]), results
        return results["seconds"], [answer["texts"][0] for answer in results["answers"]]

    systems: dict[str, Callable[[], tuple[float, list[str]]]] = {
        "offline": offline,
        "http": over_http,
        "http, streamed": lambda: over_http(**stream),
    }
    for run in systems.values():
        run()  # to warm up
    rows: list[dict[str, float]] = []
    identical = True
    for number in range(args.rounds):
        order = list(systems) if number % 2 == 0 else list(reversed(systems))
        row, texts = {}, []
        for name in order:
            seconds, results = systems[name]()
            row[name] = args.batch * args.max_tokens / seconds
            texts.append(results)
        identical &= all(one == texts[0] for one in texts)
        rows.append(row)
        print({name: round(rate, 1) for name, rate in row.items()}, file=sys.stderr)
    return {
        "tokens_per_second": {name: median(row[name] for row in rows) for name in systems},
        "over_offline": {
            name: median(row[name] / row["offline"] for row in rows) for name in systems if name != "offline"
        },
        "identical": identical,
        "rounds": rows,
    }


def first_tokens(llm: LLM, http: Client, args: argparse.Namespace) -> list[dict[str, Any]]:
    """For each prompt length: times to first token while other texts are written."""
    passes = Passes()
    llm.engine.observers.append(passes)
    budget, story = args.max_num_batched_tokens, story_prompts(1)[0]
    background = {"prompt": story, "max_tokens": args.load_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    results = []
    for length in args.lengths:
        times, bounds = [], []
        for number in range(args.repeats):
            probe = {"prompt": _ids(llm, length, number), "max_tokens": 1, "temperature": 0, "stream": True}
            began = time.perf_counter()
            answers = http.ask([background] * (args.batch - 1) + [probe], [0.0] * (args.batch - 1) + [args.after])[
                "answers"
            ]
            took = answers[-1]["first_seconds"]
            slowest = passes.slowest(began + args.after * 0.9, began + args.after + took + 0.1)
            num_passes = math.ceil(length / max(budget - _rows_of_others(args), 1))
            times.append(took)
            bounds.append((num_passes + 1) * slowest)
        results.append(
            {
                "prompt_tokens": length,
                "median": median(times),
                "worst": max(times),
                "bound": median(bounds),
                "most_of_bound": max(time / bound for time, bound in zip(times, bounds, strict=True)),
                "times": times,
            }
        )
        print(results[-1], file=sys.stderr)
    llm.engine.observers.remove(passes)
    return results


def _rows_of_others(args: argparse.Namespace) -> int:
    gamma = args.speculative_tokens if isinstance(args.speculative_tokens, int) else 8
    return int((args.batch - 1) * (gamma + 1))


def _ids(llm: LLM, length: int, number: int) -> list[int]:
    """Different words for each number, so that nothing is found in the prefix cache."""
    stories = story_prompts(400)
    start = (37 * number + length) % (len(stories) // 2)
    ids = llm.text_tokenizer(" ".join(stories[start:]), verbose=False)["input_ids"]
    assert len(ids) >= length
    return [int(token) for token in ids[:length]]


def main() -> None:
    if sys.argv[1:2] == ["client"]:
        asyncio.run(client(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODELS / "wide")
    parser.add_argument("--draft-model", default=EMBEDDED / "draft")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--speculative-tokens", type=lambda s: int(s) if s.isdecimal() else s, default=4)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="*", default=[16, 256, 1000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--load-tokens", type=int, default=160)
    parser.add_argument("--after", type=float, default=0.5, help="seconds from the beginning of the load to the prompt")
    parser.add_argument("--output", type=Path, help="save the result as JSON")
    args = parser.parse_args()
    llm = LLM(
        args.model,
        args.draft_model,
        dtype="bfloat16",
        quantization=args.quantization,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )
    with served(llm) as url:
        http = Client(url)
        result: dict[str, Any] = {
            "machine": vars(this_machine()) if hasattr(this_machine(), "__dict__") else str(this_machine()),
            "settings": {name: str(value) for name, value in vars(args).items()},
            "throughput": throughput(llm, http, args),
            "first_token": first_tokens(llm, http, args),
        }
        http.close()
    print(json.dumps(result["throughput"]["over_offline"]))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
