"""Ranks replicas for a request: first the one that has read prompts with the same prefix, unless its load is far above the lowest."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b


def rank_replicas(prefix: str, loads: Mapping[str, int], *, slack: int) -> list[str]:
    """Replicas, best first. loads: number of requests by replica. slack: how many more requests the prefix's replica may have than
    the least loaded one.

    The prefix's replica is the one with the highest hash (rendezvous hashing, Thaler and Ravishankar 1998). It depends only on the
    prefix and the replicas' names, and adding or removing a replica moves no prefix between the others.
    """
    by_load = sorted(loads, key=lambda name: (loads[name], name))
    preferred = max(loads, key=lambda name: _weight(prefix, name))
    if prefix and loads[preferred] <= loads[by_load[0]] + slack:
        return [preferred, *(name for name in by_load if name != preferred)]
    return by_load


def _weight(prefix: str, name: str) -> bytes:
    return blake2b(prefix.encode(errors="surrogatepass"), key=name.encode()[:64], digest_size=8).digest()
