"""Where Gateways connect to one replica: the other end of `router.channel`."""

import asyncio
import hmac
import logging
import os
import pickle
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import ray

from flide_engine.errors import FlideError
from router.channel import ERRORS_FROM
from router.frames import HELLO_BYTES, MOST_BYTES, Frames, Kind, packed, route_from_json, unpacked
from router.request_context import enter
from router.request_router import LISTENS
from router.tracing import under

log = logging.getLogger("ray.serve")

Decide = Callable[..., Awaitable[tuple[bytes | FlideError, str, tuple[float, ...]]]]
"""`EngineReplica.decide_with_load`."""

HELLO_WITHIN_S = 5.0
"""How long who connects may take to say the token."""


class Listener:
    """Takes requests over connections, and answers them as `decide` does. Of one event loop."""

    def __init__(self, decide: Decide) -> None:
        self._decide = decide
        self._token = secrets.token_hex(32)
        self._guests: set[_Guest] = set()
        self._server: asyncio.Server | None = None
        self._leaving = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, host: str = "") -> dict[str, list[object]]:
        """Begins to listen at the node's address that its cluster knows it by; what is to be told
        to the routers: nothing where it cannot be bound, or Ray's own connections are encrypted,
        which these are not. host: another address.
        """
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return {}
        host = host or ray.util.get_node_ip_address()
        if self._server is None:
            loop = asyncio.get_running_loop()
            try:
                self._server = await loop.create_server(lambda: _Guest(self), host, 0)
            except OSError as error:
                log.warning("asked by handle only, as %s cannot be listened at: %s", host, error)
                return {}
        port = self._server.sockets[0].getsockname()[1]
        return {LISTENS: [host, port, self._token]}

    def knows(self, token: bytes) -> bool:
        """Whether it is the token that the routers were told."""
        return hmac.compare_digest(token, self._token.encode())

    async def leave(self, within_s: float) -> None:
        """Takes nothing new, and returns when what is under way has ended, or after so many
        seconds.
        """
        self._leaving = True
        for guest in self._guests:
            guest.say(Kind.LEAVING)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)
        await asyncio.sleep(0)  # the last answers are on their way

    async def close(self) -> None:
        """Ends all connections, and with them what was asked over them."""
        if self._server is not None:
            self._server.close()
        for guest in list(self._guests):
            guest.transport.close()
        for _ in range(100):  # what was said is on its way before the process ends
            if not self._guests:
                break
            await asyncio.sleep(0.01)

    def joined(self, guest: "_Guest") -> None:
        """A Gateway has said the token."""
        self._guests.add(guest)
        if self._leaving:
            guest.say(Kind.LEAVING)

    def left(self, guest: "_Guest") -> None:
        """A connection is gone."""
        self._guests.discard(guest)

    def take(self, guest: "_Guest", number: int, payload: bytes) -> asyncio.Task[None] | None:
        """Begins to answer a request; None if nothing is taken any more."""
        if self._leaving:
            guest.say(Kind.REFUSED, number)
            return None
        task = asyncio.get_running_loop().create_task(self._answer(guest, number, payload))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answer(self, guest: "_Guest", number: int, payload: bytes) -> None:
        """Says an answer or a fault in any case but that nobody waits for one."""
        try:
            how, request = unpacked(payload)
            enter(how.pop("context"))
            how["route"] = route_from_json(how["route"])
            with under(how.pop("trace")):
                told, replica, load = await self._decide(request, **how)
            kind = Kind.ANSWER if isinstance(told, bytes) else Kind.FAULT
            said = told if isinstance(told, bytes) else _pickled(told)
            frame = packed({"replica": replica, "load": load}, said)
        except asyncio.CancelledError:
            guest.say(Kind.REFUSED, number)  # not its caller's doing, if it still waits
            raise
        except Exception as error:
            if not isinstance(error, FlideError):
                log.exception("Request failed.")
            kind, frame = Kind.FAULT, packed({"replica": "", "load": ()}, _pickled(error))
        guest.say(kind, number, *frame)


def _pickled(error: Exception) -> bytes:
    """The error; what it says, if a Gateway would not read it or it cannot be pickled."""
    if type(error).__module__ in ERRORS_FROM:
        try:
            return pickle.dumps(error)
        except Exception as cause:
            log.debug("%s cannot be pickled: %s", type(error).__name__, cause)
    return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


class _Guest(Frames):
    """A connection; nothing but the token is read before that was said."""

    def __init__(self, listener: Listener) -> None:
        super().__init__(HELLO_BYTES)
        self._listener, self._is_known = listener, False
        self._asked: dict[int, asyncio.Task[None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        self._late = loop.call_later(HELLO_WITHIN_S, self.transport.abort)

    def heard(self, kind: int, number: int, payload: bytes) -> None:
        """See Frames."""
        if not self._is_known:
            self._late.cancel()
            if kind != Kind.HELLO or not self._listener.knows(payload):
                log.warning("a connection from %s was refused", self._peer)
                self.transport.abort()
                return
            self._is_known, self.most = True, MOST_BYTES
            self._listener.joined(self)
        elif kind == Kind.ASK:
            if (task := self._listener.take(self, number, payload)) is not None:
                self._asked[number] = task
                task.add_done_callback(lambda _: self._asked.pop(number, None))
        elif kind == Kind.CANCEL:
            if (task := self._asked.get(number)) is not None:
                task.cancel()
        elif kind == Kind.PING:
            self.say(Kind.PONG)

    @property
    def _peer(self) -> Any:
        return self.transport.get_extra_info("peername")

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._late.cancel()
        self._listener.left(self)
        for task in list(self._asked.values()):
            task.cancel()
