"""Ray: started or joined, told what to run, and left. Everything of it that is not a choice of a replica is here."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.server.errors import ApiError
from foredraft.server.replicas.request import Forwarded
from foredraft.server.replicas.worker import Report, Worker
from foredraft.server.settings import ServerSettings

_APPLICATION = "foredraft"
_ROUTER = "foredraft.server.replicas.router:PrefixRouter"
_OBJECT_STORE = 80 << 20
"""Bytes: the least that Ray takes. Requests and answers pass by it only where they are large."""
_REPORT_SECONDS = 5.0
_LONGEST_SECONDS = 3600.0
"""That a replica which is no longer needed may go on writing, where requests have no limit."""
_LOGGING = {"log_level": "WARNING", "enable_access_log": False}


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """num_replicas: that always run; max_replicas: up to which load may raise that, None: it stays. num_threads: of each replica;
    None: the machine's cores shared out. max_num_seqs: texts that a replica writes at a time. address: of a Ray cluster to
    join ("auto": the one on this machine); None starts one that only this process can use and that ends with it. uses_gpus:
    whether a replica may have a GPU, where the cluster has some. health_seconds: from one look at a replica to the next.
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
                f"at most {self.max_replicas} replicas are fewer than the {self.num_replicas} at least"
            )

    @property
    def most(self) -> int:
        return self.max_replicas or self.num_replicas

    @property
    def threads(self) -> int:
        return self.num_threads or max(1, (os.cpu_count() or 1) // self.most)


class ReplicaLost(Exception):
    """The replica ended before the answer did."""


class Replicas:
    """handle: of the deployment, as Serve gives it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def answer(self, request: Forwarded) -> AsyncGenerator[list[dict[str, Any]], None]:
        """ASGI's messages. Waits for a place. Leaving the loop ends the request.

        Raises ReplicaLost, and ApiError 429 where too many wait.
        """
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import BackPressureError

        found = self._streaming.answer.remote(request)
        try:
            async for messages in found:
                yield messages
        except RayActorError as error:
            raise ReplicaLost from error
        except BackPressureError:
            message = "too many requests wait for a replica: try again later"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"}) from None
        finally:
            found.cancel()

    async def reports(self) -> list[Report]:
        """Of those that answer in time. Also while one of them ends, which the question itself may be the first to meet."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import DeploymentUnavailableError

        try:
            found = await self._handle.broadcast("report").results_async(
                timeout_s=_REPORT_SECONDS, return_exceptions=True
            )
        except (DeploymentUnavailableError, RayError, TimeoutError):
            return []
        return sorted((one for one in found if isinstance(one, Report)), key=lambda one: one.replica)


@contextmanager
def running_replicas(
    cluster: ClusterSettings, settings: ServerSettings, make_llm: Callable[[int], LLM]
) -> Iterator[Replicas]:
    """From the time when all replicas are ready. make_llm: loads the models with so many threads, in a replica: it must be
    picklable. Raises ForedraftError where Ray is not installed or the replicas do not start.
    """
    with _ray(cluster) as num_gpus:
        yield Replicas(_deployed(cluster, settings, make_llm, num_gpus))


@contextmanager
def _ray(cluster: ClusterSettings) -> Iterator[int]:
    """Gives the number of GPUs."""
    if importlib.util.find_spec("ray") is None:
        raise ForedraftError("several replicas need Ray: pip install 'foredraft[ray]'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    own: dict[str, Any] = {}
    if cluster.address is None:
        # Ray's ports take code from whoever reaches them: let that be this user on this machine.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # its name for "not on loopback alone"
        num_cpus = max(os.cpu_count() or 1, cluster.most * cluster.threads)
        own = {"num_cpus": num_cpus, "include_dashboard": False, "object_store_memory": _OBJECT_STORE}
    import ray
    from ray import serve

    for name in ("ray", "ray.serve"):
        _log_like_us(logging.getLogger(name))
    try:
        try:
            ray.init(cluster.address or "local", log_to_driver=False, configure_logging=False, **own)
        except ConnectionError as error:
            raise ForedraftError(f"no Ray cluster at {cluster.address}: {error}") from None
        serve.start(proxy_location="Disabled", logging_config=_LOGGING)
        try:
            yield int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]
        finally:
            if cluster.address is not None:
                serve.delete(_APPLICATION)
    finally:
        ray.shutdown()


def _log_like_us(logger: logging.Logger) -> None:
    logger.handlers = list(logging.getLogger("foredraft").handlers)
    logger.setLevel(logging.WARNING)
    logger.propagate = False


def _deployed(cluster: ClusterSettings, settings: ServerSettings, make_llm: Callable[[int], LLM], num_gpus: int) -> Any:
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    scale: dict[str, Any] = {"num_replicas": cluster.num_replicas}
    if cluster.max_replicas is not None:
        limits = {"min_replicas": cluster.num_replicas, "max_replicas": cluster.max_replicas}
        scale = {"autoscaling_config": {**limits, "target_ongoing_requests": max(1, cluster.max_num_seqs // 2)}}
    threads = cluster.threads
    make: Any = serve.deployment(
        name="engine",
        max_ongoing_requests=cluster.max_num_seqs + _SPARE,
        max_queued_requests=settings.limits.max_queue,
        request_router_config=RequestRouterConfig(
            request_router_class=_ROUTER,  # type: ignore[arg-type]  # what its documentation says to give
            request_router_kwargs={"slack": max(1, cluster.max_num_seqs // 8)},
        ),
        ray_actor_options={"num_cpus": threads, "num_gpus": 1 if num_gpus and cluster.uses_gpus else 0},
        health_check_period_s=cluster.health_seconds,
        graceful_shutdown_timeout_s=settings.limits.request_seconds or _LONGEST_SECONDS,
        logging_config=_LOGGING,
        **scale,
    )
    inner = replace(settings, api_key=None, allowed_hosts=None, allowed_origins=())
    try:
        application = make(Worker).bind(_replica_name, inner, _Load(make_llm, threads))
        return serve.run(application, name=_APPLICATION, route_prefix=None)
    except RuntimeError as error:
        raise ForedraftError(f"the replicas did not start: {error}") from None


_SPARE = 16
"""Requests that a replica may hold beyond those it writes: the next is there when one ends, and small ones need not wait."""


@dataclass(frozen=True, slots=True)
class _Load:
    make_llm: Callable[[int], LLM]
    num_threads: int

    def __call__(self) -> LLM:
        return self.make_llm(self.num_threads)


def _replica_name() -> str:
    from ray import serve

    name: str = serve.get_replica_context().replica_id.unique_id
    return name
