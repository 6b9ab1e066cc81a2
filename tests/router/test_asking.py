"""One decision through a handle: the key, the load that comes back, errors, deadlines, fleets that
sleep; over a stand-in.
"""

import asyncio
from typing import Any

import pytest
from ray.exceptions import RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from flide_engine import DecisionResponse
from flide_engine.errors import (
    DeadlineExceeded,
    FlideError,
    InvalidRequest,
    NotReady,
    Overloaded,
    TooManyTokens,
)
from flide_engine.wire import to_json
from router import boards
from router.asking import BY_VALUE_BYTES, ask, ask_within, own_error, plain_error
from router.options import CallOptions
from router.routing_key import route_key
from router.session_id import check_session_id
from tests.router.handle_stand_ins import GOOD, REQUEST, Handle, Returned, asked, both


def ask_either(handle: Any, way: str, request: dict[str, Any]) -> DecisionResponse:
    """As `asked`, another request."""
    if way == "await":
        return asyncio.run(ask(handle, request, CallOptions()))
    return ask_within(handle, request, CallOptions())


@both
def test_the_key_goes_along_and_the_load_is_noted(way: str) -> None:
    """In builtins only; a session id stands in for the state."""
    boards._shared.clear()
    handle = Handle(GOOD)
    assert asked(handle, way, "me") == GOOD
    (args, kwargs) = handle.calls[0]
    assert args == (to_json(REQUEST),)
    assert 0 < kwargs.pop("timeout_s") <= 60.0
    assert kwargs == {
        "tenant": "",
        "session_id": "me",
        "batch": False,
        "route": tuple(route_key(REQUEST, "", "me")),
    }
    assert type(kwargs["route"]) is tuple
    board = boards.shared("app", "Engine").board
    assert (board.wait("replica", 0.0) or 0) > 0
    assert board.load.tokens_per_ms == 400.0


@both
def test_errors_of_ours_come_through_unwrapped(way: str) -> None:
    """And are not tried again; Serve's refusal is Overloaded; a stranger's error is left alone."""
    ours = TooManyTokens("the request", 9, 8, "max_request_tokens")
    for raised, expected in (
        (RayTaskError("decide", "", ours), TooManyTokens),
        (Returned(ours), TooManyTokens),
        (BackPressureError(1, 1), Overloaded),
        (DeploymentUnavailableError(DeploymentID("Engine", "app")), NotReady),
        (ZeroDivisionError("x"), ZeroDivisionError),
    ):
        handle = Handle(raised)
        boards._shared.clear()
        with pytest.raises(expected):
            asked(handle, way)
        assert len(handle.calls) == 1
        # a refusal that is returned bears the load of who refuses
        told = boards.shared("app", "Engine").board.load.tokens_per_ms
        assert (told == 400.0) == isinstance(raised, Returned)


def test_a_deadline_cancels_the_call() -> None:
    """With and without an event loop; and so does a caller who leaves."""
    handle = Handle(TimeoutError())
    with pytest.raises(DeadlineExceeded, match="within 60 s"):
        asked(handle, "block")
    assert handle.responses[0].cancelled
    late: Any = Handle("late", "late")
    with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s"):
        asyncio.run(ask(late, REQUEST, CallOptions(timeout_s=0.05)))
    assert late.responses[0].cancelled

    async def impatient() -> None:
        await asyncio.wait_for(ask(late, REQUEST, CallOptions()), 0.05)

    with pytest.raises(TimeoutError):
        asyncio.run(impatient())
    assert late.responses[1].cancelled
    assert late.calls[1][1]["timeout_s"] is None


@both
def test_a_fleet_that_sleeps_is_woken_and_waited_for_only_by_who_has_the_time(way: str) -> None:
    """Others are told when to come again, and nothing is sent for them."""
    boards._shared.clear()
    members = boards.shared("app", "Engine").members
    members.count, members.cold_start_s = 0, 60.0

    def ask_for(timeout_s: float | None, patience_s: float | None, handle: Any) -> None:
        options = CallOptions("", "", timeout_s, False, patience_s)
        if way == "await":
            asyncio.run(ask(handle, REQUEST, options))
        else:
            ask_within(handle, REQUEST, options)

    for timeout_s, patience_s in ((10.0, None), (300.0, 10.0), (10.0, 300.0)):
        handle = Handle(GOOD)
        with pytest.raises(NotReady) as refused:
            ask_for(timeout_s, patience_s, handle)
        assert refused.value.retry_after_ms > 1000 * 10
        assert handle.calls == []
    for timeout_s, patience_s in ((300.0, None), (None, None), (None, 61.0)):
        handle = Handle(GOOD)
        ask_for(timeout_s, patience_s, handle)
        assert len(handle.calls) == 1
    members.count = 1
    ask_for(0.5, None, Handle(GOOD))
    boards._shared.clear()


@both
def test_large_requests_go_through_the_object_store(way: str) -> None:
    """Those that might not fit a gRPC message; a request that is no JSON goes nowhere."""
    for size, by_reference in ((BY_VALUE_BYTES, []), (BY_VALUE_BYTES + 1, [True])):
        handle: Any = Handle(GOOD)
        state = "x" * (size - len(to_json({**REQUEST, "state": ""})))
        request = {**REQUEST, "state": state}
        assert ask_either(handle, way, request) == GOOD
        assert handle.by_reference == by_reference
        assert len(handle.calls[0][0][0]) == size
    for odd in ({1, 2}, float("nan"), "\ud800"):
        handle = Handle()
        with pytest.raises(InvalidRequest, match="not JSON"):
            ask_either(handle, way, {**REQUEST, "state": [odd]})
        assert handle.calls == []


@both
@pytest.mark.parametrize("bad", ["x" * 257, "caf\u00e9", "a\nb", 7, None])
def test_bad_session_ids_are_refused_before_anything_is_sent(way: str, bad: Any) -> None:
    """With what is allowed."""
    handle = Handle()
    with pytest.raises(InvalidRequest, match="256 printable ASCII"):
        asked(handle, way, bad)
    assert handle.calls == []
    assert check_session_id("~ x") == "~ x"


def test_a_full_queue_of_serve_is_told_with_its_numbers() -> None:
    """It is not one of ours."""
    ours = str(own_error(BackPressureError(12, 10)))
    assert ours.startswith("12 requests wait, the queue takes 10 (Serve's max_queued_requests)")


def test_plain_errors() -> None:
    """Of classes that every process has."""
    errors: list[tuple[FlideError, type]] = [
        (TooManyTokens("x", 2, 1, "o"), ValueError),
        (NotReady("x"), RuntimeError),
    ]
    for error, kind in errors:
        assert type(plain_error(error)) is kind
        assert str(plain_error(error)) == str(error)
