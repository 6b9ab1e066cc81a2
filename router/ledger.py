"""The fleet's ledger as Gateways reach it: an actor that belongs to their deployment."""

import asyncio
from typing import Any

from ray import serve
from ray.exceptions import RayActorError

from router.quota import Amounts, Lease

ACTOR = "quotas"
"""Name of the deployment actor that runs a `router.quota.Ledger`."""


class RemoteLedger:
    """A `router.charging.Book` in a Gateway replica."""

    def __init__(self) -> None:
        self._actor: Any = None

    async def lease(
        self, tenant: str, rates: dict[str, float], needs: Amounts, ahead: Amounts
    ) -> Lease:
        """As `Ledger.lease`. Raises what Ray does if the actor is not there."""
        lease: Lease = await self._call("lease", tenant, rates, needs, ahead)
        return lease

    async def give_back(self, tenant: str, amounts: Amounts) -> None:
        """As `Ledger.give_back`."""
        await self._call("give_back", tenant, amounts)

    async def _call(self, method: str, *args: object) -> Any:
        if self._actor is None:
            # blocks for a message to the cluster's store
            self._actor = await asyncio.to_thread(serve.get_deployment_actor, ACTOR)
        try:
            return await getattr(self._actor, method).remote(*args)
        except RayActorError:
            self._actor = None  # Serve starts another one
            raise
