"""A decision whose replica dies: asked again as a suspect, refused or answered; over a stand-in."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from flide_engine.errors import (
    DeadlineExceeded,
    EngineStopped,
    RequestQuarantined,
    TooManyTokens,
)
from router import asking, boards
from router.asking import ask, ask_within
from router.options import CallOptions
from router.quarantine import Quarantine
from router.suspects import SETTLED_WITHIN_S, End
from tests.router.handle_stand_ins import (
    AWAY,
    DIED,
    GOOD,
    REQUEST,
    STOPPED,
    WAITED,
    Handle,
    Response,
    Returned,
    asked,
    both,
)


@pytest.fixture
def blamed(monkeypatch: pytest.MonkeyPatch) -> list[End]:
    """How replicas are found to have ended under a suspect: not at all, or as the last says."""
    found = [End.NONE]
    monkeypatch.setattr(asking, "_quarantine", Quarantine())
    monkeypatch.setattr(asking.suspects, "ended_under", lambda suspect, within_s: found[-1])
    return found


deaths = pytest.mark.parametrize(
    "death",
    [DIED, AWAY, STOPPED, Returned(EngineStopped("CUDA error"))],
    ids=["died", "unavailable", "stopped", "told"],
)


@both
@deaths
def test_a_death_costs_one_retry(way: str, death: object, blamed: list[End]) -> None:
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
@pytest.mark.parametrize("end", [End.GONE, End.CRASHED])
def test_who_ran_where_replicas_died_is_refused(
    way: str, death: object, end: End, blamed: list[End]
) -> None:
    """From then on, without another replica. A process that is gone may be anybody's doing: it
    takes two; one that ended by a fault of its own, or an engine that says that it ended under a
    request, is believed at once.
    """
    blamed.append(end)
    said = death not in (DIED, AWAY) or end is End.CRASHED
    deadly = Handle(death, death, *([] if said else [death]))
    for handle in (deadly, Handle(GOOD)):
        with pytest.raises(RequestQuarantined, match="2 replicas died"):
            asked(handle, way)
    assert len(deadly.calls) == len(deadly.responses)


@both
@pytest.mark.parametrize("death", [DIED, AWAY])
def test_who_ran_once_where_a_process_was_killed_is_answered(
    way: str, death: object, blamed: list[End]
) -> None:
    """Others killed it."""
    blamed.append(End.GONE)
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
def test_who_did_not_run_there_is_not_to_blame(way: str, death: object, blamed: list[End]) -> None:
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
    way: str, blamed: list[End], monkeypatch: pytest.MonkeyPatch
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

    def ended_under(suspect: str, within_s: float) -> End:
        waited.append(within_s)
        return End.NONE

    monkeypatch.setattr(asking.suspects, "ended_under", ended_under)
    monkeypatch.setattr(asking, "time", SimpleNamespace(monotonic=lambda: 100.0))
    handle: Any = Handle(DIED, DIED, GOOD)
    options = CallOptions(timeout_s=timeout)
    if way == "await":
        asyncio.run(ask(handle, REQUEST, options))
    else:
        ask_within(handle, REQUEST, options)
    assert waited == [most]
