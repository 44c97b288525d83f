"""Which replica takes a request: the one that read prompts which begin alike, unless it has much more to do than others."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b


def ranked(prefix: str, loads: Mapping[str, int], *, slack: int) -> list[str]:
    """Replicas, best first. loads: requests of each replica. slack: by how many requests the prefix's own replica may be ahead
    of the least loaded one.

    The prefix's own is the one of the highest hash (rendezvous hashing, Thaler and Ravishankar 1998): it depends on the prefix
    and the replicas' names alone, and a replica that comes or goes moves no prefix between the others.
    """
    by_load = sorted(loads, key=lambda name: (loads[name], name))
    own = max(loads, key=lambda name: _weight(prefix, name))
    if prefix and loads[own] <= loads[by_load[0]] + slack:
        return [own, *(name for name in by_load if name != own)]
    return by_load


def _weight(prefix: str, name: str) -> bytes:
    return blake2b(prefix.encode(errors="surrogatepass"), key=name.encode()[:64], digest_size=8).digest()
