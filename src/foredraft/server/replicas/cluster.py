"""Starts or joins a Ray cluster and deploys the replicas on it."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.server.api_errors import ApiError
from foredraft.server.replicas.forwarded_request import ForwardedRequest
from foredraft.server.replicas.replica_worker import ReplicaReport, Worker
from foredraft.server.server_settings import ServerSettings
from foredraft.utils.ray_cluster import ray_cluster

_APPLICATION = "foredraft"
_ROUTER = "foredraft.server.replicas.ray_router:PrefixRouter"
_REPORT_SECONDS = 5.0
_MAX_DRAIN_SECONDS = 3600.0
"""Seconds in which a replica that is being removed must finish its requests, if they have no time limit."""
_LOGGING = {"log_level": "WARNING", "enable_access_log": False}


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The replicas and the cluster they run on.

    num_replicas: the minimum. max_replicas: the maximum, for scaling with the load; None: the number is fixed.
    num_threads: of each replica. None: an equal share of the machine's cores.
    max_num_seqs: texts that a replica runs at a time.
    address: of a Ray cluster to join ("auto": the one on this machine). None: start one that only this process uses.
    uses_gpus: whether a replica gets a GPU, if the cluster has any.
    health_seconds: the interval of health checks.
    """

    num_replicas: int
    max_replicas: int | None = None
    num_threads: int | None = None
    max_num_seqs: int = 64
    address: str | None = None
    uses_gpus: bool = True
    health_seconds: float = 2.0

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ForedraftError(f"there must be at least 1 replica, not {self.num_replicas}")
        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            raise ForedraftError(
                f"max_replicas must be at least num_replicas: {self.max_replicas} is less than {self.num_replicas}"
            )

    @property
    def max_num_replicas(self) -> int:
        return self.max_replicas or self.num_replicas

    @property
    def threads_per_replica(self) -> int:
        return self.num_threads or max(1, (os.cpu_count() or 1) // self.max_num_replicas)


class ReplicaLost(Exception):
    """A replica ended before its response did."""


class Replicas:
    """The deployed replicas. handle: Serve's handle of the deployment."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def answer(self, request: ForwardedRequest) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The ASGI messages of the response, in batches. Waits for a free replica; leaving the loop aborts the request.

        Raises ReplicaLost, and ApiError 429 if too many requests wait.
        """
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import BackPressureError

        response = self._streaming.answer.remote(request)
        try:
            async for messages in response:
                yield messages
        except RayActorError as error:
            raise ReplicaLost from error
        except BackPressureError:
            message = "too many requests are waiting for a replica: try again later"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"}) from None
        finally:
            with suppress(RayActorError, BackPressureError):  # cancel() raises again what ended the request
                response.cancel()

    async def reports(self) -> list[ReplicaReport]:
        """Reports of the replicas that answer in time. This call may be the first to notice that a replica has ended."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import DeploymentUnavailableError

        try:
            results = await self._handle.broadcast("report").results_async(
                timeout_s=_REPORT_SECONDS, return_exceptions=True
            )
        except (DeploymentUnavailableError, RayError, TimeoutError):
            return []
        return sorted((r for r in results if isinstance(r, ReplicaReport)), key=lambda report: report.replica)


@contextmanager
def running_replicas(
    cluster: ClusterSettings, settings: ServerSettings, make_llm: Callable[[int], LLM]
) -> Iterator[Replicas]:
    """Start the replicas; the block runs once all are ready. make_llm: loads the models with a number of threads; it runs in the
    replicas, so it must be picklable. Raises ForedraftError if Ray is not installed or the replicas do not start.
    """
    with _serving(cluster) as num_gpus:
        yield Replicas(_deploy(cluster, settings, make_llm, num_gpus))


@contextmanager
def _serving(cluster: ClusterSettings) -> Iterator[int]:
    """Start or join the cluster, and Serve on it, for the duration of the block. Yields the number of its GPUs."""
    num_cpus = max(os.cpu_count() or 1, cluster.max_num_replicas * cluster.threads_per_replica)
    with ray_cluster(cluster.address, num_cpus, "several replicas need") as num_gpus:
        from ray import serve

        serve.start(proxy_location="Disabled", logging_config=_LOGGING)
        try:
            yield num_gpus
        finally:
            if cluster.address is not None:
                serve.delete(_APPLICATION)


def _deploy(cluster: ClusterSettings, settings: ServerSettings, make_llm: Callable[[int], LLM], num_gpus: int) -> Any:
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    scale: dict[str, Any] = {"num_replicas": cluster.num_replicas}
    if cluster.max_replicas is not None:
        limits = {"min_replicas": cluster.num_replicas, "max_replicas": cluster.max_replicas}
        scale = {"autoscaling_config": {**limits, "target_ongoing_requests": max(1, cluster.max_num_seqs // 2)}}
    threads = cluster.threads_per_replica
    make: Any = serve.deployment(
        name="engine",
        max_ongoing_requests=cluster.max_num_seqs + _NUM_PREFETCHED,
        max_queued_requests=settings.limits.max_queue,
        request_router_config=RequestRouterConfig(
            request_router_class=_ROUTER,  # type: ignore[arg-type]  # what its documentation says to give
            request_router_kwargs={"slack": max(1, cluster.max_num_seqs // 8)},
        ),
        ray_actor_options={"num_cpus": threads, "num_gpus": 1 if num_gpus and cluster.uses_gpus else 0},
        health_check_period_s=cluster.health_seconds,
        graceful_shutdown_timeout_s=settings.limits.request_seconds or _MAX_DRAIN_SECONDS,
        logging_config=_LOGGING,
        **scale,
    )
    inner = replace(settings, api_key=None, allowed_hosts=None, allowed_origins=())
    try:
        application = make(Worker).bind(_replica_name, inner, _LLMFactory(make_llm, threads))
        return serve.run(application, name=_APPLICATION, route_prefix=None)
    except RuntimeError as error:
        raise ForedraftError(f"the replicas did not start: {error}") from None


_NUM_PREFETCHED = 16
"""Requests that a replica may hold beyond those it runs, so that the next one is there when one ends, and small ones need not wait."""


@dataclass(frozen=True, slots=True)
class _LLMFactory:
    make_llm: Callable[[int], LLM]
    num_threads: int

    def __call__(self) -> LLM:
        return self.make_llm(self.num_threads)


def _replica_name() -> str:
    from ray import serve

    name: str = serve.get_replica_context().replica_id.unique_id
    return name
