"""Several engines behind one address, on Ray Serve, which starts the replicas, routes requests and replaces failed replicas.

`front` is the application that clients connect to: it checks keys and limits and forwards each request to a replica.
`replica_worker` runs in a replica: the application of a single server. `prefix_routing` ranks the replicas for a request,
`cluster` starts Ray. Ray is an optional dependency: only `ray_router` imports it at the top, and only Ray imports that module.
"""

from foredraft.server.replicas.cluster import ClusterSettings, Replicas, running_replicas
from foredraft.server.replicas.front import create_front

__all__ = ["ClusterSettings", "Replicas", "create_front", "running_replicas"]
