"""Stand-ins for Serve's replicas, and a router over four of them; no cluster."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.request_router import PendingRequest

from router import boards, request_router
from router.policy import Load, Stats
from router.request_router import StateRouter
from tests.waiting import PATIENCE_S

IDLE, BUSY = Load(0.0, 0.0, 3.0, 400.0), Load(5000.0, 5000.0, 3.0, 400.0)
APP, DEPLOYMENT = "app", "Engine"
NAMES = ("a", "b", "c", "d")


class Replica:
    """What Serve gives a router of a replica."""

    def __init__(self, name: str, stats: dict[str, bytes] | None = None) -> None:
        self.replica_id = ReplicaID(name, DeploymentID(DEPLOYMENT, APP))
        self.routing_stats = stats or {}
        self.replica_metadata: dict[str, object] = {}
        self.max_ongoing_requests = 2
        self.ongoing = 0

    @property
    def name(self) -> str:
        return str(self.replica_id.unique_id)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.ongoing


class Clock:
    """A second between any two looks, so that no call finds the one before still in a queue."""

    def __init__(self) -> None:
        self._looks = itertools.count()

    def monotonic(self) -> float:
        return float(next(self._looks))


def asking(positional: object, method: str = "decide", **kwargs: Any) -> PendingRequest:
    """A call as Serve hands it to a router; to be made on an event loop."""
    asking.count += 1  # type: ignore[attr-defined]
    number = str(asking.count)  # type: ignore[attr-defined]
    about = RequestMetadata(request_id=number, internal_request_id=number, call_method=method)
    args = [] if positional is None else [positional]
    return PendingRequest(args=args, kwargs=kwargs, metadata=about)


asking.count = 0  # type: ignore[attr-defined]


def with_router(
    test: Callable[[StateRouter, dict[str, Replica]], Awaitable[None]], **limits: Any
) -> None:
    """Runs a test on an event loop, over a router that knows four idle replicas; time, and what
    this process knows of deployments, are its own.
    """

    async def run() -> None:
        router = StateRouter(
            deployment_id=DeploymentID(DEPLOYMENT, APP),
            handle_source=DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=True,
            self_node_id="node",
        )
        router.initialize_state(**limits)
        replicas = {name: Replica(name, Stats(IDLE).encode()) for name in NAMES}
        router.update_replicas(list(replicas.values()))
        await asyncio.sleep(0)
        await test(router, replicas)

    boards._shared.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_router, "time", Clock())
        asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    boards._shared.clear()


async def chosen(router: StateRouter, request: PendingRequest) -> str:
    """Where Serve's own code sends a call by this router."""
    return str((await router._choose_replica_for_request(request)).replica_id.unique_id)
