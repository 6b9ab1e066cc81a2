"""Session ids: what a caller may name a state by, so that all of its requests go to one replica."""

import re

from flide_engine.errors import Fault, InvalidRequest

HEADER = b"x-session-id"
MAX_CHARS = 256
_PRINTABLE = re.compile(rf"[\x20-\x7e]{{1,{MAX_CHARS}}}")


def check_session_id(value: object, loc: tuple[str, ...] = ("session_id",)) -> str:
    """The session id; "" for none. loc: where it stood.

    Raises InvalidRequest for anything but at most 256 printable ASCII characters.
    """
    if value == "":
        return ""
    if isinstance(value, str) and _PRINTABLE.fullmatch(value):
        return value
    told = f"{len(value)} characters" if isinstance(value, str) else f"a {type(value).__name__}"
    message = f"a session id is 1 to {MAX_CHARS} printable ASCII characters; got {told}"
    if isinstance(value, str) and len(value) <= MAX_CHARS:
        message += ", some of them not printable ASCII"
    raise InvalidRequest((Fault(loc, message, "session_id_invalid"),))
