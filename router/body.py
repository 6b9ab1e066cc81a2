"""Request bodies: read up to a limit, and decoded up to another."""

import io
from collections.abc import Awaitable, Callable
from typing import Any

import zstandard

from flide_engine.errors import BodyTooLarge, Fault, InvalidRequest, UnsupportedEncoding

Receive = Callable[[], Awaitable[dict[str, Any]]]

MAX_WINDOW = 8 << 20
"""Largest zstd window: what a frame may make the decoder allocate (RFC 8878 asks for at least 8
MiB).
"""


class ClientLeft(Exception):
    """The client closed the connection before its body was complete; there is nobody to answer."""


async def read_body(
    receive: Receive, declared: int | None, limit: int, option: str = "max_body_bytes"
) -> bytes:
    """The body of an ASGI request. Raises BodyTooLarge before more than `limit` bytes are kept.

    option: whose limit it is.
    """
    if declared is not None and declared > limit:
        raise BodyTooLarge(limit, option)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise BodyTooLarge(limit, option)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def decode_body(body: bytes, encoding: str, limit: int, option: str = "max_decoded_bytes") -> bytes:
    """The body without its content encoding: none or zstd.

    Raises UnsupportedEncoding for any other, or for several; BodyTooLarge if it decodes to more
    than `limit` bytes; InvalidRequest if it is not what it says.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        if len(body) > limit:
            raise BodyTooLarge(limit, option)
        return body
    if name != "zstd":
        raise UnsupportedEncoding(encoding[:80], "identity, zstd")
    reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).stream_reader(
        io.BytesIO(body), read_across_frames=True
    )
    try:
        decoded = reader.read(limit + 1)
    except (zstandard.ZstdError, MemoryError) as error:
        raise InvalidRequest(
            (Fault(("body",), f"not a zstd body: {error}", "zstd_invalid"),)
        ) from None
    if len(decoded) > limit:
        raise BodyTooLarge(limit, option)
    return decoded
