"""A Ray cluster for the time of a block, closed to others by default. Ray is an optional dependency."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from foredraft.errors import ForedraftError

_OBJECT_STORE = 80 << 20
"""Bytes, the minimum of Ray. Only large requests and responses go through the object store."""


@contextmanager
def ray_cluster(address: str | None, num_cpus: int, purpose: str) -> Iterator[int]:
    """Start or join a cluster. Yields the number of its GPUs.

    address: of a cluster to join ("auto": the one on this machine). None: start one that only this process uses, with num_cpus.
    purpose: what needs Ray, for an error message. Raises ForedraftError if Ray is not installed, or no cluster answers.
    """
    if importlib.util.find_spec("ray") is None:
        raise ForedraftError(f"{purpose} Ray: pip install 'foredraft[ray]'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {}
    if address is None:
        # Whoever reaches Ray's ports can run code: require a token.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # 0 binds to loopback only
        options = {"num_cpus": num_cpus, "include_dashboard": False, "object_store_memory": _OBJECT_STORE}
    import ray

    for name in ("ray", "ray.serve"):
        _use_our_log(logging.getLogger(name))
    try:
        try:
            ray.init(address or "local", log_to_driver=False, configure_logging=False, **options)
        except ConnectionError as error:
            raise ForedraftError(f"no Ray cluster at {address}: {error}") from None
        yield int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]
    finally:
        ray.shutdown()


def _use_our_log(logger: logging.Logger) -> None:
    logger.handlers = list(logging.getLogger("foredraft").handlers)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
