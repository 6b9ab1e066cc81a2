"""Rounds that are put together just before the running one ends: a whole engine, over a device that
runs ahead on a clock of the test's own.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from flide_engine import Engine, EngineConfig
from flide_engine.cache.pool import Pool
from flide_engine.errors import EngineStopped, NotReady
from flide_engine.executor import Done, Eager
from flide_engine.layout.plan import RoundPlan
from flide_engine.models.base import DecisionModel
from flide_engine.readout import Asked
from tests.engines import ask, assert_balanced
from tests.waiting import PATIENCE_S, until

ROUND_S = 0.010
LEAD_S = 0.0003
"""What the margin alone is: here nothing is late, and rounds take what they always took."""


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now, self.moved = 0.0, threading.Condition()

    def __call__(self) -> float:
        return self.now

    def set(self, now: float) -> None:
        """It is that late, if it was earlier."""
        with self.moved:
            self.now = max(self.now, now)
            self.moved.notify_all()

    def reach(self, when: float) -> None:
        """Waits until then."""
        with self.moved:
            assert self.moved.wait_for(lambda: self.now >= when, PATIENCE_S)


class Ahead:
    """An executor whose rounds end one after the other, `seconds` each, once they have been given
    to it, which takes `launch_s`. ends: theirs. waits: how often one was waited for.
    """

    runs_ahead = True
    lengths = ()

    def __init__(self, eager: Eager, clock: Clock) -> None:
        self._eager, self.clock, self.bucket_of = eager, clock, eager.bucket_of
        self.seconds, self.launch_s, self.ends, self.waits = ROUND_S, 0.0, [0.0], 0
        self.is_done: Callable[[float], bool] = lambda end: clock() >= end
        self.lost = False

    def start(self, plan: RoundPlan, asked: Asked) -> "Running":
        done = self._eager.start(plan, asked)
        self.clock.set(self.clock() + self.launch_s)
        self.ends.append(max(self.clock(), self.ends[-1]) + self.seconds)
        return Running(self, done, self.ends[-1] - 1e-9)  # sums of times are not exact

    def check(self) -> None:
        """It cannot break."""


class Running:
    """A round on it."""

    def __init__(self, device: Ahead, done: Done, end: float) -> None:
        self._device, self._done, self._end, self.rows = device, done, end, done.rows

    def is_done(self) -> bool:
        return self._device.is_done(self._end)

    def wait(self) -> Any:
        self._device.waits += 1
        self._device.clock.reach(self._end)
        if self._device.lost:
            raise OSError("the device is gone")
        return self._done.wait()


class Bench:
    """An engine over such a device. began: the futures of each round's requests."""

    def __init__(self, patch: pytest.MonkeyPatch, **options: Any) -> None:
        self.clock, self.began = Clock(), list[list[Future[Any]]]()

        def executor_for(
            model: DecisionModel, pool: Pool, kernels: Any, device: torch.device, most: int
        ) -> Ahead:
            self.device = Ahead(Eager(model, pool.tensors, device), self.clock)
            return self.device

        patch.setattr("flide_engine.engine.executor_for", executor_for)
        table = {64: 1000 * ROUND_S, 256: 1000 * ROUND_S}
        patch.setattr("flide_engine.engine.measured", lambda *_: table)
        limits: dict[str, Any] = {
            "model": "nano",
            "max_prompt_tokens": 512,
            "max_round_tokens": 256,
        }
        self.engine = Engine(EngineConfig(**limits, **options), self.clock)
        self._looks = 0
        begin, wait_s = self.engine._loop._begin, self.engine._loop._pacing.wait_s

        def begun(works: list[Any]) -> Any:
            made = begin(works)
            self.began.append([work.future for work in works])
            return made

        def looked(now: float, full: bool = False) -> float:
            self._looks += 1
            return wait_s(now, full)

        patch.setattr(self.engine._loop, "_begin", begun)
        patch.setattr(self.engine._loop._pacing, "wait_s", looked)

    def learn(self) -> None:
        """Rounds enough to know what one takes."""
        for i in range(16):
            self.finish(self.submit(f"parcel {i}"))
        self.began.clear()

    def finish(self, *futures: "Future[Any]") -> None:
        """Lets time pass, round by round, until they are answered."""

        def are_done() -> bool:
            self.clock.set(self.device.ends[-1])
            return all(future.done() for future in futures)

        until(are_done)
        assert all(future.result().answers for future in futures)

    def submit(self, state: str, **options: Any) -> "Future[Any]":
        """A request that has come to the queue, or that runs."""
        future = self.engine.submit(ask(state), **options)
        until(lambda: not self.engine._rendering)
        return future

    def submit_first(self) -> "tuple[Future[Any], float]":
        """A request whose round runs from now on: it, and now."""
        at, future = self.clock(), self.submit("the first")
        until(lambda: self.began == [[future]])
        return future, at

    def is_quiet(self) -> bool:
        """Whether the engine looks again and again and begins nothing."""
        began, looks = len(self.began), self._looks
        until(lambda: self._looks >= looks + 3 or len(self.began) > began)
        return len(self.began) == began


def beside(function: Callable[[], Any]) -> "Future[Any]":
    """What it returns, on a thread of its own."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function)
    pool.shutdown(wait=False)
    return future


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """One that has learned; at the end it holds nothing."""
    made = Bench(monkeypatch, late_rounds=True)
    made.learn()
    yield made
    made.clock.set(1e6)  # so that nothing is left that waits for time to pass
    if made.engine.is_alive():
        assert_balanced(made.engine)
    made.engine.close()


def test_a_round_has_what_came_while_the_last_one_ran(bench: Bench) -> None:
    """It is begun a lead before that one ends, and the device goes from one to the next."""
    first, at = bench.submit_first()
    early = bench.submit("early")
    assert bench.is_quiet()
    bench.clock.set(at + 0.5 * ROUND_S)
    late = bench.submit("late")
    assert bench.is_quiet()
    bench.clock.set(at + ROUND_S - 1.1 * LEAD_S)
    assert bench.is_quiet()
    bench.clock.set(at + ROUND_S - 0.9 * LEAD_S)
    until(lambda: bench.began == [[first], [early, late]])
    assert not first.done()
    too_late = bench.submit("too late")
    bench.clock.set(at + ROUND_S)
    assert first.result(PATIENCE_S).answers
    assert bench.is_quiet()
    bench.clock.set(at + 2 * ROUND_S - 0.9 * LEAD_S)
    until(lambda: len(bench.began) == 3)
    bench.clock.set(at + 3 * ROUND_S)
    for future in (early, late, too_late):
        assert future.result(PATIENCE_S).answers
    assert bench.began[2:] == [[too_late]]
    ends = bench.device.ends[-3:]
    assert ends == pytest.approx([at + (i + 1) * ROUND_S for i in range(3)])  # never idle
    assert bench.engine.counters().busy_seconds == pytest.approx(19 * ROUND_S)


def test_what_comes_is_not_begun_before_the_time_of_its_round(bench: Bench) -> None:
    """Also if nothing waited when the round before it began; and with nothing to begin, that one
    is answered when it ends.
    """
    first, at = bench.submit_first()
    assert bench.is_quiet()
    second = bench.submit("second")
    assert bench.is_quiet()
    bench.clock.set(at + ROUND_S)
    assert first.result(PATIENCE_S).answers
    until(lambda: bench.began == [[first], [second]])
    bench.clock.set(at + 3 * ROUND_S)
    assert second.result(PATIENCE_S).answers


def test_a_round_that_ends_early_is_followed_at_once(bench: Bench) -> None:
    """And what it took is what is learned of it, not what passed until it was collected."""
    bench.device.seconds = 0.4 * ROUND_S
    first, at = bench.submit_first()
    bench.device.launch_s = 0.05 * ROUND_S
    second = bench.submit("second")
    assert bench.is_quiet()
    bench.clock.set(at + 0.4 * ROUND_S)
    until(lambda: bench.began == [[first], [second]])
    assert first.result(PATIENCE_S).answers
    assert bench.engine.counters().busy_seconds == pytest.approx(16.4 * ROUND_S)
    assert bench.device.ends[-1] == pytest.approx(at + 0.85 * ROUND_S)
    bench.clock.set(at + ROUND_S)
    assert second.result(PATIENCE_S).answers


def test_a_full_round_is_begun_earlier_and_not_at_once(bench: Bench) -> None:
    """No more fits, but who has had less may still come, and goes first."""
    first, at = bench.submit_first()
    many = [bench.submit(f"{i} " * 40, tenant="many") for i in range(12)]
    assert bench.engine.load().queued_tokens > 2 * 256
    assert bench.is_quiet()
    bench.clock.set(at + 0.7 * ROUND_S)
    few = bench.submit("few", tenant="few")
    assert bench.is_quiet()
    bench.clock.set(at + 0.76 * ROUND_S)
    until(lambda: len(bench.began) == 2)
    assert few in bench.began[1]
    assert set(many) & set(bench.began[1])
    bench.finish(first, few, *many)


def test_batch_work_lets_in_who_comes_until_its_round_is_due(bench: Bench) -> None:
    """It fills what is left of their round."""
    first, at = bench.submit_first()
    batch = [bench.submit(f"{i} " * 40, batch=True) for i in range(6)]
    bench.clock.set(at + 0.5 * ROUND_S)
    person = bench.submit("somebody waits")
    bench.clock.set(at + ROUND_S)
    until(lambda: len(bench.began) == 2)
    assert bench.began[1][0] is person
    bench.finish(first, person, *batch)


def test_a_call_has_the_next_round_begun(bench: Bench) -> None:
    """It runs once the round that it found running is over, as it always did."""
    first, at = bench.submit_first()
    second = bench.submit("second")
    assert bench.is_quiet()
    call = beside(lambda: bench.engine._loop.call(lambda: "called"))
    until(lambda: bench.began == [[first], [second]])
    bench.clock.set(at + ROUND_S)
    assert call.result(PATIENCE_S) == "called"
    bench.clock.set(at + 2 * ROUND_S)
    assert second.result(PATIENCE_S).answers


def test_the_end_waits_for_the_running_round_only(bench: Bench) -> None:
    """What has not begun by then never does."""
    first, at = bench.submit_first()
    second = bench.submit("second")
    assert bench.is_quiet()
    waits = bench.device.waits
    closing = beside(bench.engine.close)
    until(lambda: bench.device.waits > waits)
    bench.clock.set(at + ROUND_S)
    closing.result(PATIENCE_S)
    assert first.result(PATIENCE_S).answers
    with pytest.raises(NotReady):
        second.result(PATIENCE_S)
    assert bench.began == [[first]]


@pytest.mark.parametrize("when", ["while it waits", "when it collects"])
def test_a_device_that_fails_ends_the_engine(bench: Bench, when: str) -> None:
    """Those of rounds on the device are told so, and what only waits may be asked elsewhere."""
    first, at = bench.submit_first()
    second = bench.submit("second")
    assert bench.is_quiet()
    if when == "while it waits":

        def gone(end: float) -> bool:
            raise OSError("the device is gone")

        bench.device.is_done = gone
    else:
        bench.device.lost = True
        bench.clock.set(at + ROUND_S - LEAD_S)
        until(lambda: bench.began == [[first], [second]])
        bench.clock.set(at + ROUND_S)
    for future in (first, second):
        with pytest.raises(EngineStopped, match="OSError: the device is gone") as told:
            future.result(PATIENCE_S)
        assert told.value.running == (future is first or when == "when it collects")
    assert not bench.engine.is_alive()


def test_one_that_runs_alone_waits_for_the_device(bench: Bench) -> None:
    """It begins when nothing else runs, and what comes next when it is over."""
    first, at = bench.submit_first()
    alone = bench.submit("alone", alone=True)
    last = bench.submit("last")
    bench.clock.set(at + ROUND_S - LEAD_S)
    until(lambda: not bench.engine._loop.waiting or bench.engine._loop.waiting == 1)
    assert bench.began == [[first]]
    bench.clock.set(at + ROUND_S)
    assert first.result(PATIENCE_S).answers
    until(lambda: bench.began == [[first], [alone]])
    bench.clock.set(at + 2 * ROUND_S)
    assert alone.result(PATIENCE_S).answers
    until(lambda: bench.began == [[first], [alone], [last]])
    bench.clock.set(at + 3 * ROUND_S)
    assert last.result(PATIENCE_S).answers


@pytest.mark.parametrize("why", ["it is off", "too few rounds were seen"])
def test_rounds_are_begun_at_once(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """With what there is when the round before the running one has ended."""
    bench = Bench(monkeypatch, late_rounds=why != "it is off")
    if why == "it is off":
        bench.learn()
    first, at = bench.submit_first()
    second, third = bench.submit("2 " * 75), bench.submit("3 " * 75)
    bench.clock.set(at + ROUND_S)
    assert first.result(PATIENCE_S).answers
    until(lambda: bench.began == [[first], [second], [third]])
    bench.finish(second, third)
    bench.engine.close()
