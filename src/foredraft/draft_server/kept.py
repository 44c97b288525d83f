"""A draft server in a child process that is restarted whenever it ends."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from foredraft.errors import ForedraftError

if TYPE_CHECKING:
    from foredraft.draft_server.loading import DraftServerSettings

logger = logging.getLogger("foredraft")

_PRELOADED = ["foredraft.draft_server.loading", "foredraft.draft_server.server", "foredraft.model.loading"]
"""Modules imported once, in the process that children are forked from, so that a new child only has to load its model."""
_SHORTEST_LIFE = 1.0
"""Seconds. A process that ends sooner is restarted only after that time."""


class KeptServer:
    """Starts the server and waits until it answers. address: where it listens, such as tcp://127.0.0.1:5757.

    num_threads: of PyTorch; None: PyTorch's default. preloaded: more modules to import beforehand, those of the main module, which
    children import too. Raises ForedraftError if the models cannot be loaded, or the server cannot listen at the address.
    """

    def __init__(
        self,
        settings: DraftServerSettings,
        address: str,
        key: bytes,
        num_threads: int | None,
        preloaded: Sequence[str] = (),
    ) -> None:
        methods = multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            self._context.set_forkserver_preload([*_PRELOADED, *preloaded])
        self._settings, self._key, self._num_threads = settings, key, num_threads
        self._is_stopped = threading.Event()
        self.address = address
        self._process = self._started()

    @property
    def pid(self) -> int | None:
        """The id of the process that drafts."""
        return self._process.pid

    def keep(self) -> None:
        """Restart the server whenever it ends, until `stop` is called, by another thread or a signal handler. Raises ForedraftError
        if a restart fails."""
        while not self._is_stopped.is_set():
            began = time.monotonic()
            self._process.join()
            if self._is_stopped.is_set():
                return
            logger.warning("the draft server ended with exit code %s: restarting it", self._process.exitcode)
            self._is_stopped.wait(max(0.0, began + _SHORTEST_LIFE - time.monotonic()))
            self._process = self._started()

    def stop(self) -> None:
        self._is_stopped.set()
        self._process.terminate()

    def _started(self) -> BaseProcess:
        here, there = self._context.Pipe()
        arguments = (self._settings, self.address, self._key, self._num_threads, there)
        process: BaseProcess = self._context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        there.close()
        try:
            address, problem = here.recv()
        except EOFError:
            address, problem = "", "the draft server's process ended while it was starting"
        if problem:
            raise ForedraftError(problem)
        self.address = address
        return process


def _serve(
    settings: DraftServerSettings, address: str, key: bytes, num_threads: int | None, started: Connection
) -> None:
    """The child process: serve until the parent is gone."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from foredraft.draft_server.loading import load_drafter
    from foredraft.draft_server.server import DraftServer
    from foredraft.remote.sockets import Listener

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that semaphores are released, such as that of tqdm
    disable_progress_bar()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    try:
        drafter, vocabulary = load_drafter(settings)
        server = DraftServer(drafter, Listener(address, key), vocabulary)
    except ForedraftError as error:
        started.send(("", str(error)))
        return
    started.send((server.address, ""))
    parent = multiprocessing.parent_process()
    server.run(lambda: parent is None or parent.is_alive())
