"""Decisions over connections of a Gateway's own to the replicas, in place of Serve's handle.

A handle's call costs the Gateway and the replica 0.7 ms of processor time each (Ray 2.60 over
gRPC), on several threads: at 64 clients that is most of what the replica's interpreter does. Here a
call is a frame there and a frame back, on the loops that have the request in hand anyway.

Serve still says which replicas there are, and the request router where a state belongs. Whatever is
unusual goes by the handle: a request that was asked before, one that is too large, a replica that
has told no address or cannot be reached.
"""

import asyncio
import io
import itertools
import logging
import pickle
import time
from typing import Any, Protocol

from ray.exceptions import ActorUnavailableError

from flide_engine.errors import FlideError
from router.boards import Shared
from router.frames import Frames, Kind, packed, route_to_json, unpacked
from router.request_context import request_context
from router.tracing import carried

log = logging.getLogger("ray.serve")

CONNECT_S = 1.0
"""How long a replica may take to accept a connection."""

AGAIN_AFTER_S = 5.0
"""How long one that could not be reached is asked by handle."""

BEAT_S = 1.0
"""Seconds between pings of a replica that is waited for: a machine that is gone closes nothing."""

QUIET, SILENT = 2, 6
"""Pings in a row without a sign of life after which a replica is asked nothing more this way, and
after which what it has is asked elsewhere: of ten seconds, which clients wait, that leaves some.
"""

FORGOTTEN_S = 600.0
"""How long it is remembered that a replica could not be reached; names never come again."""

FULL_BYTES = 8 << 20
"""Bytes on their way to a replica that does not read, at most."""

ERRORS_FROM = ("flide_engine.errors", "builtins")
"""Modules whose errors a Gateway reads as they are."""

Told = tuple[bytes | FlideError, str, tuple[float, ...]]
"""What `EngineReplica.decide_with_load` returns."""


Address = tuple[str, int, str]
"""Host and port that a replica listens at, and the token that it wants to hear."""


class Router(Protocol):
    """The request router, as far as channels need it."""

    def place(self, route: object) -> tuple[str, Address, dict[str, object]] | None:
        """Where a request of this key goes, which counts as sent there: the replica, its address,
        and what it is told of why. None: by handle.
        """
        ...

    def lost(self, replica: str) -> None:
        """A replica's connection broke: nothing goes there before the cluster lists it again."""
        ...


class Connection(Frames):
    """To one replica."""

    def __init__(self, replica: str, token: str) -> None:
        super().__init__()
        self.replica, self._token = replica, token
        self.leaving = self.lost = False
        self._waiting: dict[int, asyncio.Future[Told | None]] = {}
        self._numbers = itertools.count()
        self._unanswered, self._looked = 0, 0.0  # pings in a row, and when the last was sent
        self._beat: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self.say(Kind.HELLO, 0, self._token.encode())

    @property
    def is_open(self) -> bool:
        """Whether requests may go there."""
        if self.lost or self.leaving or self.transport.is_closing():
            return False
        return self._unanswered < QUIET and self.transport.get_write_buffer_size() <= FULL_BYTES

    async def ask(self, more: dict[str, Any], body: bytes) -> Told | None:
        """What the replica tells; None if it has not taken the request. Raises what `decide` raises
        there, and ActorUnavailableError if the connection breaks.
        """
        if self.lost or self.transport.is_closing():
            return None  # since it was made: nobody would end what is waited for
        number, payload = next(self._numbers), packed(more, body)
        future: asyncio.Future[Told | None] = asyncio.get_running_loop().create_future()
        if self._beat is None:
            self._unanswered, self._looked = 0, time.monotonic()
            self._beat = self._next_beat()
        self._waiting[number] = future
        self.say(Kind.ASK, number, *payload)
        try:
            return await future
        except asyncio.CancelledError:
            self.say(Kind.CANCEL, number)
            raise
        finally:
            self._waiting.pop(number, None)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._unanswered = 0
        super().data_received(data)

    def heard(self, kind: int, number: int, payload: bytes) -> None:
        """See Frames."""
        if kind == Kind.LEAVING:
            self.leaving = True
            return
        future = self._waiting.get(number)
        if future is None or future.done():
            return  # nobody waits for it any more
        if kind == Kind.REFUSED:
            future.set_result(None)
        elif kind == Kind.ANSWER:
            more, answers = unpacked(payload)
            future.set_result((answers, more["replica"], tuple(more["load"])))
        elif kind == Kind.FAULT:
            more, pickled = unpacked(payload)
            error = _unpickled(pickled)
            if more["replica"] and isinstance(error, FlideError):
                future.set_result((error, more["replica"], tuple(more["load"])))
            else:
                future.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self.lost = True
        if self._beat is not None:
            self._beat.cancel()
        for future in self._waiting.values():
            if not future.done():
                told = f"the connection to replica {self.replica} broke: {exc or 'it was closed'}"
                future.set_exception(ActorUnavailableError(told, None))

    def _next_beat(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(BEAT_S, self._look)

    def _look(self) -> None:
        """Whether the replica still shows signs of life, if anybody waits for it."""
        self._beat, now = None, time.monotonic()
        if not self._waiting or self.lost:
            return
        if now - self._looked > 2 * BEAT_S:
            self._unanswered = 0  # it is this loop that has stood still
        self._looked = now
        if self._unanswered >= SILENT:
            log.warning("replica %s leaves %d pings unanswered", self.replica, SILENT)
            self.transport.abort()
            return
        self._unanswered += 1
        self.say(Kind.PING)
        self._beat = self._next_beat()


class _Errors(pickle.Unpickler):
    """Of our errors and Python's, and nothing else: whoever has a replica's port may answer."""

    def find_class(self, module: str, name: str) -> Any:
        """See pickle.Unpickler."""
        found = super().find_class(module, name) if module in ERRORS_FROM else None
        if isinstance(found, type) and (module != "builtins" or issubclass(found, Exception)):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no error")


def _unpickled(pickled: bytes) -> Exception:
    """An error of a replica's."""
    try:
        error = _Errors(io.BytesIO(pickled)).load()
    except Exception as cause:
        return RuntimeError(f"the replica's error cannot be read: {cause}")
    return error if isinstance(error, Exception) else RuntimeError(repr(error))


class Channels:
    """Connections of one event loop to the replicas of one deployment."""

    def __init__(self, known: Shared) -> None:
        """known: of the deployment, with the routers of its handles."""
        self._known = known
        self._open: dict[str, Connection] = {}
        self._making: dict[str, asyncio.Task[Connection | None]] = {}
        self._failed: dict[str, float] = {}  # when a replica could not be reached
        self._warned = False

    async def ask(self, more: dict[str, Any], body: bytes) -> Told | None:
        """What a replica tells of a request; None if it is to be asked by handle. Raises as
        `Connection.ask` does.

        more: arguments of `decide_with_load` but the request, its `route` among them. Cancelling it
        cancels the request there.
        """
        router: Router | None = self._known.ways.router_here()
        if router is None:
            self._warn()
            return None
        if (place := router.place(more["route"])) is None:
            return None
        replica, address, why = place
        connection = self._open.get(replica)
        if connection is None or not connection.is_open:
            connection = await self._connected(replica, address)
        if connection is None:
            return None
        route = route_to_json(more["route"])
        told = {**more, **why, "route": route, "context": request_context(), "trace": carried()}
        try:
            return await connection.ask(told, body)
        except ActorUnavailableError:
            router.lost(replica)
            raise

    async def _connected(self, replica: str, address: Address) -> Connection | None:
        """A connection that requests may go over; None where there is none."""
        before = self._open.get(replica)
        if before is not None and not before.lost:
            return None  # it leaves, or has too much to read
        failed = self._failed.get(replica)
        if failed is not None and time.monotonic() - failed < AGAIN_AFTER_S:
            return None
        making = self._making.get(replica)
        if making is None:
            making = asyncio.create_task(self._connect(replica, address))
            self._making[replica] = making
            making.add_done_callback(lambda _: self._making.pop(replica, None))
        if failed is not None:
            return None  # nobody waits for what was in vain before
        return await asyncio.shield(making)  # others wait for it, too

    def _warn(self) -> None:
        """Says once that all goes by handle, where there are routers and none on this loop."""
        if not self._warned and self._known.ways.exist:
            self._warned = True
            log.warning("all is asked by handle: Serve's router has an event loop of its own")

    async def _connect(self, replica: str, address: Address) -> Connection | None:
        loop, (host, port, token) = asyncio.get_running_loop(), address
        try:
            async with asyncio.timeout(CONNECT_S):
                _, made = await loop.create_connection(
                    lambda: Connection(replica, token), host, port
                )
        except (OSError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            message = "replica %s is asked by handle, as %s:%d cannot be reached: %s"
            log.warning(message, replica, host, port, why)
            self._has_failed(replica)
            return None
        if made.lost:  # as soon as it was made
            self._has_failed(replica)
            return None
        self._failed.pop(replica, None)
        self._open = {name: c for name, c in self._open.items() if not c.lost}
        self._open[replica] = made
        return made

    def _has_failed(self, replica: str) -> None:
        now = time.monotonic()
        recent = {name: at for name, at in self._failed.items() if now - at < FORGOTTEN_S}
        self._failed = {**recent, replica: now}

    def close(self) -> None:
        """Ends all connections."""
        for connection in self._open.values():
            connection.transport.abort()
