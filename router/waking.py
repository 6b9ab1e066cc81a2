"""A Gateway before an engine that may have no replica: who waits for one, and who is sent away.

Both wake the fleet: one cheap call is left waiting in the handle, which is what the autoscaling
policy sees, and what tells how long a start takes.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from flide_engine.errors import NotReady

log = logging.getLogger("ray.serve")

PATIENCE_S = 10.0
"""How long a caller that does not say is taken to wait: the official clients' timeout."""

LEAST_S = 1.0
"""The shortest time after which to come again, also when a start takes longer than the last did."""

KNOWN_WITHIN_S = 0.5
"""How long a process may take to hear for the first time what replicas there are."""


class Waking:
    """What one Gateway knows of its engine's starts."""

    def __init__(
        self,
        replicas: Callable[[], int | None],
        call: Callable[[], Awaitable[object]],
        assumed_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """replicas: how many there are, None if nothing was heard yet. call: a cheap call that is
        answered once there is one. assumed_s: seconds of a start before one was measured.
        """
        self._replicas, self._call, self._clock = replicas, call, clock
        self._start_s = assumed_s
        self._began, self._slept = 0.0, False
        self._waking: asyncio.Task[None] | None = None

    async def asleep(self) -> bool:
        """Whether there is no replica. False if that cannot be told."""
        if self._replicas() is None:
            self._wake()
            for _ in range(int(KNOWN_WITHIN_S / 0.01)):
                if self._replicas() is not None:
                    break
                await asyncio.sleep(0.01)
        return self._replicas() == 0

    async def check(self, timeout_s: float | None) -> None:
        """Returns at once for who can wait for an answer so long, None: `PATIENCE_S`. If there is
        no replica it wakes one, and raises NotReady with the time to come again for who cannot.
        """
        if not await self.asleep():
            return
        self._wake()
        self._slept = True
        left = max(LEAST_S, self._start_s - (self._clock() - self._began))
        if left > (PATIENCE_S if timeout_s is None else timeout_s):
            raise NotReady("no engine replica runs; one is being started", round(1000 * left))

    def _wake(self) -> None:
        if self._waking is None:
            self._began, self._slept = self._clock(), False
            self._waking = asyncio.create_task(self._woken())

    async def _woken(self) -> None:
        try:
            await self._call()
            if self._slept:
                self._start_s = self._clock() - self._began
        except Exception as error:
            # whoever waits meets the same; the next caller wakes it again
            log.warning("no engine replica could be woken: %s: %s", type(error).__name__, error)
        finally:
            self._waking = None
