"""Callers before an engine that may have no replica: who waits for one, and who is sent away.

Both wake the fleet: one cheap call is left waiting in the handle, which is what Serve's autoscaler
sees, and what tells how long a start takes. A fleet whose last replica failed, or is replaced by an
update, has none, too, and does not sleep: Serve starts another one by itself, and callers wait for
it as in any fleet. Imports no torch.
"""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextvars import Context
from functools import partial
from typing import Any, TypeVar

import ray
from ray.serve._private.common import DeploymentStatus
from ray.serve.context import _get_global_client

from flide_engine.errors import NotReady
from router.boards import Members, shared

log = logging.getLogger("ray.serve")

T = TypeVar("T")

LEAST_S = 1.0
"""The shortest time after which to come again, also when a start takes longer than others did."""

HEARD_WITHIN_S = 0.5
"""How long a process may take to hear for the first time what replicas there are."""

LOOK_EVERY_S, LOOK_WITHIN_S = 2.0, 0.5
"""How often Serve is asked what a fleet without replicas is, and how long an answer is waited for.
"""

REMEMBERED = 4
"""Starts of which the longest is expected again: who was not the first to wake a fleet has seen
only the end of its start.
"""

Call = Callable[[], "Future[Any]"]
"""Begins a cheap call, which is answered once there is a replica."""

Look = Callable[[], "Future[bool]"]
"""Asks Serve whether it starts a replica of the deployment by itself."""


def never() -> "Future[bool]":
    """It does not."""
    answered: Future[bool] = Future()
    answered.set_result(False)
    return answered


class Waking:
    """What one process knows of the starts of a deployment. Any thread may use it."""

    def __init__(
        self,
        members: Members,
        clock: Callable[[], float] = time.monotonic,
        look: Look = never,
    ) -> None:
        """members: of the deployment, as this process's routers hear of them."""
        self.members, self._clock, self._look = members, clock, look
        self._seen: Future[bool] = never()
        self._looked = -math.inf
        self._starts: deque[float] = deque(maxlen=REMEMBERED)
        self._began: float | None = None
        self._waited = False
        self._lock = threading.Lock()

    @property
    def may_sleep(self) -> bool:
        """Whether the fleet is meant to have no replica where there is nothing to do."""
        return self.members.cold_start_s is not None

    @property
    def asleep(self) -> bool:
        """Whether there is no replica, and none is meant to be."""
        return self._is_empty and not self.replaced

    @property
    def replaced(self) -> bool:
        """Whether there is no replica because the last one failed or is updated, as far as is
        known: another one is being started.
        """
        seen = self._seen
        return self._is_empty and seen.done() and seen.exception() is None and seen.result()

    @property
    def _is_empty(self) -> bool:
        return self.may_sleep and self.members.count == 0

    @property
    def starting(self) -> bool:
        """Whether this process has woken the fleet and waits for it."""
        return self._began is not None

    def pauses(self, known: Callable[[], bool]) -> Iterator[float]:
        """Seconds to sleep, one after the other, until it is heard what replicas there are, and why
        there is none; mostly none. known: whether Serve knows of any.
        """
        if not self._waited:
            for _ in range(int(HEARD_WITHIN_S / 0.01)):
                if self.members.count is not None or known():
                    break
                yield 0.01
            self._waited = True
        if not self._is_empty:
            return
        with self._lock:
            if self._seen.done() and self._clock() - self._looked > LOOK_EVERY_S:
                self._looked, self._seen = self._clock(), self._look()
        for _ in range(int(LOOK_WITHIN_S / 0.01)):
            if self._seen.done():
                break
            yield 0.01

    def check(self, patience_s: float, call: Call) -> None:
        """Returns for who waits for an answer so long. If the fleet sleeps it is woken by the call,
        and who does not wait so long gets NotReady with the time to come again.
        """
        if not self.asleep:
            return
        left = max(LEAST_S, self._wake(call))
        if left > patience_s:
            raise NotReady("no engine replica runs; one is being started", math.ceil(1000 * left))

    def _wake(self, call: Call) -> float:
        """Wakes the fleet, unless that was done: how many seconds of the start are left."""
        with self._lock:
            now, wakes = self._clock(), self._began is None
            self._began = now if self._began is None else self._began
            expected = max(self._starts, default=self.members.cold_start_s or 0.0)
            left = expected - (now - self._began)
        if wakes:
            call().add_done_callback(self._woken)
        return left

    def _woken(self, answered: "Future[Any]") -> None:
        error = answered.exception()
        with self._lock:
            if error is None and self._began is not None:
                self._starts.append(self._clock() - self._began)
            self._began = None
        if error is not None:
            # whoever waits meets the same; the next caller wakes it again
            log.warning("no engine replica could be woken: %s: %s", type(error).__name__, error)


_of: dict[tuple[str, str], Waking] = {}
_awaiting: set[asyncio.Task[None]] = set()


def waking_of(handle: Any) -> Waking:
    """What this process knows of the starts of a handle's deployment."""
    key = handle.app_name, handle.deployment_name
    members = shared(*key).members
    found = _of.get(key)
    if found is None or found.members is not members:
        look = partial(_on_a_thread, lambda: are_replaced(*key))
        found = _of[key] = Waking(members, look=look)
    return found


def cheap_call(handle: Any) -> Call:
    """A call of an engine's `describe`, which keeps no process alive: on the running event loop, if
    there is one, as a handle may work nowhere else; else a thread waits for it.
    """

    def call() -> "Future[Any]":
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return _on_a_thread(lambda: handle.describe.remote().result())
        answered: Future[Any] = Future()
        # Of no request's context: Serve's router mixes up two calls of one request that wait in it
        # together, and one of them for ever.
        waits = loop.create_task(_awaited(handle, answered), context=Context())
        _awaiting.add(waits)  # as an event loop keeps none
        waits.add_done_callback(_awaiting.discard)
        return answered

    return call


async def _awaited(handle: Any, answered: "Future[Any]") -> None:
    try:
        answered.set_result(await handle.describe.remote())
    except asyncio.CancelledError:
        answered.set_exception(RuntimeError("the event loop ended"))
        raise
    except Exception as error:
        answered.set_exception(error)


def are_replaced(app: str, deployment: str) -> bool:
    """Whether Serve has the deployment for unhealthy (a replica failed and is being replaced), or
    updates it. One that is scaled to zero is healthy. Blocks; raises what Ray does.
    """
    if not ray.is_initialized():
        return False
    found = _get_global_client().get_serve_status(app).get_deployment_status(deployment)
    replacing = (DeploymentStatus.UNHEALTHY, DeploymentStatus.UPDATING)
    return found is not None and found.status in replacing


def _on_a_thread(work: Callable[[], T]) -> "Future[T]":
    answered: Future[T] = Future()

    def wait() -> None:
        try:
            answered.set_result(work())
        except Exception as error:
            answered.set_exception(error)

    threading.Thread(target=wait, name="flide-waking", daemon=True).start()
    return answered
