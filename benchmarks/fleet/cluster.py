"""Ray nodes on this machine with the app on them, and what may befall them."""

import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Read when Ray is imported, here and in every process that it starts.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray import serve
from ray.cluster_utils import Cluster

from deployments.app import build
from deployments.config import AppArgs
from loadtest.handles import replicas
from loadtest.local import free_port

HOST = "127.0.0.1"
READY_WITHIN_S = 300.0

Counters = dict[str, dict[str, Any]]
"""What each replica has counted, by its id."""


class Fleet:
    """A running app. url: of the Gateways."""

    def __init__(self, cluster: Cluster, nodes: Sequence[dict[str, Any]], url: str) -> None:
        self.url = url
        self._cluster, self._nodes = cluster, list(nodes)
        self._engine = serve.get_deployment_handle("Engine", "default")
        self._seen: Counters = {}

    def counters(self) -> Counters:
        """By replica, also of those that are gone: what they had counted when last looked at."""
        told = self._engine.broadcast("counters").results(timeout_s=60)
        self._seen |= {counted["replica"]: counted for counted in told}
        return dict(self._seen)

    def live(self) -> Counters:
        """As `counters`, of those that answer now."""
        told = self._engine.broadcast("counters").results(timeout_s=60)
        self._seen |= {counted["replica"]: counted for counted in told}
        return {counted["replica"]: counted for counted in told}

    def kill_replica(self) -> None:
        """SIGKILL for the replica that has computed most."""
        victim = max(self.live().values(), key=lambda c: int(c["tokens_computed"]))
        os.kill(victim["process"], signal.SIGKILL)

    def kill_node(self) -> None:
        """Ends a node and everything on it at once, and adds one like it."""
        self.counters()
        node = next(iter(self._cluster.worker_nodes))
        self._cluster.remove_node(node, allow_graceful=False)
        self._cluster.add_node(**self._nodes[1])

    def wait_for(self, count: int, within_s: float = READY_WITHIN_S) -> None:
        """Returns when so many engine replicas run and no other does. Raises TimeoutError."""
        until = time.monotonic() + within_s
        while replicas() != count:
            if time.monotonic() > until:
                raise TimeoutError(f"{replicas()} replicas after {within_s:g} s, not {count}")
            time.sleep(0.1)


@contextmanager
def running(nodes: Sequence[dict[str, Any]], args: AppArgs) -> Iterator[Fleet]:
    """The app of these arguments on these nodes.

    nodes: keyword arguments of `Cluster.add_node`; the first is the head, with the proxy and this
    process.
    """
    cluster = Cluster(initialize_head=True, head_node_args=dict(nodes[0]))
    try:
        for node in nodes[1:]:
            cluster.add_node(**node)
        ray.init(cluster.address, log_to_driver=False)
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": HOST, "port": port})
        serve.run(build(args), name="default", route_prefix="/")
        yield Fleet(cluster, nodes, f"http://{HOST}:{port}")
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
