"""One decision through a handle: the key, the load that comes back, the retry; over a stand-in."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from flide_engine import DecisionResponse, Usage
from flide_engine.errors import (
    DeadlineExceeded,
    EngineStopped,
    FlideError,
    InvalidRequest,
    NotReady,
    Overloaded,
    RequestQuarantined,
    TooManyTokens,
)
from flide_engine.wire import to_json
from router import asking, boards
from router.asking import BY_VALUE_BYTES, ask, ask_within, own_error, plain_error
from router.options import CallOptions
from router.quarantine import Quarantine
from router.routing_key import route_key
from router.session_id import check_session_id
from router.suspects import SETTLED_WITHIN_S

REQUEST: dict[str, Any] = {"state": "s", "questions": {}}
GOOD = DecisionResponse(model="m", usage=Usage(input_tokens=1, output_tokens=0), answers={})
DIED, AWAY = ActorDiedError(), ActorUnavailableError("unreachable", None)
STOPPED = RayTaskError("decide", "", EngineStopped("CUDA error"))
WAITED = RayTaskError("decide", "", EngineStopped("CUDA error", running=False, replica="broken"))


@dataclass(frozen=True)
class Returned:
    """An error that comes as a value."""

    error: FlideError


class Response:
    """What a handle gives back."""

    def __init__(self, outcome: object) -> None:
        self.outcome, self.cancelled = outcome, False

    def result(self, timeout_s: float | None) -> Any:
        assert timeout_s is None or timeout_s >= 0
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        if isinstance(self.outcome, Returned):
            return self.outcome.error, "replica", (7.0, 5.0, 3.0, 400.0)
        assert isinstance(self.outcome, DecisionResponse)
        return self.outcome.model_dump_json().encode(), "replica", (7.0, 5.0, 3.0, 400.0)

    def cancel(self) -> None:
        self.cancelled = True

    def __await__(self) -> Iterator[Any]:
        yield from asyncio.sleep(60 if self.outcome == "late" else 0).__await__()
        return self.result(1.0)


class Handle:
    """An engine handle whose calls end as told, one after the other."""

    app_name, deployment_name = "app", "Engine"

    def __init__(self, *outcomes: object) -> None:
        self.responses = [Response(outcome) for outcome in outcomes]
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.decide_with_load = self
        self.by_reference: list[bool] = []

        self.woken: list[Response] = []
        self.describe = self.Describe(self.woken)

    class Describe:
        """The cheap call that waits until there is a replica, which never comes."""

        def __init__(self, woken: list["Response"]) -> None:
            self._woken = woken

        def remote(self) -> "Response":
            self._woken.append(Response(TimeoutError()))
            return self._woken[-1]

    def running_replicas_populated(self) -> bool:
        return True

    def options(self, _by_reference: bool) -> "Handle":
        self.by_reference.append(_by_reference)
        return self

    def remote(self, *args: Any, **kwargs: Any) -> Response:
        self.calls.append((args, kwargs))
        return self.responses[len(self.calls) - 1]


def ask_either(handle: Any, way: str, request: dict[str, Any]) -> DecisionResponse:
    """As `asked`, another request."""
    if way == "await":
        return asyncio.run(ask(handle, request, CallOptions()))
    return ask_within(handle, request, CallOptions())


def asked(handle: Any, way: str, session_id: str = "") -> DecisionResponse:
    """The answers, with or without an event loop."""
    if way == "await":
        return asyncio.run(ask(handle, REQUEST, CallOptions("", session_id, 5.0)))
    return ask_within(handle, REQUEST, CallOptions("", session_id, 5.0))


both = pytest.mark.parametrize("way", ["await", "block"])


@both
def test_the_key_goes_along_and_the_load_is_noted(way: str) -> None:
    """In builtins only; a session id stands in for the state."""
    boards._shared.clear()
    handle = Handle(GOOD)
    assert asked(handle, way, "me") == GOOD
    (args, kwargs) = handle.calls[0]
    assert args == (to_json(REQUEST),)
    assert 0 < kwargs.pop("timeout_s") <= 5.0
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


@pytest.fixture
def blamed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names under which a suspect is found to have been running where the replica died."""
    found: list[str] = []
    monkeypatch.setattr(asking, "_quarantine", Quarantine())
    monkeypatch.setattr(asking.suspects, "killed", lambda suspect, within_s: bool(found))
    return found


deaths = pytest.mark.parametrize(
    "death",
    [DIED, AWAY, STOPPED, Returned(EngineStopped("CUDA error"))],
    ids=["died", "unavailable", "stopped", "told"],
)


@both
@deaths
def test_a_death_costs_one_retry(way: str, death: object, blamed: list[str]) -> None:
    """The same call again, as a suspect, which shares no round."""
    handle = Handle(death, GOOD)
    assert asked(handle, way) == GOOD
    (first, again) = (kwargs for _, kwargs in handle.calls)
    assert "suspect" not in first
    assert 0 < again["timeout_s"] <= first["timeout_s"]
    more = {"timeout_s": again["timeout_s"], "suspect": again["suspect"], "retry": True}
    assert again == {**first, **more}
    assert len(again["suspect"]) == 32


@both
@deaths
def test_who_ran_where_replicas_died_is_refused(way: str, death: object, blamed: list[str]) -> None:
    """From then on, without another replica. A process that is gone may be anybody's doing: it
    takes two; an engine that says that it ended under a request is told at once.
    """
    blamed.append("me")
    said = death not in (DIED, AWAY)
    deadly = Handle(death, death, *([] if said else [death]))
    for handle in (deadly, Handle(GOOD)):
        with pytest.raises(RequestQuarantined, match="2 replicas died"):
            asked(handle, way)
    assert len(deadly.calls) == len(deadly.responses)


@both
@pytest.mark.parametrize("death", [DIED, AWAY])
def test_who_ran_once_where_a_process_was_killed_is_answered(
    way: str, death: object, blamed: list[str]
) -> None:
    """Others killed it."""
    blamed.append("me")
    assert asked(Handle(death, death, GOOD), way) == GOOD


@both
def test_what_is_refused_elsewhere_costs_one_replica_here_at_most(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process tells it while the first one dies here."""
    store: Any = SimpleNamespace(told={}, put=lambda *told: store.told.update([told]))
    store.all = lambda: store.told
    monkeypatch.setattr(asking, "_quarantine", Quarantine(store=store))
    handle = Handle(DIED, GOOD)
    send = handle.remote

    def sent(*args: Any, **kwargs: Any) -> Response:
        Quarantine(store=store).put(REQUEST)
        return send(*args, **kwargs)

    monkeypatch.setattr(handle, "remote", sent)
    with pytest.raises(RequestQuarantined):
        asked(handle, way)
    assert len(handle.calls) == 1


@both
@pytest.mark.parametrize("death", [DIED, AWAY, WAITED], ids=["died", "unavailable", "waited"])
def test_who_did_not_run_there_is_not_to_blame(way: str, death: object, blamed: list[str]) -> None:
    """It is asked again, by the same name, until it is answered; but not for ever.

    One that is known to have waited is no suspect, and shares rounds as before.
    """
    handle = Handle(*[death] * 5, GOOD)
    assert asked(handle, way) == GOOD
    (name,) = {kwargs.get("suspect", "") for _, kwargs in handle.calls[1:]}
    assert bool(name) == (death is not WAITED)
    assert [bool(kwargs.get("retry")) for _, kwargs in handle.calls] == [False, *[True] * 5]
    handle = Handle(*[death] * 6, GOOD)
    with pytest.raises(EngineStopped, match="6 replicas could not answer"):
        asked(handle, way)
    assert asked(Handle(GOOD), way) == GOOD


@both
def test_a_suspect_that_is_not_answered_leaves_no_mark(
    way: str, blamed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the cluster's store, where a replica that died has left it; one that is has none left."""
    ended: list[str] = []
    monkeypatch.setattr(asking.suspects, "end", ended.append)
    ours = RayTaskError("decide", "", TooManyTokens("the request", 9, 8, "max_request_tokens"))
    for last in (ours, TimeoutError()):
        ended.clear()
        handle = Handle(DIED, last)
        with pytest.raises((TooManyTokens, DeadlineExceeded)):
            asked(handle, way)
        assert ended == [handle.calls[1][1]["suspect"]]
    ended.clear()
    assert asked(Handle(DIED, GOOD), way) == GOOD
    with pytest.raises(TooManyTokens):
        asked(Handle(ours), way)
    assert ended == []


@both
def test_a_replica_whose_engine_stopped_is_told_to_the_routers(way: str) -> None:
    """By its name, before the next try."""
    boards._shared.clear()
    known = boards.shared("app", "Engine")
    assert asked(Handle(WAITED, GOOD), way) == GOOD
    assert known.stopped == {"broken"}
    assert asked(Handle(STOPPED, GOOD), way) == GOOD
    assert known.stopped == {"broken"}


@both
@pytest.mark.parametrize(("timeout", "most"), [(0.5, 0.5), (60.0, SETTLED_WITHIN_S), (None, 5.0)])
def test_a_death_is_waited_for_within_the_callers_time(
    way: str, timeout: float | None, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster learns of it in time, or the request is asked again while there is any."""
    waited: list[float] = []

    def killed(suspect: str, within_s: float) -> bool:
        waited.append(within_s)
        return False

    monkeypatch.setattr(asking.suspects, "killed", killed)
    handle: Any = Handle(DIED, DIED, GOOD)
    options = CallOptions(timeout_s=timeout)
    if way == "await":
        asyncio.run(ask(handle, REQUEST, options))
    else:
        ask_within(handle, REQUEST, options)
    (within,) = waited
    assert 0 < within <= most


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
    with pytest.raises(DeadlineExceeded, match="within 5 s"):
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
