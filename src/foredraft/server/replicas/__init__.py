"""Several engines behind one address, on Ray Serve: it starts them, chooses among them, and replaces those that end.

`front` is the application that clients speak to: it holds the key and the limits, and hands each request to a replica. `worker` is
what runs in a replica: the application of a single server. `routing` says which replica takes a request, `cluster` is all that
knows how Ray is started. Ray is an extra: only `router`, which nobody but Ray imports, needs it to be imported.
"""

from foredraft.server.replicas.cluster import ClusterSettings, Replicas, running_replicas
from foredraft.server.replicas.front import create_front

__all__ = ["ClusterSettings", "Replicas", "create_front", "running_replicas"]
