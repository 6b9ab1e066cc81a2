"""What placing a request costs the process that asks: hashing its state, and choosing a replica."""

import time
from collections.abc import Callable
from typing import Any

from deployments.client import DecisionClient
from router import asking


class Choosing:
    """Times both in this process from now on, without the wait for a replica that has room."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """clock: seconds, monotonic."""
        self.hash_ms: list[float] = []
        self.choose_ms: list[float] = []
        self._clock, self._watched = clock, False
        module: Any = asking
        hashed = module.route_key

        def route_key(*args: Any) -> Any:
            began = clock()
            try:
                return hashed(*args)
            finally:
                self.hash_ms.append(1000 * (clock() - began))

        module.route_key = route_key

    def watch(self, client: DecisionClient) -> None:
        """Times the choices of a client that has been answered: there is no router before."""
        if not self._watched:
            # names of Ray Serve 2.60, which gives no other way to its router in a caller's process
            self.time(client._handle._router._asyncio_router.request_router)
            self._watched = True

    def time(self, chooser: Any) -> None:
        """Times `choose_replicas` of a router."""
        choose = chooser.choose_replicas

        async def choose_replicas(*args: Any, **more: Any) -> Any:
            began = self._clock()
            try:
                return await choose(*args, **more)
            finally:
                self.choose_ms.append(1000 * (self._clock() - began))

        chooser.choose_replicas = choose_replicas
