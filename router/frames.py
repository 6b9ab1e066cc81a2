"""What a Gateway and a replica say to each other over a connection of their own: frames.

A frame is its payload's length, what it is, the number of the call that it is about, and the
payload: a JSON object that says more, behind its length, and bytes as they are.
"""

import asyncio
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, cast

import orjson

_HEAD = struct.Struct(">IBQ")
_MORE = struct.Struct(">I")

MOST_BYTES = 64 << 20
"""Of a payload: far more than a request or an answer may be."""

HELLO_BYTES = 256
"""Of what a caller may say before it is known."""


class Kind(IntEnum):
    """HELLO: the token that a replica has told its routers. ASK, CANCEL, PING: of a caller. ANSWER,
    FAULT (an error, pickled), REFUSED (nothing was done: ask another way), LEAVING (ask nothing
    more), PONG: of a replica.
    """

    HELLO = 0
    ASK = 1
    CANCEL = 2
    PING = 3
    ANSWER = 4
    FAULT = 5
    REFUSED = 6
    LEAVING = 7
    PONG = 8


class Frames(asyncio.Protocol):
    """One end of a connection; see `heard`."""

    transport: asyncio.Transport

    def __init__(self, most: int = MOST_BYTES) -> None:
        """most: bytes of a payload that the other end may send."""
        self.most, self._parts = most, bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is not one by its class

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        parts = self._parts
        parts += data
        at = 0
        while len(parts) - at >= _HEAD.size:
            length, kind, number = _HEAD.unpack_from(parts, at)
            if length > self.most:
                self.transport.abort()
                return
            end = at + _HEAD.size + length
            if len(parts) < end:
                break
            payload = bytes(memoryview(parts)[at + _HEAD.size : end])
            at = end
            self.heard(kind, number, payload)
            if self.transport.is_closing():
                return
        if at:
            del parts[:at]

    def heard(self, kind: int, number: int, payload: bytes) -> None:
        """A frame has come."""
        raise NotImplementedError

    def say(self, kind: Kind, number: int = 0, *payload: bytes) -> None:
        """Sends a frame, unless the connection is gone."""
        if not self.transport.is_closing():
            head = _HEAD.pack(sum(map(len, payload)), kind, number)
            self.transport.write(b"".join((head, *payload)))


def route_to_json(route: Sequence[Any]) -> list[Any]:
    """A `tuple(RouteKey)`, whose bytes JSON cannot hold."""
    return [part.hex() if isinstance(part, bytes) else part for part in route]


def route_from_json(route: Sequence[Any]) -> tuple[Any, ...]:
    """What `route_to_json` was given."""
    scheme, tenant, session, chain, *rest = route
    return scheme, tenant, session, bytes.fromhex(chain), *rest


def packed(more: Mapping[str, Any], body: bytes) -> tuple[bytes, bytes, bytes]:
    """A payload of an object and bytes, for `Frames.say`."""
    said = orjson.dumps(more)
    return _MORE.pack(len(said)), said, body


def unpacked(payload: bytes) -> tuple[dict[str, Any], bytes]:
    """What `packed` has packed."""
    (length,) = _MORE.unpack_from(payload)
    end = _MORE.size + length
    return orjson.loads(payload[_MORE.size : end]), payload[end:]
