"""Trips of requests through the HTTP surface: what is observed of each."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from flide_engine.errors import DeadlineExceeded
from router.auth import key_hash
from router.observed import Trip, observed, observing
from tests.router.test_http_app import GOOD, LIMITS, Stub, app_of

KEYS = (key_hash("right"),)


class Seen:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.trips: list[Trip] = []

    def ended(self, trip: Trip) -> None:
        self.trips.append(trip)


@pytest.fixture
def seen() -> Seen:
    """What was observed."""
    return Seen()


def asked(
    seen: Seen, method: str = "POST", path: str = "/v1/systemone", app: Any = None, **kw: Any
) -> int:
    """Status of one request; app: one with other limits."""

    async def run() -> int:
        nonlocal app
        app = observed(app or app_of(Stub(), KEYS), seen)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return (await client.request(method, path, **kw)).status_code

    return asyncio.run(run())


def test_an_answer_has_its_stages_and_its_tenant(seen: Seen) -> None:
    """In order, and once."""
    bearer = {"authorization": "Bearer right"}
    assert asked(seen, json=GOOD, headers=bearer) == 200
    (trip,) = seen.trips
    assert list(trip.stages) == ["read", "charge", "parse", "call", "respond"]
    assert min(trip.stages.values()) >= 0
    assert (trip.outcome, trip.tenant, trip.via) == ("answered", KEYS[0], "http")


@pytest.mark.parametrize(
    ("body", "key", "outcome"),
    [
        ({"state": "s"}, "right", "InvalidRequest"),
        (GOOD, "wrong", "AuthenticationFailed"),
        ({**GOOD, "state": "x" * LIMITS.max_body_bytes}, "right", "BodyTooLarge"),
        ({**GOOD, "state": "nan"}, "right", "NonFiniteOutput"),
        ({**GOOD, "state": "crash"}, "right", "internal"),
    ],
)
def test_failures_count_by_what_they_are(
    seen: Seen, body: dict[str, Any], key: str, outcome: str
) -> None:
    """A class of the error tree, or that we do not know; a stranger is nobody's tenant."""
    asked(seen, json=body, headers={"authorization": f"Bearer {key}"})
    (trip,) = seen.trips
    assert trip.outcome == outcome
    assert trip.tenant == ("" if key == "wrong" else KEYS[0])


@pytest.mark.parametrize("state", ["nan", "x" * LIMITS.max_body_bytes])
def test_a_log_keeps_no_request(seen: Seen, caplog: pytest.LogCaptureFixture, state: str) -> None:
    """As an error in a record would, by its traceback."""
    with caplog.at_level(logging.INFO, "ray.serve"):
        asked(seen, json={**GOOD, "state": state}, headers={"authorization": "Bearer right"})
    (record,) = caplog.records
    assert isinstance(record.args, tuple)
    assert {type(told) for told in record.args} == {str}
    assert record.exc_info is None


def test_what_is_no_decision_is_not_counted(seen: Seen) -> None:
    """Health, models, an unknown path, a wrong method."""
    for method, path in (("GET", "/health"), ("GET", "/"), ("GET", "/x"), ("GET", "/v1/systemone")):
        asked(seen, method, path)
    assert seen.trips == []


def over_asgi(seen: Seen, receive: Callable[[], Any], decider: Any) -> None:
    """A decision request whose body comes as told."""
    scope = {"type": "http", "method": "POST", "path": "/v1/systemone", "headers": []}

    async def send(message: object) -> None:
        raise AssertionError(f"nobody is there: {message}")

    async def run() -> None:
        call = asyncio.ensure_future(observed(app_of(decider), seen)(scope, receive, send))
        await asyncio.sleep(0.01)
        call.cancel()
        await call

    asyncio.run(run())


def test_who_leaves_is_counted_as_cancelled(seen: Seen) -> None:
    """Before the body is complete, and while the engine works."""

    async def left() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    over_asgi(seen, left, Stub())

    class Slow(Stub):
        async def decide(self, *_: Any) -> Any:
            await asyncio.sleep(60)

    async def whole() -> dict[str, Any]:
        body = b'{"state": "s", "questions": {"q": {"type": "noul", "instructions": "?"}}}'
        return {"type": "http.request", "body": body}

    with pytest.raises(asyncio.CancelledError):
        over_asgi(seen, whole, Slow())
    assert [trip.outcome for trip in seen.trips] == ["cancelled", "cancelled"]


def test_a_call_by_handle(seen: Seen) -> None:
    """One stage; errors pass through."""
    with observing(seen, "handle") as trip, trip:
        trip.passed("call")
    with pytest.raises(DeadlineExceeded), observing(seen, "handle") as trip, trip:
        raise DeadlineExceeded(1.0)
    assert [(t.outcome, t.via, list(t.stages)) for t in seen.trips] == [
        ("answered", "handle", ["call"]),
        ("DeadlineExceeded", "handle", []),
    ]
