"""Errors on the wire: one table from the error tree to HTTP statuses, and the body's shape."""

import math
from typing import Any

from flide_engine.errors import (
    AuthenticationFailed,
    BodyTooLarge,
    CheckpointRefused,
    ConfigError,
    DeadlineExceeded,
    EngineStopped,
    FlideError,
    InvalidRequest,
    NonFiniteOutput,
    NotReady,
    Overloaded,
    PoolExhausted,
    QuotaExceeded,
    RequestQuarantined,
    RoundFailed,
    RoundTooLarge,
    TooManyBranches,
    TooManyTokens,
    TooMuchPinned,
    UnknownModel,
    UnknownState,
    UnsupportedEncoding,
    WeightsError,
)

STATUS: dict[type[FlideError], int] = {
    InvalidRequest: 422,
    TooManyTokens: 413,
    BodyTooLarge: 413,
    UnsupportedEncoding: 415,
    UnknownModel: 400,
    AuthenticationFailed: 401,
    RequestQuarantined: 422,
    UnknownState: 404,
    TooMuchPinned: 409,
    TooManyBranches: 409,
    Overloaded: 429,
    QuotaExceeded: 429,
    NotReady: 503,
    EngineStopped: 503,
    DeadlineExceeded: 408,
    NonFiniteOutput: 500,
    RoundFailed: 500,
    RoundTooLarge: 500,
    PoolExhausted: 503,
    CheckpointRefused: 409,
    ConfigError: 500,
    WeightsError: 500,
}
"""Leaves of the error tree; a status of 408, 429 or 5xx makes the official clients ask again."""


def error_body(error: FlideError) -> dict[str, Any]:
    """`{"detail": [...]}` for a malformed request, `{"detail": {"error_type", "message"}}` for the
    rest.
    """
    if isinstance(error, InvalidRequest):
        return {
            "detail": [{"loc": list(f.loc), "msg": f.msg, "type": f.type} for f in error.faults]
        }
    return {"detail": {"error_type": error.error_type, "message": str(error)}}


def error_headers(error: FlideError) -> list[tuple[bytes, bytes]]:
    """When to try again, and how to authenticate."""
    if isinstance(error, (Overloaded, QuotaExceeded, NotReady)) and error.retry_after_ms:
        seconds = max(1, math.ceil(error.retry_after_ms / 1000))
        return [
            (b"retry-after", b"%d" % seconds),
            (b"retry-after-ms", b"%d" % error.retry_after_ms),
        ]
    if isinstance(error, AuthenticationFailed):
        return [(b"www-authenticate", b"Bearer")]
    return []
