"""Requests as JSON bytes: how they cross processes, and what their size is counted in.

Between processes a request is its JSON. A pickle of the typed form takes the engine's process
longer to read (a small one 5 us against 3, twenty questions 31 against 20) and has no bound: a
state of 2.0 MB of numbers is 4.5 MB of pickle, and Serve's messages end at 4 MiB. Answers come back
the same way: 2.4 us to write in the engine's process, where a pickle takes 20.
"""

import json
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from flide_engine.api import DecisionRequest, Question
from flide_engine.errors import MOST_FAULTS, BodyTooLarge, Fault, InvalidRequest, as_faults

_QUESTION: TypeAdapter[Any] = TypeAdapter(Question)


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


def from_json(body: bytes, most_questions: int | None = None) -> DecisionRequest:
    """The request of a JSON body. Raises InvalidRequest as `from_plain`."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest((Fault(("body", error.pos), error.msg, "json_invalid"),)) from None
    return from_plain(data, most_questions)


def from_plain(data: object, most_questions: int | None = None) -> DecisionRequest:
    """The request of parsed JSON. most_questions: `max_questions`, looked at before the questions.

    Raises InvalidRequest naming the faults of every question until there are `MOST_FAULTS`, of a
    question's options the first that is wrong.
    """
    questions = data.get("questions") if isinstance(data, dict) else None
    if most_questions is not None and isinstance(questions, dict):
        check_number(len(questions), most_questions)
    try:
        return DecisionRequest.model_validate(data)
    except ValidationError as error:
        raise InvalidRequest(as_faults(_faults(questions, error), ("body",))) from None
    except RecursionError as error:
        raise InvalidRequest((Fault(("body",), "nested too deeply"),)) from error


def check_number(questions: int, most: int) -> None:
    """Raises InvalidRequest for more questions than `max_questions`."""
    if questions > most:
        msg = f"{questions} questions; the limit is {most} (max_questions)"
        raise InvalidRequest((Fault(("body", "questions"), msg, "too_long"),))


def _faults(questions: object, error: ValidationError) -> list[dict[str, Any]]:
    """What is wrong beside the questions, and with each of them, of which the error has one."""
    listed = _listed(error)
    found = [fault for fault in listed if fault["loc"][:1] != ("questions",)]
    if not isinstance(questions, dict) or len(found) == len(listed):
        return listed
    for name, question in questions.items():
        if len(found) > MOST_FAULTS:
            break
        try:
            _QUESTION.validate_python(question)
        except ValidationError as wrong:
            found += [{**f, "loc": ("questions", name, *f["loc"])} for f in _listed(wrong)]
    return found or listed


def _listed(error: ValidationError) -> list[dict[str, Any]]:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return [dict(fault) for fault in found]


def parse_request(
    request: DecisionRequest | dict[str, Any] | bytes,
    most: int | None = None,
    most_questions: int | None = None,
) -> DecisionRequest:
    """A request in any of its forms, typed. most: bytes of its JSON (`max_decoded_bytes`).

    Raises InvalidRequest as `from_plain`, and BodyTooLarge before anything else is looked at.
    """
    if most is not None:
        size = len(request if isinstance(request, bytes) else to_json(request))
        if size > most:
            raise BodyTooLarge(most, "max_decoded_bytes")
    if isinstance(request, DecisionRequest):
        return request
    if isinstance(request, bytes):
        return from_json(request, most_questions)
    return from_plain(request, most_questions)
