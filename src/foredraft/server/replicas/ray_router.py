"""The request router for Ray Serve. The deployment names it, and only Ray imports it."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from foredraft.server.replicas.prefix_routing import rank_replicas


class PrefixRouter(RequestRouter):
    """slack: see `rank_replicas`."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._slack: int = kwargs["slack"]

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # if all are full, wait before the next attempt
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        known = self.replica_queue_len_cache
        loads = {name: known.get(replica.replica_id) or 0 for name, replica in replicas.items()}
        return [[replicas[name]] for name in rank_replicas(pending_request.args[0].prefix, loads, slack=self._slack)]
