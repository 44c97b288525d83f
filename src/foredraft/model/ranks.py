"""The processes started by torchrun, among which a model is split."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from foredraft.errors import ModelError, one_line

_STARTED = "torchrun --nproc-per-node 2 -m foredraft COMMAND ... --tp-plan auto"

_PASS_TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others during a pass, or while they load."""

_IDLE_TIMEOUT = timedelta(days=365)
"""How long a rank waits for the next pass. It still notices when the first rank's connection closes."""


@dataclass(frozen=True, slots=True)
class World:
    """The place of a process among those that torchrun started. local_rank, local_size: on its machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> World:
        """Raises ModelError for a process that torchrun did not start, or started alone."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if any(not environment.get(name, "").isdecimal() for name in names):
            raise ModelError(f"tp_plan splits a model among processes that torchrun starts: run {_STARTED}")
        world = cls(*(int(environment[name]) for name in names))
        if world.size < 2:
            raise ModelError(f"tp_plan splits a model among several processes, but there is only one: run {_STARTED}")
        return world

    @property
    def device(self) -> torch.device:
        """The device of this process. Raises ModelError if the machine has fewer GPUs than processes."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        if self.local_rank >= torch.cuda.device_count():
            raise ModelError(
                f"tp_plan needs a GPU for each process: {self.local_size} processes were started on this machine, but it has "
                f"{torch.cuda.device_count()}; give --nproc-per-node {torch.cuda.device_count()}"
            )
        return torch.device("cuda", self.local_rank)


def this_world() -> World:
    """See World.of."""
    return World.of(os.environ)


class Ranks:
    """The group of all processes. The first rank sends what it is about to read, and the others receive it."""

    def __init__(self, world: World) -> None:
        """Wait for all processes. Raises ModelError if that fails, or if this process has done it before."""
        if dist.is_initialized():
            raise ModelError(
                "torch.distributed is already in use in this process: each torchrun can split only one model, once"
            )
        self.world = world
        self.is_broken = False
        device = world.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                timeout=_PASS_TIMEOUT,
                device_id=device if device.type == "cuda" else None,
            )
            self._messages = dist.new_group(backend="gloo", timeout=_IDLE_TIMEOUT)
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"the processes of this torchrun could not find each other: {error}") from error

    @property
    def is_first(self) -> bool:
        return self.world.rank == 0

    def send(self, message: object) -> None:
        """Send from the first rank to all others."""
        dist.broadcast_object_list([message], src=0, group=self._messages)

    def receive(self) -> Any:
        """Wait for the first rank's next message. Raises RuntimeError if it has ended."""
        received: list[Any] = [None]
        dist.broadcast_object_list(received, src=0, group=self._messages)
        if received[0] is None:
            self._close()
        return received[0]

    def end(self) -> None:
        """Send nothing more. If a pass has failed, the others are waiting in it, and see the connection close."""
        if not self.is_broken:
            self.is_broken = True
            self.send(None)
            self._close()

    def _close(self) -> None:
        """Close the group after the last message. Its thread frees a message some time after sending it, for which it needs the
        interpreter: if the interpreter is about to end, the process would abort. Once unreferenced, the group waits for its thread."""
        dist.destroy_process_group(self._messages)
        del self._messages


def reason_of(error: Exception) -> str:
    """PyTorch's message about a rank that is gone, without its place in the source and its advice."""
    return re.sub(r"\[/\S+\] ", "", one_line(error)).partition(". ")[0]


def is_split(hf: PreTrainedModel) -> bool:
    """Whether this process has only a part of the model's weights, and other processes have the rest."""
    return (getattr(hf, "_tp_size", None) or 1) > 1


def num_sharing_memory(hf: PreTrainedModel) -> int:
    """How many processes take memory for this model from the same device."""
    return this_world().local_size if is_split(hf) and hf.device.type == "cpu" else 1
