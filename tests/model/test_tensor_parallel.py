"""A target that is split over two processes: its texts are those of one process, drafts change nothing, and each process holds half of
the weights. Neither rank outlives the other."""

from __future__ import annotations

import json
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft import LLM
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.models import check_can_have_head
from foredraft.errors import ModelError
from foredraft.model import EMBEDDED, LanguageModel, LoadOptions, Read, load_model
from foredraft.model.library import LibraryBody
from foredraft.model.ranks import World
from foredraft.model.tensor_parallel import Follower, LeadingBody
from tests.command_line import COMMAND, assert_refused, environment, generate
from tests.conftest import MakeEngine, embedded
from tests.engine.test_trees import KINDS, PROMPTS, BranchingDrafter, params, texts_of
from tests.model import split_texts
from tests.model.zoo import Maker

ROOT = Path(__file__).parents[2]
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


class Echo:
    """Another rank in this process. It has all heads, so its logits must equal the first rank's, bit for bit."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self.is_broken = self.has_ended = False
        self.logits: list[torch.Tensor] = []

    def send(self, message: object) -> None:
        self.logits.append(self.follower.read(pickle.loads(pickle.dumps(message))).logits)

    def end(self) -> None:
        self.has_ended = True


class Watched(LibraryBody):
    """Records its logits."""

    def __init__(self, hf: Any) -> None:
        super().__init__(hf)
        self.logits: list[torch.Tensor] = []

    def __call__(self, *args: Any) -> Any:
        reading = super().__call__(*args)
        self.logits.append(reading.logits)
        return reading


@pytest.fixture(scope="module")
def float32_target() -> LanguageModel:
    return embedded("target", dtype="float32")


def test_another_rank_follows_all_changes_of_regions(make_engine: MakeEngine, float32_target: LanguageModel) -> None:
    """Chains, trees, chunked prefill, preemption, retained prefixes, and regions that grow and are evicted."""
    hf, own = float32_target.hf, Watched(float32_target.hf)
    echo = Echo(Follower(LibraryBody(hf)))
    model = LanguageModel(hf, float32_target.traits, LeadingBody(own, echo))
    wanted = [params(16, **kind) for kind in KINDS[:2]]
    plain = texts_of(make_engine("none", model=float32_target), wanted)
    known = {tuple(prompt): [*prompt, *text] for prompt, text in zip(PROMPTS, plain, strict=False)}
    engine = make_engine(
        BranchingDrafter(known, 4096), model=model, speculative_tokens=6, pool=MemoryPool(9 << 20)
    )  # room for four texts of 128 tokens
    for _ in range(2):
        assert texts_of(engine, wanted, preempted=3) == plain
    assert engine.stats.num_accepted_tokens > 20
    assert engine.prefix_stats.num_found_tokens > 0
    assert len(own.logits) == len(echo.logits) > 10
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(own.logits, echo.logits, strict=True))
    engine.drop_retained()
    model.read([Read(0, [1], 0)], model.scratch_cache([1]))
    assert len(echo.follower.regions) == 1  # the last pass's region, which is released with the next message


def test_other_ranks_are_told_of_the_end(float32_target: LanguageModel) -> None:
    echo = Echo(Follower(LibraryBody(float32_target.hf)))
    body = LeadingBody(LibraryBody(float32_target.hf), echo)
    assert not echo.has_ended
    del body
    assert echo.has_ended


def test_after_a_failed_pass_no_other_is_sent(float32_target: LanguageModel) -> None:
    class Fails(LibraryBody):
        def __call__(self, *args: Any) -> Any:
            raise RuntimeError("[/w/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:80. Check the logs.")

    echo = Echo(Follower(LibraryBody(float32_target.hf)))
    model = LanguageModel(float32_target.hf, float32_target.traits, LeadingBody(Fails(float32_target.hf), echo))
    for _ in range(2):
        with pytest.raises(ModelError) as caught:
            model.read([Read(0, [1], 1)], model.scratch_cache([1]))
        reason = "RuntimeError: Connection closed by peer [127.0.0.1]:80"
        assert str(caught.value) == f"a pass that all ranks share has failed ({reason}): restart all ranks"
    assert len(echo.logits) == 1


# Two processes


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """The output of two ranks; see split_texts.py."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        "-m",
        split_texts.__name__,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**environment(), "OMP_NUM_THREADS": "1"}, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    found["texts"] = {name: [split_texts.Text(*text) for text in texts] for name, texts in found["texts"].items()}
    return found


def same_up_to_ties(ours: list[split_texts.Text], theirs: list[split_texts.Text]) -> bool:
    """Whether texts are the same, except for those with near ties."""
    pairs = list(zip(ours, theirs, strict=True))
    return all(a.ids == b.ids or a.num_near_ties + b.num_near_ties > 0 for a, b in pairs)


@pytest.mark.slow
def test_two_ranks_write_the_texts_of_one_process_and_drafts_change_nothing(measured: dict[str, Any]) -> None:
    texts = measured["texts"]
    one = split_texts.make_llm(device="cpu")
    assert same_up_to_ties(texts["none"], list(split_texts.texts_of(one)))
    for name in split_texts.CHOICES:
        assert same_up_to_ties(texts[name], texts["none"]), name
        assert measured["accepted"][name] > 50
    assert measured["bytes_per_token"] * 2 == one.target.traits.bytes_per_token
    assert measured["weight_bytes"] == pytest.approx(split_texts.weight_bytes(one) / 2, rel=0.01)


@contextmanager
def two_ranks(*args: str) -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
    """Start a command twice as torchrun would, but without torchrun, which would end both ranks when one ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**environment(), **TORCHRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*COMMAND, *args],
            env={**shared, "RANK": rank, "LOCAL_RANK": rank},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in ("0", "1")
    ]
    try:
        yield processes[0], processes[1]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_ends_the_other_with_one_line(killed: int) -> None:
    args = ("generate", "--dtype", "float32", "--tp-plan", "auto", "--max-tokens", "2000", "--ignore-eos", "def f(x):")
    with two_ranks(*args) as ranks:
        assert ranks[0].stdout is not None
        assert ranks[0].stdout.read(1)  # both are in the middle of a text
        ranks[killed].kill()
        output, errors = ranks[1 - killed].communicate(timeout=300)
        lines = [line for line in errors.decode().splitlines() if not line.startswith("warning: ")]
        assert len(lines) == 1, errors
        assert lines[0].startswith("error: rank 1: no more passes" if killed == 0 else "error: ")
        assert "rank" in lines[0]
        assert ranks[1 - killed].returncode == (1 if killed == 0 else 2)
        assert killed == 1 or output == b""


# What is refused


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "among processes that torchrun starts: run torchrun"),
        ({**TORCHRUN, "WORLD_SIZE": "1"}, "among several processes, but there is only one"),
    ],
)
def test_without_torchrun_tensor_parallelism_is_refused(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        World.of(environ)


def test_fewer_gpus_than_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert World(1, 2, 0, 1).device == torch.device("cuda", 0)
    with pytest.raises(ModelError, match="2 processes were started on this machine, but it has 1"):
        _ = World(1, 2, 1, 2).device


@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [
        ("llama", "4", "num_key_value_heads is 2, which 4 ranks cannot share evenly"),
        ("llama", "3", "num_attention_heads is 4, which 3 ranks cannot share evenly"),
    ],
)
def test_attention_heads_that_cannot_be_split_are_refused(
    checkpoint: Maker, monkeypatch: pytest.MonkeyPatch, name: str, ranks: str, words: str
) -> None:
    for variable, value in {**TORCHRUN, "WORLD_SIZE": ranks}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ModelError, match=words):
        load_model(checkpoint(name), LoadOptions(tp_plan="auto"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tp_plan": "rowwise"}, 'tp_plan must be "auto"'),
        ({"tp_plan": "auto", "device": "cpu"}, "tp_plan and device both say where the weights are placed"),
        ({"tp_plan": "auto", "quantization": "int8"}, "leave quantization out"),
    ],
    ids=str,
)
def test_incompatible_options_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        LLM(EMBEDDED / "target", method="none", **settings)


def test_a_split_model_in_memory_is_refused(float32_target: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32_target.hf, "_tp_size", 2, raising=False)
    with pytest.raises(ModelError, match="other processes hold part of its weights"):
        load_model(float32_target.hf, LoadOptions())


def test_ranks_of_one_machine_share_its_memory(float32_target: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.model.memory.available_memory", lambda device: 1000)
    assert float32_target.memory_for_cache == 1000
    monkeypatch.setattr(float32_target.hf, "_tp_size", 4, raising=False)
    for variable, value in {**TORCHRUN, "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(variable, value)
    assert float32_target.memory_for_cache == 500


def test_heads_need_a_whole_target(float32_target: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32_target.hf, "_tp_size", 2, raising=False)
    with pytest.raises(ModelError, match="heads and early exits use weights of their target on one"):
        check_can_have_head(float32_target)


def test_the_command_line_says_how_to_start_torchrun() -> None:
    assert_refused(generate("--tp-plan", "auto", "hello"), "torchrun --nproc-per-node 2")
