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
from ray.exceptions import RayActorError, RayError
from ray.serve._private.common import DeploymentID

from deployments.app import ENGINE, build
from deployments.config import AppArgs
from loadtest.local import free_port

APP = "default"
HOST = "127.0.0.1"
READY_WITHIN_S = 300.0

Counters = dict[str, dict[str, Any]]
"""What each replica has counted, by its id."""


class Nodes:
    """Ray nodes on this machine, this process and Serve's proxy among them. url: of the proxy."""

    def __init__(self, cluster: Cluster, nodes: Sequence[dict[str, Any]], url: str) -> None:
        """nodes: how they were added; the first is the head."""
        self.url = url
        self._cluster, self._nodes = cluster, list(nodes)

    def kill_one(self) -> None:
        """Ends a node and everything on it at once, and adds one like it. Not the head."""
        node = next(iter(self._cluster.worker_nodes))
        self._cluster.remove_node(node, allow_graceful=False)
        self._cluster.add_node(**self._nodes[1])


class Fleet:
    """A running app. url: of the Gateways. nodes: what it runs on."""

    def __init__(self, nodes: Nodes) -> None:
        self.url, self._nodes = nodes.url, nodes
        self._engine = serve.get_deployment_handle(ENGINE, APP)
        self._seen: Counters = {}

    def counters(self) -> Counters:
        """By replica, also of those that are gone: what they had counted when last looked at."""
        self.live()
        return dict(self._seen)

    def live(self) -> Counters:
        """As `counters`, of those that answer now; asked again while a dead one is listed."""
        until = time.monotonic() + 60
        while True:
            try:
                told = self._engine.broadcast("counters").results(timeout_s=60)
                break
            except RayActorError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        found = {counted["replica"]: counted for counted in told}
        self._seen |= found
        return found

    def kill_replica(self) -> None:
        """SIGKILL for the replica that has computed most."""
        victim = max(self.live().values(), key=lambda c: int(c["tokens_computed"]))
        os.kill(victim["process"], signal.SIGKILL)

    def kill_node(self) -> None:
        """Ends a node and its replicas at once; another one takes its place."""
        self.counters()
        self._nodes.kill_one()

    def scale(self, count: int) -> None:
        """Has so many engine replicas, of an app that runs with `scaled_by_hand`; returns when
        those that leave are gone and those that come are ready.
        """
        controller = serve.context._get_global_client()._controller
        ray.get(controller.update_deployment_replicas.remote(DeploymentID(ENGINE, APP), count))
        self.wait_for(count)

    def states(self) -> dict[str, int]:
        """Engine replicas by what Serve says they do; {} if the cluster does not say."""
        try:
            found = serve.status().applications[APP].deployments[ENGINE]
        except (KeyError, RayError):
            return {}
        return {str(state): int(n) for state, n in found.replica_states.items() if n}

    def wait_for(self, count: int, within_s: float = READY_WITHIN_S) -> None:
        """Returns when so many engine replicas run, none comes or goes, and this process's router
        knows it. Raises TimeoutError.
        """
        until = time.monotonic() + within_s
        while (states := self.states()) != {"RUNNING": count} or len(self.live()) != count:
            if time.monotonic() > until:
                raise TimeoutError(f"{states} after {within_s:g} s, not {count} replicas")
            time.sleep(0.1)


@contextmanager
def cluster_of(nodes: Sequence[dict[str, Any]]) -> Iterator[Nodes]:
    """A cluster with Serve and no app.

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
        yield Nodes(cluster, nodes, f"http://{HOST}:{port}")
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def app_on(nodes: Nodes, args: AppArgs, scaled_by_hand: bool = False) -> Iterator[Fleet]:
    """The app of these arguments on a cluster without one; gone at the end.

    scaled_by_hand: `Fleet.scale` says how many replicas there are.
    """
    serve.run(build(args), name=APP, route_prefix="/", external_scaler_enabled=scaled_by_hand)
    try:
        fleet = Fleet(nodes)
        fleet.wait_for(fleet.states()["RUNNING"])
        yield fleet
    finally:
        serve.delete(APP)


@contextmanager
def running(nodes: Sequence[dict[str, Any]], args: AppArgs) -> Iterator[Fleet]:
    """The app of these arguments on a cluster of its own; nodes: as in `cluster_of`."""
    with cluster_of(nodes) as made, app_on(made, args) as fleet:
        yield fleet
