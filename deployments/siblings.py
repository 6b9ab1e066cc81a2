"""The other replicas of a replica's own deployment, as its router sees them."""

import asyncio

from ray import serve

from router.boards import shared


class Siblings:
    """A handle of a replica to its own deployment. Making one blocks for a few milliseconds."""

    def __init__(self) -> None:
        context = serve.get_replica_context()
        self._app, self._deployment = context.app_name, context.deployment
        self._id = str(context.replica_id.unique_id)
        handle = serve.get_deployment_handle(self._deployment, self._app)
        # by reference: over gRPC a call carries 4 MB at most
        self.handle = handle.options(_by_reference=True)

    async def exist(self, seconds: float) -> bool:
        """Whether there is any, found out without a call: one that waits in the router for a
        replica would have the autoscaler start one. seconds: until that has been heard.
        """
        members = shared(self._app, self._deployment).members
        for _ in range(int(seconds / 0.05)):
            if self.handle.running_replicas_populated():
                return True
            if members.count == 0:
                return False
            await asyncio.sleep(0.05)
        return False

    def against_me(self) -> str:
        """What sets this replica's bits apart from its siblings', as far as the router knows; ""
        if nothing does.
        """
        return shared(self._app, self._deployment).odd.get(self._id, "")
