"""How one request is asked, beside what it asks: whose it is, what its state is called, its time,
its class. Over HTTP these are headers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from flide_engine.errors import Fault, InvalidRequest
from flide_engine.limits import seconds_allowed
from router.session_id import HEADER as SESSION
from router.session_id import check_session_id

TIMEOUT, PRIORITY = b"x-request-timeout-ms", b"x-priority"
PATIENCE_S = 10.0
"""How long an HTTP client that does not say is taken to wait: the official clients' timeout."""
CLASSES = ("interactive", "batch")
_MILLISECONDS = re.compile(r"[0-9]{1,12}")


@dataclass(frozen=True)
class HttpLimits:
    """What the HTTP surface checks itself: bytes of a body before and after decoding, seconds that
    a request may ask for, and its questions (None: the engine alone checks their number).
    """

    max_body_bytes: int
    max_decoded_bytes: int
    max_timeout_s: float
    max_questions: int | None = None


@dataclass(frozen=True)
class CallOptions:
    """tenant: whose checkpoints may be used. session_id: what the state goes by, "" for nothing.
    timeout_s: seconds until the answer is of no more use; None: as long as the engine allows.
    batch: it may wait for rounds with room to spare. patience_s: seconds that its caller will wait
    for a replica that has to be started; None: timeout_s.
    """

    tenant: str = ""
    session_id: str = ""
    timeout_s: float | None = None
    batch: bool = False
    patience_s: float | None = None


def from_headers(headers: Mapping[bytes, bytes], tenant: str, max_timeout_s: float) -> CallOptions:
    """The options of an HTTP request. Raises InvalidRequest naming the header."""
    given = {name: value.decode("latin-1").strip() for name, value in headers.items()}
    session = check_session_id(
        headers.get(SESSION, b"").decode("latin-1"), ("header", "X-Session-Id")
    )
    timeout = given.get(TIMEOUT, "")
    return CallOptions(
        tenant,
        session,
        _timeout(timeout, max_timeout_s),
        _batch(given),
        None if timeout else PATIENCE_S,
    )


def _timeout(value: str, most: float) -> float:
    """Seconds of `X-Request-Timeout-Ms`; none: all that is allowed."""
    loc = ("header", "X-Request-Timeout-Ms")
    if value and not _MILLISECONDS.fullmatch(value):
        msg = f"a timeout is a whole number of milliseconds, not {value[:40]!r}"
        raise InvalidRequest((Fault(loc, msg, "timeout_invalid"),))
    return seconds_allowed(int(value) / 1000 if value else None, most, loc)


def _batch(given: Mapping[bytes, str]) -> bool:
    value = given.get(PRIORITY, "").lower() or CLASSES[0]
    if value not in CLASSES:
        msg = f"a priority is one of {', '.join(CLASSES)}, not {value[:40]!r}"
        raise InvalidRequest((Fault(("header", "X-Priority"), msg, "priority_invalid"),))
    return value == CLASSES[1]
