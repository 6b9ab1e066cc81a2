"""Ways to place requests that a fleet can be run with: ours, and two of Ray Serve's own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from ray.serve.config import RequestRouterConfig
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, RunningReplica

import deployments.app
from benchmarks.fleet.callers import Caller
from deployments.config import AppArgs

POLICIES = ("ours", "two choices", "consistent hash")


class HashOfSession(ConsistentHashRouter):  # type: ignore[misc]  # Ray has no types
    """Serve's consistent hash of the session id that our calls carry as an argument."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """As Serve's own, which reads the id of the handle's options."""
        if pending_request is not None and (given := pending_request.kwargs.get("session_id")):
            pending_request.metadata.session_id = given
        ranks: list[list[RunningReplica]] = await super().choose_replicas(
            candidate_replicas, pending_request
        )
        return ranks


def with_sessions(everyone: Sequence[Caller], policy: str) -> list[Caller]:
    """The callers as a policy needs them: a consistent hash is told who each of them is."""
    if policy != "consistent hash":
        return list(everyone)
    return [replace(caller, session=caller.session or caller.name) for caller in everyone]


@contextmanager
def placing(policy: str) -> Iterator[None]:
    """Apps that are built meanwhile place requests by one of `POLICIES`."""

    def routing(args: AppArgs) -> dict[str, Any]:
        if policy == "two choices":  # what Serve does if it is told nothing
            return {}
        return {"request_router_config": RequestRouterConfig(request_router_class=HashOfSession)}

    if policy == "ours":
        yield
        return
    with patch.object(deployments.app, "_routing", routing):
        yield
