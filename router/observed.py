"""What became of a request at the Gateway, and what it spent its time on: for metrics and traces.

A *trip* is one decision request, from its first byte to its last. Where nobody observes, it costs
a few stamps.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from flide_engine.errors import FlideError, RequestError
from router.body import ClientLeft
from router.tracing import record_stages

log = logging.getLogger("ray.serve")

Via = Literal["http", "handle"]
Scope = MutableMapping[str, Any]
App = Callable[[Any, Any, Any], Awaitable[None]]

ANSWERED, CANCELLED, INTERNAL = "answered", "cancelled", "internal"
"""Outcomes beside the names of the error tree's classes."""

_KEY = "flide.trip"


def outcome_of(error: BaseException) -> str:
    """What a request that failed with this counts as."""
    if isinstance(error, FlideError):
        return type(error).__name__
    return CANCELLED if isinstance(error, (asyncio.CancelledError, ClientLeft)) else INTERNAL


class Trip:
    """Stamps of one request; as a context manager it spans the decision and notes its outcome.

    stages: seconds by name, in the order in which they came: over HTTP `read` (the body), `charge`
    (quotas), `parse` (to a request that makes sense), `call` (the engine, with routing and retries)
    and `respond` (until the answer is handed to the server); by handle `call` alone. outcome: ""
    until there is one, and for what is no decision.
    """

    def __init__(self, via: Via = "http") -> None:
        self.via, self.tenant, self.outcome = via, "", ""
        self.stages: dict[str, float] = {}
        self.began_ns = time.time_ns()
        self._since = time.perf_counter()

    def passed(self, stage: str) -> None:
        """A stage ends, and the next one begins."""
        now = time.perf_counter()
        self.stages[stage] = self.stages.get(stage, 0.0) + now - self._since
        self._since = now

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.outcome = ANSWERED if error is None else outcome_of(error)
        if error is not None:
            level = logging.INFO if isinstance(error, RequestError) else logging.WARNING
            # an error itself would keep its traceback, and the request with it, for as long as a
            # handler keeps the record
            told = error.for_logs if isinstance(error, FlideError) else str(error)
            log.log(level, "not answered: %s: %s", self.outcome, told)


class Observer(Protocol):
    """Whoever is told of trips."""

    def ended(self, trip: Trip) -> None:
        """A decision request is over; called on the event loop, so it must be quick."""
        ...


@contextmanager
def observing(observer: Observer | None, via: Via) -> Iterator[Trip]:
    """A trip, of which the observer is told at the end of the block if it was a decision."""
    trip = Trip(via)
    try:
        yield trip
    finally:
        if trip.outcome:
            record_stages(trip.began_ns, trip.stages, {"flide.outcome": trip.outcome})
            if observer is not None:
                observer.ended(trip)


def observed(app: App, observer: Observer | None) -> App:
    """The ASGI app with a trip for each HTTP request, which it finds by `trip_of`."""

    async def call(scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        with observing(observer, "http") as trip:
            scope[_KEY] = trip
            await app(scope, receive, send)
            trip.passed("respond")

    return call


def trip_of(scope: Scope) -> Trip:
    """The trip of an HTTP request; one of its own where nobody observes."""
    trip: Trip = scope.setdefault(_KEY, Trip())
    return trip
