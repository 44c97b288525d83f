"""Two replicas on Ray, as the command starts them, and what clients see if one of them is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx2
import openai
import pytest

import foredraft
from foredraft import LLM, SamplingParams
from foredraft.server.replicas.forwarded_request import PREFIX_CHARACTERS
from foredraft.server.replicas.prefix_routing import rank_replicas
from foredraft.settings import Settings

pytest.importorskip("ray")
grpc = pytest.importorskip("grpc")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

KEY = "secret"
STORY = "Once upon a time, there was a little"
PROMPTS = [f"{STORY} {name}" for name in ("girl", "boy", "dog", "cat", "bird", "fish", "tree", "star")]
LENGTH = 200
STREAM_LENGTH = 1800
"""Tokens of a stream that must not end before its replica is killed."""
Result = tuple[str, str, bool]
"""(the prompt, the text, whether the text is complete)"""


@dataclass
class Cluster:
    url: str
    process: subprocess.Popen[str]

    def get(self, path: str) -> httpx2.Response:
        return httpx2.get(self.url + path, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)

    def counts(self, name: str) -> dict[str, float]:
        """See `counts_in`."""
        return counts_in(self.get("/metrics").text, name)

    def pids(self) -> dict[str, int]:
        text = self.get("/metrics").text
        info = re.findall(r"^foredraft:replica_info{(.*)}", text, re.MULTILINE)
        fields = [dict(re.findall(r'(\w+)="([^"]*)"', labels)) for labels in info]
        return {one["replica"]: int(one["pid"]) for one in fields}


def counts_in(metrics: str, name: str) -> dict[str, float]:
    """A metric's total over all labels, by replica."""
    found = Counter[str]()
    for labels, value in re.findall(rf"^foredraft:{name}{{(.*)}} (\S+)$", metrics, re.MULTILINE):
        found[re.findall(r'replica="(\w+)"', labels)[0]] += float(value)
    return dict(found)


def descendants(pid: int) -> set[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, rest = set(), {pid}
    while rest:
        rest = {child for child, parent in parents.items() if parent in rest}
        found |= rest
    return found


def is_alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: set[int], seconds: float) -> set[int]:
    deadline = time.monotonic() + seconds
    while (left := {pid for pid in pids if is_alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    log = tmp_path_factory.mktemp("replicas") / "log"
    source = str(Path(foredraft.__file__).parents[1])
    environment = {**os.environ, "FOREDRAFT_API_KEY": KEY, "PYTHONPATH": source}
    settings = log.with_name("foredraft.toml")
    Settings(method="suffix", speculative_tokens=3, num_threads=1).write(settings)
    options = "--replicas 2 --port 0 --cache-memory 64MiB --served-model-name pair --max-num-seqs 32"
    command = [sys.executable, "-m", "foredraft.cli", "serve", "--config", str(settings), *options.split()]
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, env=environment, stdout=stream, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
    mine: set[int] = set()
    try:
        deadline = time.monotonic() + 120
        while not (found := re.search(r'"event": "listening", "url": "([^"]+)"', log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        settings.unlink()  # a restarted replica does not need it
        yield Cluster(found[1], process)
        mine = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
        assert not wait_until_gone(mine, 10)
    finally:
        mine |= descendants(process.pid)
        for pid in {process.pid, *mine}:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait(10)


def greedy_texts(prompts: list[str], length: int) -> dict[str, str]:
    """The texts of `length` tokens, by prompt."""
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    outputs = LLM(seed=0, method="none").generate(prompts, params)
    return {prompt: output.outputs[0].text for prompt, output in zip(prompts, outputs, strict=True)}


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    return greedy_texts(PROMPTS, LENGTH)


def test_the_official_client_works_with_a_cluster(cluster: Cluster, expected: dict[str, str]) -> None:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=KEY, max_retries=0)
    prompt, text = next(iter(expected.items()))
    body = {
        "model": "pair",
        "prompt": prompt,
        "max_tokens": LENGTH,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    assert client.completions.create(**body).choices[0].text == text  # type: ignore[call-overload]
    chunks = client.completions.create(**body, stream=True)  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert [model.id for model in client.models.list()] == ["pair"]
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="pair", prompt=prompt, extra_body={"mirostat": 1})
    assert caught.value.param == "mirostat"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt=prompt)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="wrong", max_retries=0).models.list()
    assert cluster.get("/openapi.json").json()["paths"].keys() > {"/v1/completions", "/v1/chat/completions", "/metrics"}


def test_the_settings_file_holds_for_every_replica(cluster: Cluster) -> None:
    drafters = re.findall(r"^foredraft:spec_decode_drafter{(.*)} ", cluster.get("/metrics").text, re.MULTILINE)
    assert len(drafters) == 2
    assert all('drafter="suffix"' in labels for labels in drafters)


def test_prompts_with_the_same_beginning_go_to_the_same_replica(cluster: Cluster) -> None:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=KEY, max_retries=0)
    idle = dict.fromkeys(cluster.pids(), 0)
    assert len(idle) == 2
    beginnings = [f"{number} " * 200 for number in range(12)]
    served = []
    before = cluster.counts("generation_tokens_total")
    for beginning in beginnings:
        for end in ("one", "two", "three"):
            client.completions.create(
                model="pair", prompt=beginning + end, max_tokens=2, extra_body={"ignore_eos": True}
            )
        after = cluster.counts("generation_tokens_total")
        served.append({name: after[name] - before[name] for name in after if after[name] != before[name]})
        before = after
    preferred = [rank_replicas(beginning[:PREFIX_CHARACTERS], idle, slack=0)[0] for beginning in beginnings]
    assert served == [{name: 6} for name in preferred]
    assert set(cluster.counts("http_requests_total")) == {"front"}


def test_rays_ports_are_not_open_to_others(cluster: Cluster) -> None:
    """They listen on loopback or need a token, since anyone who can use them can run code."""
    sockets = {}
    for pid in descendants(cluster.process.pid):
        for link in (Path("/proc") / str(pid) / "fd").glob("*"):
            with contextlib.suppress(OSError):
                sockets[os.readlink(link)] = pid
    open_ports = []
    for table, loopback in (
        ("tcp", ("0100007F",)),
        ("tcp6", ("0" * 24 + "01000000", "0000000000000000FFFF00000100007F")),
    ):
        for line in (Path("/proc/net") / table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = fields = line.split()
            address, port = local.split(":")
            if state == "0A" and f"socket:[{fields[9]}]" in sockets and address not in loopback:
                open_ports.append(int(port, 16))
    assert len(open_ports) <= 2  # one for each replica, for other deployments
    for port in open_ports:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def _whole(client: httpx2.AsyncClient, prompt: str) -> Result:
    body = {"prompt": prompt, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
    answer = (await client.post("/v1/completions", json=body)).json()
    is_complete = "choices" in answer
    return prompt, answer["choices"][0]["text"] if is_complete else json.dumps(answer), is_complete


async def _stream(client: httpx2.AsyncClient, prompt: str, begun: asyncio.Event) -> Result:
    """Fails if a stream ends without [DONE] or an error."""
    body = {"prompt": prompt, "max_tokens": STREAM_LENGTH, "temperature": 0, "ignore_eos": True, "stream": True}
    text = ""
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return prompt, text, True
            if line:
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    assert event["error"]["code"] == "replica_lost"
                    assert "ended" in event["error"]["message"]
                    return prompt, text, False
                text += event["choices"][0]["text"]
                begun.set()
    raise AssertionError("the stream ended without [DONE] and without an error")


async def _until(end: asyncio.Event, send: Callable[[], Awaitable[Result]]) -> list[Result]:
    """The results of one request after another, the last of which was sent before the end."""
    results = [await send()]
    while not end.is_set():
        results.append(await send())
    return results


def test_a_replica_may_be_killed_under_load(cluster: Cluster, expected: dict[str, str]) -> None:
    before = cluster.pids()
    assert len(before) == 2
    preferred = {prompt: rank_replicas(prompt, dict.fromkeys(before, 0), slack=0)[0] for prompt in PROMPTS}
    victim = Counter(preferred.values()).most_common(1)[0][0]
    streamed = [prompt for prompt in PROMPTS if preferred[prompt] == victim][:4]
    long_texts = greedy_texts(streamed, STREAM_LENGTH)

    async def main() -> tuple[list[Result], list[Result]]:
        headers = {"Authorization": f"Bearer {KEY}"}
        limits = httpx2.Limits(max_connections=200)
        async with httpx2.AsyncClient(base_url=cluster.url, headers=headers, timeout=120, limits=limits) as client:
            # The replicas are idle, so these long streams go to the one that their prompts prefer.
            begun = {prompt: asyncio.Event() for prompt in streamed}
            streams = asyncio.gather(*(_stream(client, one, begun[one]) for one in streamed))
            await asyncio.gather(*(one.wait() for one in begun.values()))
            killed = asyncio.Event()
            wholes = asyncio.gather(*(_until(killed, partial(_whole, client, one)) for one in PROMPTS * 4))
            running = 0.0
            while running < len(streamed) + 4:  # enough that one is still running when the signal arrives
                running = counts_in((await client.get("/metrics")).text, "num_requests_running").get(victim, 0)
            os.kill(before[victim], signal.SIGKILL)
            killed.set()
            return await streams, [result for results in await wholes for result in results]

    streams, wholes = asyncio.run(main())
    assert all(is_complete and text == expected[prompt] for prompt, text, is_complete in wholes)
    assert all(text and not is_complete for _, text, is_complete in streams)
    assert all(long_texts[prompt].startswith(text) for prompt, text, _ in streams)
    metrics = cluster.get("/metrics")
    assert metrics.status_code == 200, metrics.text
    lost = dict(re.findall(r'replica_lost_requests_total{outcome="(\w+)",replica="front"} (\S+)', metrics.text))
    assert float(lost["broken"]) == len(streamed)
    assert float(lost["retried"]) > 0
    assert "failed" not in lost

    deadline = time.monotonic() + 90
    while len(after := cluster.pids()) < 2:
        assert time.monotonic() < deadline, "the replica did not return"
        time.sleep(0.2)
    assert victim not in after
    assert len(after.keys() & before.keys()) == 1
    assert cluster.get("/ready").status_code == 200
