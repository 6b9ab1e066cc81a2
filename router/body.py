"""Request bodies: read up to a limit, and decoded up to another."""

from collections.abc import Awaitable, Callable
from typing import Any

import zstandard

from flide_engine.errors import BodyTooLarge, Fault, InvalidRequest, UnsupportedEncoding

Receive = Callable[[], Awaitable[dict[str, Any]]]

MAX_WINDOW = 8 << 20
"""Largest zstd window: what a frame may make the decoder allocate (RFC 8878 asks for at least 8
MiB).
"""

PIECE = 512
"""Bytes that are decoded at once: at most 128 blocks of 128 KiB, so 16 MiB beyond the limit."""

MOST_FRAMES = 1024
"""Of one body. Each costs a microsecond, and 3 MiB have room for 390,000 empty ones."""


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
    try:
        parts, is_whole = _frames(body, limit)
    except (zstandard.ZstdError, MemoryError) as error:
        raise _not_zstd(str(error)) from None
    if sum(map(len, parts)) > limit:
        raise BodyTooLarge(limit, option)
    if not is_whole:
        raise _not_zstd("it ends inside a frame")
    return b"".join(parts)


def _frames(body: bytes, limit: int) -> tuple[list[bytes], bool]:
    """(What zstd frames decode to, until it is more than `limit` bytes, whether the last one is
    complete).
    """
    # a reader of the whole would not tell that the body was cut
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
    parts: list[bytes] = []
    size, frames, frame = 0, 1, decompressor.decompressobj()
    for at in range(0, len(body), PIECE):
        piece = body[at : at + PIECE]
        while piece and size <= limit:
            if frame.eof:
                frames += 1
                if frames > MOST_FRAMES:
                    raise _not_zstd(f"more than {MOST_FRAMES} frames")
                frame = decompressor.decompressobj()
            parts.append(frame.decompress(piece))
            size += len(parts[-1])
            piece = frame.unused_data
    return parts, frame.eof or not body


def _not_zstd(why: str) -> InvalidRequest:
    return InvalidRequest((Fault(("body",), f"not a zstd body: {why}", "zstd_invalid"),))
