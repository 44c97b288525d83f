"""The choice among replicas, as Ray Serve calls it. Named in a deployment's settings, and imported by Ray alone."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from foredraft.server.replicas.routing import ranked


class PrefixRouter(RequestRouter):
    """slack: as of `ranked`."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._slack: int = kwargs["slack"]

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # where all are full, wait a little before asking again
        replicas = {one.replica_id.unique_id: one for one in candidate_replicas}
        known = self.replica_queue_len_cache
        loads = {name: known.get(one.replica_id) or 0 for name, one in replicas.items()}
        return [[replicas[name]] for name in ranked(pending_request.args[0].prefix, loads, slack=self._slack)]
