"""Who waits for a replica that is being started, and who is told when to come again."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from flide_engine.errors import NotReady
from router.http_errors import STATUS, error_headers
from router.waking import Waking


class Asleep:
    """An engine with so many replicas, on a clock of its own; `start` ends the waiting call."""

    def __init__(self, replicas: int | None = 0, assumed_s: float = 60.0) -> None:
        self.replicas, self.now, self.calls = replicas, 100.0, 0
        self.fails: Exception | None = None
        self._started = asyncio.Event()
        self.waking = Waking(lambda: self.replicas, self._call, assumed_s, lambda: self.now)

    async def _call(self) -> None:
        self.calls += 1
        if self.fails:
            raise self.fails
        await self._started.wait()

    async def start(self, after_s: float) -> None:
        """A replica runs, so long after it was woken."""
        self.now += after_s
        self.replicas = 1
        self._started.set()
        await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """The last replica goes."""
        self.replicas = 0
        self._started = asyncio.Event()

    async def told(self, timeout_s: float | None) -> int:
        """Milliseconds after which to come again; 0 for who may wait."""
        try:
            await self.waking.check(timeout_s)
        except NotReady as error:
            return error.retry_after_ms
        return 0


def run(test: Coroutine[Any, Any, None]) -> None:
    """On a loop of its own."""
    asyncio.run(test)


def test_nobody_is_held_up_by_a_fleet_that_runs() -> None:
    """And nothing is called."""

    async def go() -> None:
        fleet = Asleep(replicas=2)
        assert await fleet.told(0.01) == 0
        assert fleet.calls == 0
        assert not await fleet.waking.asleep()

    run(go())


def test_short_deadlines_are_sent_away_and_long_ones_wait() -> None:
    """By what is left of a start; who says nothing has the official clients' ten seconds."""

    async def go() -> None:
        fleet = Asleep(assumed_s=60)
        assert await fleet.told(None) == 60_000
        assert await fleet.told(59) == 60_000
        assert await fleet.told(61) == 0
        fleet.now += 45
        assert await fleet.told(None) == 15_000
        fleet.now += 6
        assert await fleet.told(None) == 0
        assert await fleet.told(8.9) == 9_000
        fleet.now += 60  # it takes longer than was thought
        assert await fleet.told(None) == 0
        assert await fleet.told(0.5) == 1_000
        await asyncio.sleep(0)
        assert fleet.calls == 1

    run(go())


def test_a_start_is_measured() -> None:
    """The next caller is told what the last start took."""

    async def go() -> None:
        fleet = Asleep(assumed_s=60)
        assert await fleet.told(None) == 60_000
        await asyncio.sleep(0)
        await fleet.start(after_s=20)
        assert await fleet.told(None) == 0
        await fleet.stop()
        assert await fleet.told(None) == 20_000
        await asyncio.sleep(0)
        await fleet.start(after_s=5)
        await fleet.stop()
        assert await fleet.told(None) == 0  # five seconds anybody has
        assert fleet.calls == 2

    run(go())


def test_what_was_not_heard_yet_is_found_out() -> None:
    """By the cheap call, which makes the router; a fleet that runs is no start to be measured."""

    async def go() -> None:
        fleet = Asleep(replicas=None)
        asked = asyncio.create_task(fleet.told(None))
        await asyncio.sleep(0.02)
        assert fleet.calls == 1
        await fleet.start(after_s=0.01)
        assert await asked == 0
        await fleet.stop()
        assert await fleet.told(None) == 60_000
        unknown = Asleep(replicas=None)
        assert await unknown.told(None) == 0  # better to wait than to be turned away for nothing

    run(go())


def test_a_start_that_fails_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """By the next caller, and the log says why."""

    async def go() -> None:
        fleet = Asleep()
        fleet.fails = RuntimeError("no node")
        assert await fleet.told(None) == 60_000
        await asyncio.sleep(0.01)
        assert "no node" in caplog.text
        fleet.fails = None
        assert await fleet.told(None) == 60_000
        await asyncio.sleep(0.01)
        assert fleet.calls == 2

    run(go())


def test_the_time_to_come_again_is_on_the_wire() -> None:
    """In seconds and milliseconds, and not where nobody can tell it."""
    headers = dict(error_headers(NotReady("asleep", 1500)))
    assert STATUS[NotReady] == 503
    assert headers == {b"retry-after": b"2", b"retry-after-ms": b"1500"}
    assert error_headers(NotReady("stopping")) == []
    assert str(NotReady("asleep", 1500)) == "asleep; try again in 1500 ms"
