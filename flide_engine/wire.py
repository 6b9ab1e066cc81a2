"""Requests as JSON bytes: how they cross processes, and what their size is counted in.

Between processes a request is its JSON. A pickle of the typed form takes the engine's process
longer to read (a small one 5 us against 3, twenty questions 31 against 20) and has no bound: a
state of 2.0 MB of numbers is 4.5 MB of pickle, and Serve's messages end at 4 MiB. Answers come back
the same way: 2.4 us to write in the engine's process, where a pickle takes 20.
"""

import json
from typing import Any

import orjson
from pydantic import ValidationError

from flide_engine.api import DecisionRequest
from flide_engine.errors import BodyTooLarge, Fault, InvalidRequest, as_faults


def to_json(request: DecisionRequest | dict[str, Any]) -> bytes:
    """A request in UTF-8. Raises InvalidRequest for what is no JSON: NaN, lone surrogates, other
    objects, or nesting without end.
    """
    plain = request.model_dump() if isinstance(request, DecisionRequest) else request
    try:
        text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()
    except RecursionError as error:
        raise InvalidRequest((Fault(("body",), "nested too deeply"),)) from error
    except (TypeError, ValueError) as error:
        raise InvalidRequest((Fault(("body",), f"not JSON: {error}", "json_invalid"),)) from None


def from_json(body: bytes) -> DecisionRequest:
    """The request of a JSON body. Raises InvalidRequest naming every fault."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest((Fault(("body", error.pos), error.msg, "json_invalid"),)) from None
    return from_plain(data)


def from_plain(data: object) -> DecisionRequest:
    """The request of parsed JSON. Raises InvalidRequest naming every fault."""
    try:
        return DecisionRequest.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise InvalidRequest(as_faults([dict(f) for f in found], ("body",))) from None
    except RecursionError as error:
        raise InvalidRequest((Fault(("body",), "nested too deeply"),)) from error


def parse_request(
    request: DecisionRequest | dict[str, Any] | bytes, most: int | None = None
) -> DecisionRequest:
    """A request in any of its forms, typed. most: bytes of its JSON (`max_decoded_bytes`).

    Raises InvalidRequest, and BodyTooLarge before anything else is looked at.
    """
    if most is not None:
        size = len(request if isinstance(request, bytes) else to_json(request))
        if size > most:
            raise BodyTooLarge(most, "max_decoded_bytes")
    if isinstance(request, DecisionRequest):
        return request
    return from_json(request) if isinstance(request, bytes) else from_plain(request)
