"""What a round trip to a draft server costs, compared with its parts.

    python -m benchmarks.drafters.remote_round_trip [--batch 1 8] [--rounds 2000] [--repeats 5]

A draft server in another process of this machine answers at once, with four tokens for every sequence; each text grows by three
tokens a round. `round trip` is a call of RemoteDrafter.propose, from its requests to its proposal. It is compared with a frame of similar
size sent over the bare encrypted socket and back (`socket`), with both ends in one process without a socket (`no socket`), and with the
same drafter called in this process (`here`); the difference to the last is the cost of drafting elsewhere.
Medians and 90th percentiles; of several repeats the best, the middle and the worst median, since a single one says little on a shared
machine. `processor` is the processor time of a round trip in each of the two processes, over all threads: it does not depend on other
programs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from foredraft.draft_server import DraftServer
from foredraft.drafters import RemoteDrafter, ScriptedDrafter
from foredraft.engine.proposal import DraftRequest
from foredraft.remote import Connection, Listener, Patience, VocabularyIdentity
from foredraft.remote.sockets import Caller
from foredraft.testing.requests import request_for
from foredraft.utils.machine import this_machine

DRAFT, GROWTH, PROMPT = 4, 3, 200
VOCAB = 1 << 15


def drafter() -> ScriptedDrafter:
    return ScriptedDrafter(lambda request: [7, 8, 9, 10])


def serve(key: bytes, pipe: Pipe) -> None:
    server = DraftServer(drafter(), Listener("tcp://127.0.0.1:0", key))
    pipe.send(server.address)
    server.run()


def echo(key: bytes, pipe: Pipe) -> None:
    listener = Listener("tcp://127.0.0.1:0", key)
    pipe.send(listener.address)
    while True:
        received = listener.receive(1.0)
        if received is not None:
            listener.send(*received)


class Process:
    """A server in its own process."""

    def __init__(self, run: Callable[[bytes, Pipe], None], key: bytes) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        self._process = context.Process(target=run, args=(key, there), daemon=True)
        self._process.start()
        self.address: str = here.recv()

    def processor_seconds(self) -> float:
        """Processor time used so far (Linux)."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


class InOneProcess:
    """Both ends of a connection: the server answers when the client waits for it."""

    address = "here"

    def __init__(self) -> None:
        self._server = DraftServer(drafter(), Inbox(self))  # type: ignore[arg-type]
        self.asked: list[bytes] = []
        self.answered: list[bytes] = []

    def send(self, frame: bytes) -> bool:
        self.asked.append(frame)
        return True

    def receive(self, timeout: float) -> bytes | None:
        self._server.answer_waiting()
        return self.answered.pop() if self.answered else None

    def close(self) -> None: ...


class Inbox:
    """The server's end of the connection."""

    address = "here"

    def __init__(self, ends: InOneProcess) -> None:
        self._ends = ends

    def receive(self, timeout: float) -> tuple[bytes, bytes] | None:
        return (b"", self._ends.asked.pop()) if self._ends.asked else None

    def send(self, client: bytes, frame: bytes) -> None:
        self._ends.answered.append(frame)

    def close(self) -> None: ...


def rounds(ask: Callable[[list[DraftRequest]], Any], batch: int, count: int) -> list[float]:
    """Seconds of each call; the first tenth of the calls is left out as warm-up."""
    texts = [[b + 1] * PROMPT for b in range(batch)]
    requests = [request_for(b, text, DRAFT) for b, text in enumerate(texts)]
    seconds = []
    for number in range(count):
        for text in texts:
            text += [number % VOCAB] * GROWTH
        started = time.perf_counter()
        ask(requests)
        seconds.append(time.perf_counter() - started)
    return seconds[count // 10 :]


def of_socket(caller: Caller, size: int, count: int) -> list[float]:
    frame, seconds = bytes(size), []
    while not caller.send(frame):
        time.sleep(0.01)
    caller.receive(10.0)
    for _ in range(count):
        started = time.perf_counter()
        caller.send(frame)
        caller.receive(10.0)
        seconds.append(time.perf_counter() - started)
    return seconds


def summary(repeats: list[list[float]]) -> dict[str, float]:
    """Over the repeats, in milliseconds: best, middle and worst median, and the median of the 90th percentiles."""
    medians = sorted(statistics.median(each) * 1e3 for each in repeats)
    p90 = statistics.median(statistics.quantiles(each, n=10)[-1] * 1e3 for each in repeats)
    middle = statistics.median(medians)
    return {
        name: round(ms, 4)
        for name, ms in zip(("best", "median", "worst", "p90"), (medians[0], middle, medians[-1], p90), strict=True)
    }


def measure(batches: list[int], num_rounds: int, num_repeats: int) -> dict[str, Any]:
    key = secrets.token_hex(16).encode()
    server, mirror = Process(serve, key), Process(echo, key)
    try:
        connection = Connection(Caller(server.address, key), server.address, VocabularyIdentity(VOCAB))
        connection.greet(30.0)
        caller = Caller(mirror.address, key)
        found: dict[str, Any] = {}
        for batch in batches:
            remote = RemoteDrafter(connection, Patience(1.0, 1.0), VOCAB)
            kinds: dict[str, list[list[float]]] = {"round trip": [], "socket": [], "no socket": [], "here": []}
            near = RemoteDrafter(
                Connection(InOneProcess(), "here", VocabularyIdentity(VOCAB)), Patience(1.0, 1.0), VOCAB
            )
            here = there = 0.0
            for _ in range(num_repeats):
                remote.forget([*range(batch)])
                here, there = here - time.process_time(), there - server.processor_seconds()
                kinds["round trip"].append(rounds(remote.propose, batch, num_rounds))
                here, there = here + time.process_time(), there + server.processor_seconds()
                kinds["socket"].append(of_socket(caller, 64 * batch, num_rounds))
                near.forget([*range(batch)])
                kinds["no socket"].append(rounds(near.propose, batch, num_rounds))
                kinds["here"].append(rounds(drafter().propose, batch, num_rounds))
            per_round = 1e3 / (num_repeats * num_rounds)
            used = {"target's process": round(here * per_round, 4), "server": round(there * per_round, 4)}
            found[f"batch {batch}"] = {name: summary(each) for name, each in kinds.items()} | {"processor": used}
        return found
    finally:
        server.stop()
        mirror.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    before = os.getloadavg()[0]
    found = measure(arguments.batch, arguments.rounds, arguments.repeats)
    machine = this_machine()
    load = [round(each, 1) for each in (before, os.getloadavg()[0])]
    print(
        json.dumps({"machine": str(machine), "load average, before and after": load, "milliseconds": found}, indent=2)
    )


if __name__ == "__main__":
    main()
