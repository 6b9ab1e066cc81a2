"""Who waits for a replica that is being started, and who is told when to come again."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import (
    DeploymentStatus,
    DeploymentStatusInfo,
    DeploymentStatusTrigger,
)

from flide_engine.errors import NotReady
from router import boards, waking
from router.boards import Members
from router.http_errors import STATUS, error_headers
from router.waking import Waking, cheap_call, waking_of
from tests.waiting import until

EVER = 1e9


class Asleep:
    """A fleet with so many replicas, on a clock of its own; `start` answers the waiting call."""

    def __init__(self, replicas: int | None = 0, cold_start_s: float | None = 60.0) -> None:
        self.members, self.now = Members(), 100.0
        self.members.count, self.members.cold_start_s = replicas, cold_start_s
        self.calls: list[Future[Any]] = []
        self.looks: list[Future[bool]] = []
        self.waking = Waking(self.members, lambda: self.now, self._look)

    def _call(self) -> "Future[Any]":
        self.calls.append(Future())
        return self.calls[-1]

    def _look(self) -> "Future[bool]":
        self.looks.append(Future())
        return self.looks[-1]

    def heard(self, failed: bool | Exception) -> None:
        """A caller comes, and Serve says whether the replicas failed."""
        for _ in self.waking.pauses(lambda: True):
            if not self.looks[-1].done() and isinstance(failed, bool):
                self.looks[-1].set_result(failed)
            elif not self.looks[-1].done():
                self.looks[-1].set_exception(failed)

    def start(self, after_s: float) -> None:
        """A replica runs, so long after it was woken."""
        self.now += after_s
        self.members.count = 1
        self.calls[-1].set_result(None)

    def told(self, patience_s: float) -> int:
        """Milliseconds after which to come again; 0 for who may wait."""
        try:
            self.waking.check(patience_s, self._call)
        except NotReady as error:
            return error.retry_after_ms
        return 0


def test_nobody_is_held_up_by_a_fleet_that_runs() -> None:
    """Or that is meant to run always, or of which nothing is known; and nothing is called."""
    for fleet in (Asleep(replicas=2), Asleep(cold_start_s=None), Asleep(replicas=None)):
        assert fleet.told(0.01) == 0
        assert fleet.calls == []
        assert not fleet.waking.asleep


def test_short_deadlines_are_sent_away_and_long_ones_wait() -> None:
    """By what is left of a start; all of them wake the fleet, once."""
    fleet = Asleep(cold_start_s=60)
    assert fleet.waking.asleep
    assert not fleet.waking.starting
    assert fleet.told(10) == 60_000
    assert fleet.waking.starting
    assert fleet.told(59) == 60_000
    assert fleet.told(61) == 0
    fleet.now += 45
    assert fleet.told(10) == 15_000
    fleet.now += 6
    assert fleet.told(10) == 0
    assert fleet.told(8.9) == 9_000
    fleet.now += 60  # it takes longer than was thought
    assert fleet.told(10) == 0
    assert fleet.told(0.5) == 1_000
    assert len(fleet.calls) == 1


def test_who_waits_wakes_it_too() -> None:
    """Without anybody who is sent away."""
    fleet = Asleep()
    assert fleet.told(EVER) == 0
    assert len(fleet.calls) == 1


def test_a_start_is_measured() -> None:
    """The longest of the last four is expected: others may have woken it before."""
    fleet = Asleep(cold_start_s=60)
    assert fleet.told(10) == 60_000
    fleet.start(after_s=20)
    assert not fleet.waking.starting
    assert fleet.told(10) == 0
    for after_s in (5, 3, 2):
        fleet.members.count = 0
        assert fleet.told(10) == 20_000
        fleet.start(after_s)
    fleet.members.count = 0
    assert fleet.told(10) == 20_000
    fleet.start(after_s=4)
    fleet.members.count = 0
    assert fleet.told(10) == 0  # five seconds anybody has
    assert fleet.told(4) == 5_000


def test_what_was_not_heard_yet_is_waited_for_once() -> None:
    """Until the router hears how many there are, or Serve knows of any; or not for long."""
    fleet = Asleep(replicas=None)
    pauses = fleet.waking.pauses(lambda: False)
    next(pauses)
    fleet.members.count = 1
    assert list(pauses) == []
    known = iter([False, False, True])
    assert len(list(Asleep(replicas=None).waking.pauses(lambda: next(known)))) == 2
    unknown = Asleep(replicas=None).waking
    assert sum(unknown.pauses(lambda: False)) == pytest.approx(0.5)
    assert list(unknown.pauses(lambda: False)) == []
    assert list(Asleep(replicas=3).waking.pauses(lambda: False)) == []


def test_a_start_that_fails_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """By the next caller, the log says why, and nothing is learned of how long one takes."""
    fleet = Asleep(cold_start_s=60)
    assert fleet.told(10) == 60_000
    fleet.now += 3
    fleet.calls[0].set_exception(RuntimeError("no node"))
    assert "no node" in caplog.text
    assert not fleet.waking.starting
    assert fleet.told(10) == 60_000
    assert len(fleet.calls) == 2


def test_a_fleet_whose_last_replica_failed_does_not_sleep() -> None:
    """Callers wait for its successor as in any fleet, until Serve says that none is meant to be;
    it is asked every two seconds.
    """
    fleet = Asleep(cold_start_s=60)
    fleet.heard(failed=True)
    assert fleet.waking.replaced
    assert not fleet.waking.asleep
    assert fleet.told(1) == 0
    assert fleet.calls == []
    fleet.heard(failed=False)
    assert len(fleet.looks) == 1
    assert fleet.told(1) == 0
    fleet.now += 2.5
    fleet.heard(failed=False)
    assert fleet.waking.asleep
    assert fleet.told(1) == 60_000
    fleet.start(after_s=20)
    fleet.heard(failed=True)
    assert len(fleet.looks) == 2
    assert not fleet.waking.replaced


def test_a_fleet_of_which_serve_says_nothing_sleeps() -> None:
    """It cannot be asked, or does not answer, for which nobody waits long; it is asked again."""
    fleet = Asleep(cold_start_s=60)
    fleet.heard(OSError("no controller"))
    assert fleet.told(1) == 60_000
    fleet.now += 2.5
    pauses = fleet.waking.pauses(lambda: True)
    assert sum(pauses) == pytest.approx(0.5)
    assert fleet.told(1) == 60_000 - 2500
    assert len(fleet.looks) == 2


def test_what_serve_says_of_a_fleet_without_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that is replaced, by itself or by an update; asleep and waking ones are not, nor what
    is not there.
    """
    said: dict[str, DeploymentStatusInfo] = {}
    status = SimpleNamespace(get_deployment_status=said.get)
    client = SimpleNamespace(get_serve_status=lambda app: status)
    monkeypatch.setattr(waking.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(waking, "_get_global_client", lambda: client)
    found = set()
    for state in DeploymentStatus:
        trigger = DeploymentStatusTrigger.UNSPECIFIED
        said["Engine"] = DeploymentStatusInfo("Engine", state, trigger)
        if waking.are_replaced("app", "Engine"):
            found.add(state.value)
    assert found == {"UNHEALTHY", "UPDATING"}
    assert not waking.are_replaced("app", "Other")


def test_serve_is_asked_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the handle's deployment, by whoever finds no replica."""
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(waking, "are_replaced", lambda *of: asked.append(of) or True)
    boards._shared.clear()
    found = waking_of(Handle())
    found.members.count, found.members.cold_start_s = 0, 60.0
    for _ in found.pauses(lambda: True):
        until(found._seen.done, "Serve is never asked")
    assert found.replaced
    assert asked == [("app", "Engine")]
    boards._shared.clear()


class Handle:
    """An engine's handle, whose calls are answered when `up` is set, or fail."""

    app_name, deployment_name = "app", "Engine"

    def __init__(self, fails: Exception | None = None) -> None:
        self.up, self.fails = threading.Event(), fails
        self.describe = self

    def remote(self) -> "Handle":
        if self.fails is not None:
            raise self.fails
        return self

    def result(self) -> str:
        assert self.up.wait(60)
        return "described"


def test_the_cheap_call_waits_on_a_thread_of_its_own() -> None:
    """With what comes of it, also if it could not be made."""
    handle = Handle()
    answered = cheap_call(handle)()
    assert not answered.done()
    handle.up.set()
    assert answered.result(60) == "described"
    failed = cheap_call(Handle(OSError("no cluster")))()
    assert isinstance(failed.exception(60), OSError)


def test_all_callers_of_a_process_share_what_it_knows() -> None:
    """Of one deployment; anew for a cluster after this one."""
    boards._shared.clear()
    first = waking_of(Handle())
    assert waking_of(Handle()) is first
    assert first.members is boards.shared("app", "Engine").members
    boards._shared.clear()
    assert waking_of(Handle()) is not first


def test_the_time_to_come_again_is_on_the_wire() -> None:
    """In seconds and milliseconds, and not where nobody can tell it."""
    headers = dict(error_headers(NotReady("asleep", 1500)))
    assert STATUS[NotReady] == 503
    assert headers == {b"retry-after": b"2", b"retry-after-ms": b"1500"}
    assert error_headers(NotReady("stopping")) == []
    assert str(NotReady("asleep", 1500)) == "asleep; try again in 1500 ms"
