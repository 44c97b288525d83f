"""A draft server that Ray places on a node, and restarts there if its keeper ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from foredraft.draft_server.kept import KeptServer
from foredraft.errors import ForedraftError
from foredraft.utils.ray_cluster import ray_cluster

if TYPE_CHECKING:
    from foredraft.draft_server.loading import DraftServerSettings

_PLACING_SECONDS = 60.0


class Keeper:
    """Runs in a Ray actor and keeps the drafting process alive. If it cannot, it ends its own process, and Ray restarts the actor."""

    def __init__(self, settings: DraftServerSettings, address: str, key: bytes, num_threads: int | None) -> None:
        self._server = KeptServer(settings, address, key, num_threads, ["ray"])
        threading.Thread(target=self._keep, daemon=True).start()

    def address(self) -> str:
        return self._server.address

    def pid(self) -> int | None:
        """The id of the process that drafts."""
        return self._server.pid

    def _keep(self) -> None:
        try:
            self._server.keep()
        finally:
            os._exit(1)


@contextmanager
def supervised_server(
    settings: DraftServerSettings, address: str, key: bytes, *, cluster: str | None, num_threads: int | None
) -> Iterator[Any]:
    """Start the server and yield the handle of its actor once it answers. It stays on its node, and so keeps its address, as long as
    the node lives. address: where it listens on its node, with a port. cluster: see ray_cluster.

    Raises ForedraftError if Ray is not installed, or the server does not start.
    """
    num_cpus = num_threads or 1
    with ray_cluster(cluster, max(num_cpus, os.cpu_count() or 1), "a supervised draft server needs") as num_gpus:
        import ray
        from ray.exceptions import RayError
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        uses_gpu = bool(num_gpus) and settings.draft_model is not None and settings.options.device != "cpu"
        group = placement_group([{"CPU": num_cpus, **({"GPU": 1} if uses_gpu else {})}])
        try:
            if not group.wait(_PLACING_SECONDS):
                raise ForedraftError(f"no node of the Ray cluster has {num_cpus} CPUs free for a draft server")
            make: Any = ray.remote(
                num_cpus=num_cpus,
                num_gpus=int(uses_gpu),
                max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
            )
            actor = make(Keeper).remote(settings, address, key, num_threads)
            try:
                ray.get(actor.address.remote())
            except RayError as error:
                raise ForedraftError(f"the draft server did not start: {_cause(error)}") from None
            yield actor
        finally:
            remove_placement_group(group)


def _cause(error: Exception) -> str:
    return " ".join(str(error).split())[-300:]
