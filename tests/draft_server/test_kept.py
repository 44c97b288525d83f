"""A draft server process that is killed and restarted, which changes no text."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from foredraft.draft_server import DraftServerSettings
from foredraft.draft_server.kept import KeptServer
from foredraft.engine.engine import Engine
from foredraft.errors import ForedraftError
from foredraft.model import EMBEDDED, LanguageModel, LoadOptions
from foredraft.remote import Patience
from foredraft.sampling import SamplingParams
from tests.conftest import MakeEngine
from tests.draft_servers import KEY, connect, remote

pytest.importorskip("zmq")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_KILLS = 3
PROMPTS = ([0, 549, 300, 11, 12], [0, 616, 635, 271, 480], [0, *range(500, 540)], [0, 9])
WAYS = ({"temperature": 0.0}, {"temperature": 0.8, "seed": 2, "top_p": 0.9})


@pytest.fixture(scope="module")
def server() -> Iterator[KeptServer]:
    settings = DraftServerSettings(str(EMBEDDED / "draft"), None, LoadOptions(device="cpu"), 1 << 28)
    server = KeptServer(settings, "tcp://127.0.0.1:0", KEY, 1)
    keeping = threading.Thread(target=server.keep, daemon=True)
    keeping.start()
    yield server
    server.stop()
    keeping.join(30)
    assert not keeping.is_alive()


def write(engine: Engine, kill: object = None) -> list[list[int]]:
    """Write eight texts at once; one of them is preempted midway."""
    wanted = [SamplingParams(max_tokens=48, ignore_eos=True, **way).resolve({}) for way in WAYS]  # type: ignore[arg-type]
    sequences = [engine.add(prompt, params) for prompt in PROMPTS for params in wanted]
    step = 0
    while engine.has_work:
        engine.step()
        step += 1
        if step == 5:
            engine.preempt(next(sequence for sequence in sequences if not sequence.is_finished))
        if step == 6 and callable(kill):
            kill()
    return [sequence.output_ids for sequence in sequences]


def test_a_killed_drafter_loses_no_text_and_is_restarted(
    server: KeptServer, target: LanguageModel, make_engine: MakeEngine
) -> None:
    expected = write(make_engine("none"))
    vocab_size = target.traits.vocab_size
    drafter = remote(server.address, vocab_size, Patience(1.0, 1.0))
    assert write(make_engine(drafter)) == expected
    for _ in range(NUM_KILLS):
        pid = server.pid
        assert pid is not None
        engine = make_engine(drafter)
        assert write(engine, lambda: os.kill(pid, signal.SIGKILL)) == expected  # noqa: B023
        end = time.monotonic() + 120
        while server.pid == pid and time.monotonic() < end:
            time.sleep(0.05)
        connect(server.address, vocab_size).close()
        time.sleep(2.1)  # until its own connection tries again
        again = make_engine(drafter)
        assert write(again) == expected
        assert write(again) == expected
        assert again.stats.num_draft_tokens > 0


def test_a_failed_start_is_reported_in_one_line() -> None:
    settings = DraftServerSettings("/nowhere/at/all", None, LoadOptions(device="cpu"))
    with pytest.raises(ForedraftError, match="nowhere") as caught:
        KeptServer(settings, "tcp://127.0.0.1:0", KEY, 1)
    assert "\n" not in str(caught.value)


def test_two_servers_cannot_listen_at_one_address(server: KeptServer) -> None:
    settings = DraftServerSettings(None, "suffix", LoadOptions(device="cpu"))
    with pytest.raises(ForedraftError, match=f"cannot listen at {server.address}"):
        KeptServer(settings, server.address, KEY, 1)
