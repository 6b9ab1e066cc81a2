"""A Gateway's own connections to replicas (`router.channel`, `deployments.listening`), both ends
real and in one event loop; Serve and the engine are stood in for.
"""

import asyncio
import pickle
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
import uvloop
from ray.exceptions import ActorUnavailableError
from ray.serve import context

from deployments import listening
from deployments.listening import Listener
from flide_engine.errors import (
    EngineStopped,
    Fault,
    FlideError,
    InvalidRequest,
    TooManyTokens,
)
from router import channel
from router.boards import nothing_shared
from router.channel import Address, Channels, Connection
from router.frames import Frames, Kind, packed
from router.request_context import enter
from router.request_router import address_of
from router.routing_key import route_key
from tests.waiting import PATIENCE_S

ROUTE = tuple(route_key({"state": "s" * 3000}, "tenant", ""))
MORE = {"tenant": "tenant", "session_id": "", "route": ROUTE, "batch": False, "timeout_s": 5.0}
LOAD = (1.0, 2.0, 3.0, 4.0)


class Replica:
    """What stands behind a listener: it does what the request says."""

    def __init__(self) -> None:
        self.asked: list[tuple[bytes, dict[str, Any]]] = []
        self.ids: list[str] = []
        self.cancelled = 0
        self.go = asyncio.Event()

    async def decide(self, request: bytes, **how: Any) -> tuple[bytes | FlideError, str, Any]:
        """See EngineReplica.decide_with_load."""
        self.asked.append((request, how))
        self.ids.append(context._get_serve_request_context().request_id)
        if request == b"wait":
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if request == b"refuse":
            return TooManyTokens("the request", 9, 8, "max_request_tokens"), "r1", LOAD
        if request == b"raise":
            raise ValueError("odd")
        return b"answer to " + request, "r1", LOAD


class Router:
    """The request router: one replica, at an address."""

    def __init__(self, address: Address | None) -> None:
        self.address, self.losses = address, 0

    def place(self, route: object) -> tuple[str, Address, dict[str, object]] | None:
        """See router.channel.Router."""
        if self.address is None:
            return None
        return "r1", self.address, {"anchor": 2**63 + 1, "home": "r1", "reason": "home"}

    def lost(self, replica: str) -> None:
        """See router.channel.Router."""
        self.losses += 1


class Both:
    """Both ends."""

    def __init__(self) -> None:
        self.replica = Replica()
        self.listener = Listener(self.replica.decide)
        self.known = nothing_shared()
        self.channels = Channels(self.known)

    async def open(self) -> None:
        """Listens, and knows the address as routers do."""
        address = address_of(await self.listener.open("127.0.0.1"))
        assert address is not None
        self.router = Router(address)
        self.known.ways.add(self.router)

    async def ask(self, body: bytes) -> Any:
        """What is told of a request."""
        return await self.channels.ask(MORE, body)

    async def begun(self, count: int) -> None:
        """Once so many requests have come."""
        await until(lambda: len(self.replica.asked) >= count)


async def until(what: Callable[[], bool]) -> None:
    """Returns once it is so."""
    while not what():  # noqa: ASYNC110  # it is other code's doing
        await asyncio.sleep(0.001)


LOOPS: tuple[Callable[[], asyncio.AbstractEventLoop], ...] = (
    asyncio.new_event_loop,
    uvloop.new_event_loop,
)
"""Serve runs on the second; they tell of a lost connection in different order."""


def run(test: Callable[[Both], Awaitable[None]]) -> None:
    """A test with both ends open, on either kind of loop; it may hang only so long."""

    async def bounded() -> None:
        both = Both()
        await both.open()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await test(both)
        finally:
            both.channels.close()
            await both.listener.close()

    for loop in LOOPS:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(bounded())


def test_answers_come_back_with_all_that_was_told_beside_the_request() -> None:
    """Bytes as they are, also many and large ones at once; the request's id is that of the logs."""

    async def test(both: Both) -> None:
        enter({"request_id": "id-7", "route": "/"})
        assert await both.ask(b"\x00\xff") == (b"answer to \x00\xff", "r1", LOAD)
        request, how = both.replica.asked[0]
        assert request == b"\x00\xff"
        why = {"anchor": 2**63 + 1, "home": "r1", "reason": "home"}
        assert how == {**MORE, **why, "route": ROUTE}
        assert both.replica.ids == ["id-7"]
        bodies = [bytes([i]) * (1 + i * 20_000) for i in range(20)]
        told = await asyncio.gather(*map(both.ask, bodies))
        assert [found[0] for found in told] == [b"answer to " + body for body in bodies]
        # more than a replica reads in time goes by handle
        told = await asyncio.gather(*(both.ask(b"x" * (1 << 20)) for _ in range(24)))
        assert told.count(None) >= 24 - 2 * (channel.FULL_BYTES >> 20)
        assert told.count(None) < 24

    run(test)


def test_errors_come_back_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the tree as what was told, with the load; others raised, pickled or not."""

    async def test(both: Both) -> None:
        told = await both.ask(b"refuse")
        assert isinstance(told[0], TooManyTokens)
        assert told[1:] == ("r1", LOAD)
        with pytest.raises(ValueError, match="odd"):
            await both.ask(b"raise")

        class Local(Exception):
            """Cannot be pickled."""

        async def decide(request: bytes, **how: Any) -> Any:
            raise Local("here")

        both.listener._decide = decide
        with pytest.raises(RuntimeError, match="Local: here"):
            await both.ask(b"x")

        async def strange(request: bytes, **how: Any) -> Any:
            raise ActorUnavailableError("a sibling", None)  # says nothing of this replica

        both.listener._decide = strange
        with pytest.raises(RuntimeError, match="ActorUnavailableError: .*a sibling"):
            await both.ask(b"x")
        # what nobody can read ends that request, and nothing else
        with monkeypatch.context() as patched:
            patched.setattr(listening, "_pickled", lambda error: b"junk")
            with pytest.raises(RuntimeError, match="cannot be read"):
                await both.ask(b"x")
        assert not both.channels._open["r1"].lost

    run(test)


def test_who_leaves_takes_the_request_along() -> None:
    """By itself, and with its whole Gateway."""

    async def test(both: Both) -> None:
        tasks = [asyncio.create_task(both.ask(b"wait")) for _ in range(3)]
        await both.begun(3)
        tasks[0].cancel()
        await until(lambda: both.replica.cancelled == 1)
        assert not tasks[1].done()
        both.channels.close()
        for task in tasks[1:]:
            with pytest.raises(ActorUnavailableError, match="r1 broke"):
                await task
        await until(lambda: both.replica.cancelled == 3)
        assert both.router.losses == 2

    run(test)


def test_a_replica_that_dies_fails_what_it_had_and_a_new_connection_is_made() -> None:
    """To whoever has its place then."""

    async def test(both: Both) -> None:
        task = asyncio.create_task(both.ask(b"wait"))
        await both.begun(1)
        (guest,) = both.listener._guests
        guest.transport.abort()
        with pytest.raises(ActorUnavailableError):
            await task
        assert (await both.ask(b"again"))[0] == b"answer to again"

    run(test)


def test_a_replica_that_leaves_takes_nothing_new_and_ends_what_it_has() -> None:
    """What came too late is for the handle; so is all that comes then."""

    async def test(both: Both) -> None:
        asked = asyncio.create_task(both.ask(b"wait"))
        await both.begun(1)
        leaving = asyncio.create_task(both.listener.leave(5.0))
        await asyncio.sleep(0)
        assert await both.ask(b"late") is None  # refused there, or known to leave
        await asyncio.sleep(0.01)
        assert await both.ask(b"later") is None
        assert not leaving.done()
        both.replica.go.set()
        assert (await asked)[0] == b"answer to wait"
        await leaving
        assert [request for request, _ in both.replica.asked] == [b"wait"]

    run(test)


def test_leaving_ends_in_time_whatever_is_under_way() -> None:
    """Serve kills a replica that stays too long."""

    async def test(both: Both) -> None:
        asked = asyncio.create_task(both.ask(b"wait"))
        await both.begun(1)
        await both.listener.leave(0.01)
        await both.listener.close()
        with pytest.raises(ActorUnavailableError):
            await asked

    run(test)


def test_what_cannot_be_reached_is_asked_by_handle() -> None:
    """And not tried again for a while; nor is there a channel without a router, or an address."""

    async def test(both: Both) -> None:
        host, _, token = both.router.address or ("", 0, "")
        both.router.address = (host, 1, token)
        assert await both.ask(b"x") is None
        failed = dict(both.channels._failed)
        assert list(failed) == ["r1"]
        assert await both.ask(b"x") is None
        assert both.channels._failed == failed
        both.router.address = None
        assert await both.ask(b"x") is None
        both.known.ways._routers.clear()
        assert await both.ask(b"x") is None
        assert both.replica.asked == []

    run(test)


def test_nothing_is_read_from_who_does_not_know_the_token() -> None:
    """Neither a request nor a long hello; the connection is closed."""

    class Stranger(Frames):
        closed = False

        def heard(self, kind: int, number: int, payload: bytes) -> None:
            """Nothing is said to it."""
            raise AssertionError

        def connection_lost(self, exc: Exception | None) -> None:
            """See asyncio.Protocol."""
            self.closed = True

    async def test(both: Both) -> None:
        host, port, token = both.router.address or ("", 0, "")
        ask = packed({**MORE, "route": [], "context": {}, "trace": {}}, b"x")
        for said in (
            [(Kind.HELLO, b"x" * 64), (Kind.ASK, *ask)],
            [(Kind.ASK, *ask)],
            [(Kind.HELLO, token.encode() + b"x" * 1000)],
        ):
            loop = asyncio.get_running_loop()
            _, stranger = await loop.create_connection(Stranger, host, port)
            for kind, *payload in said:
                stranger.say(kind, 0, *payload)
            await until(lambda stranger=stranger: stranger.closed)
        assert both.replica.asked == []
        assert not both.listener._guests

    run(test)


def test_a_silent_replica_is_given_up_and_a_slow_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a machine that is gone closes no connection; a slow one answers pings."""
    monkeypatch.setattr(channel, "BEAT_S", 0.03)

    async def test(both: Both) -> None:
        asked = asyncio.create_task(both.ask(b"wait"))
        await both.begun(1)
        await asyncio.sleep(0.6)
        assert not asked.done()
        (guest,) = both.listener._guests
        guest.heard = lambda *frame: None  # type: ignore[method-assign]
        with pytest.raises(ActorUnavailableError):
            await asked

    run(test)


def test_a_loop_that_stood_still_blames_no_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own pauses are no silence of a replica's, however long."""
    monkeypatch.setattr(channel, "BEAT_S", 0.03)

    async def test(both: Both) -> None:
        asked = asyncio.create_task(both.ask(b"wait"))
        await both.begun(1)
        for _ in range(channel.SILENT + 4):
            time.sleep(0.1)  # noqa: ASYNC251  # as if the process were stopped
            await asyncio.sleep(0.001)
        assert not asked.done()
        both.replica.go.set()
        assert (await asked)[0] == b"answer to wait"

    run(test)


def test_nobody_waits_on_a_connection_that_is_gone() -> None:
    """It may break between being made and being asked over; then all goes by handle for a while."""

    class Slams(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            """Hangs up at once."""
            transport.abort()  # type: ignore[attr-defined]

    async def test(both: Both) -> None:
        line = Connection("r1", "token")
        line.lost = True
        assert await line.ask({}, b"x") is None
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Slams, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        both.router.address = ("127.0.0.1", port, "token")
        for _ in range(20):
            with suppress(ActorUnavailableError):  # if it was sent before that was known
                assert await both.ask(b"x") is None
        server.close()

    run(test)


def test_a_request_that_is_given_up_there_is_not_waited_for() -> None:
    """By none of those who wait: it goes by handle."""

    async def test(both: Both) -> None:
        async def decide(request: bytes, **how: Any) -> Any:
            raise asyncio.CancelledError

        both.listener._decide = decide
        assert await both.ask(b"x") is None

        async def odd(request: bytes, **how: Any) -> Any:
            return b"answer", "r1", (object(),)  # no JSON

        both.listener._decide = odd
        with pytest.raises(TypeError):
            await both.ask(b"x")

    run(test)


def test_only_errors_are_read_from_a_replica() -> None:
    """Whoever has its port may answer: what else is pickled is not made."""

    class Odd:
        def __reduce__(self) -> Any:
            return print, ("it runs here",)

    for odd in (Odd(), ValueError(Odd()), [], SystemExit()):
        assert isinstance(channel._unpickled(pickle.dumps(odd)), RuntimeError)
    refusal = TooManyTokens("the request", 9, 8, "max_request_tokens")
    fault = InvalidRequest((Fault(("state",), "missing"),))
    for error in (refusal, fault, ValueError("x"), EngineStopped("c", running=False, replica="r")):
        again = channel._unpickled(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == str(error)


def test_where_nothing_can_be_listened_at_all_goes_by_handle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node's address may be another machine's; and Ray's own connections may be encrypted."""

    async def told(host: str) -> dict[str, list[object]]:
        listener = Listener(Replica().decide)
        try:
            return await listener.open(host)
        finally:
            await listener.close()

    assert asyncio.run(told("198.51.100.77")) == {}  # of documents, and nobody's
    assert asyncio.run(told("127.0.0.1"))
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert asyncio.run(told("127.0.0.1")) == {}
