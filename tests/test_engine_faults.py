"""Faults of one request, of a round and of the device: who is told, and who goes on."""

import logging
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Any

import pytest

from flide_engine import Engine, EngineConfig
from flide_engine.errors import (
    EngineStopped,
    NonFiniteOutput,
    NotReady,
    PoolExhausted,
    RoundFailed,
)
from flide_engine.layout.stream import Job
from flide_engine.readout import Asked
from flide_engine.runner import Started
from tests.checkpoints import POISON
from tests.engines import NOUL, Gate, ask, assert_balanced, wait_until_queued


def test_a_failing_round_is_retried_request_by_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests share a round that fails; each runs alone then, and fails or not by itself."""
    gate = Gate(engine, monkeypatch)
    first = engine.submit(ask())
    gate.wait_for_rounds(1)
    waiting = [engine.submit(ask(f"state {i}")) for i in range(3)]
    wait_until_queued(engine, 3)
    gate.fault = ValueError
    gate.open.set()
    for future in (first, *waiting):
        with pytest.raises(RoundFailed, match="ValueError: injected"):
            future.result(60)
    assert gate.rounds == [1, 3, 1, 1, 1]
    gate.fault = None
    assert engine.decide(ask()).answers
    assert engine.is_alive()


def test_one_that_cannot_be_planned_fails_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the checkpoints in one request's planning is that request's."""
    plan = engine._checkpoints.plan

    def faulty(work: Any, limit: int) -> None:
        if work.name == "bad":
            raise KeyError("injected")
        plan(work, limit)

    monkeypatch.setattr(engine._checkpoints, "plan", faulty)
    futures = [engine.submit(ask(f"state {name}"), name=name) for name in ("a", "bad", "b")]
    with pytest.raises(RoundFailed, match="KeyError: 'injected'"):
        futures[1].result(60)
    assert futures[0].result(60).answers
    assert futures[2].result(60).answers
    assert engine.is_alive()


def test_a_device_that_fails_ends_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be read back is lost with all that waits, each told that another may answer."""
    gate = Gate(engine, monkeypatch)
    gate.lost = True
    first = engine.submit(ask())
    gate.wait_for_rounds(1)
    waiting = engine.submit(ask())
    gate.open.set()
    for future in (first, waiting):
        with pytest.raises(
            EngineStopped, match="the engine stopped: OSError: the device is gone"
        ) as told:
            future.result(60)
        assert told.value.running == (future is first)
    assert not engine.is_alive()
    for late in (lambda: engine.submit(ask()).result(60), engine.leaves):
        with pytest.raises(EngineStopped, match="OSError: the device is gone") as told:
            late()
        assert not told.value.running
    engine.close()
    with pytest.raises(NotReady):  # as this was wanted
        engine.submit(ask()).result(60)


@pytest.mark.parametrize("company", [False, True])
def test_a_device_that_runs_nothing_more_ends_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, company: bool
) -> None:
    """As a GPU does after a fault: every launch fails from then on. No request is told that it was
    its own, however many shared the round; what only waited may be asked elsewhere at once.
    """
    gate = Gate(engine, monkeypatch)
    first = engine.submit(ask())
    gate.wait_for_rounds(1)
    running = [engine.submit(ask(f"state {i}")) for i in range(3 if company else 1)]
    wait_until_queued(engine, len(running))

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    begin = engine._loop._begin

    def begun(works: list[Any]) -> Any:
        if works[0].future is not first:
            gate.fault = ValueError
            monkeypatch.setattr(engine._loop._runner.executor, "check", broken)
        return begin(works)

    monkeypatch.setattr(engine._loop, "_begin", begun)
    gate.open.set()
    assert first.result(60).answers
    for future in running:
        with pytest.raises(EngineStopped, match="illegal memory access") as told:
            future.result(60)
        assert told.value.running
    assert len(gate.rounds) == 2
    engine._loop._thread.join(60)
    assert not engine.is_alive()


def test_a_round_that_does_not_end_is_noticed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread lives, and yet the engine is not healthy; when it goes on it is."""
    now = 0.0
    config = EngineConfig(model=str(checkpoint), watchdog_seconds=5)
    engine = Engine(config, clock=lambda: now)
    try:
        gate = Gate(engine, monkeypatch)
        future = engine.submit(ask())
        gate.wait_for_rounds(1)
        now = 4.0
        assert engine.is_alive()
        now = 6.0
        assert not engine.is_alive()
        gate.open.set()
        assert future.result(60).answers
        engine._loop.call(lambda: None)
        assert engine.is_alive()
    finally:
        engine.close()


def test_one_who_asks_alone_shares_no_round(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those beside it run, too, in another round."""
    gate = Gate(engine, monkeypatch)
    first = engine.submit(ask())
    gate.wait_for_rounds(1)
    waiting = [engine.submit(ask(f"state {i}"), alone=i == 1) for i in range(3)]
    wait_until_queued(engine, 3)
    gate.open.set()
    for future in (first, *waiting):
        assert future.result(60).answers
    assert sorted(gate.rounds) == [1, 1, 2]


def test_who_asks_alone_is_in_the_next_round(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it came last, may wait, and another tenant's requests do: other suspects of its
    replica wait for it.
    """
    gate = Gate(engine, monkeypatch)
    first = engine.submit(ask())
    gate.wait_for_rounds(1)
    ended: list[str] = []
    waiting = []
    for i in range(12):
        waiting.append(engine.submit(ask(f"state {i} " * 9), tenant="a"))
        waiting[-1].add_done_callback(lambda _: ended.append("waits"))
    wait_until_queued(engine, 12)
    alone = engine.submit(ask("suspect"), tenant="b", batch=True, alone=True)
    alone.add_done_callback(lambda _: ended.append("alone"))
    wait_until_queued(engine, 13)
    gate.open.set()
    for future in (first, alone, *waiting):
        assert future.result(60).answers
    assert gate.rounds[:2] == [1, 1]
    assert ended[0] == "alone"


def test_who_only_waited_while_the_device_failed_is_told_so(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also who was about to run, and whose round did not fit: none of them is to blame."""
    for alone in (True, False):
        with monkeypatch.context() as patch:
            made = Engine(engine.config)
            patch.setattr(type(made._loop._runner.executor), "runs_ahead", True)
            gate = Gate(made, patch)
            held = made._loop._runner.start

            def short(jobs: list[Job], asked: Asked, held: Any = held, gate: Any = gate) -> Started:
                if gate.rounds:
                    raise PoolExhausted("pages", 1 << 20, 0, 1 << 20)
                return held(jobs, asked)

            patch.setattr(made._loop._runner, "start", short)
            gate.lost = True
            running = made.submit(ask("runs"))
            gate.wait_for_rounds(1)
            waiting = [made.submit(ask(f"waits {i}"), alone=alone and not i) for i in range(3)]
            wait_until_queued(made, 3)
            gate.open.set()
            told = [future.exception(60) for future in (running, *waiting)]
            assert [t.running for t in told if isinstance(t, EngineStopped)] == [True] + [False] * 3
            made.close()


def test_who_has_all_its_values_is_answered_though_the_device_fails_then(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same turn of the engine's thread, before the answer has been put together."""
    monkeypatch.setattr(type(engine._loop._runner.executor), "runs_ahead", True)
    computed: list[Any] = []
    monkeypatch.setattr(engine._loop, "_done", computed.append)
    gate = Gate(engine, monkeypatch)
    first = engine.submit(ask())
    gate.wait_for_rounds(1)
    kills = engine.submit(ask("kills"), alone=True)
    wait_until_queued(engine, 1)

    def check() -> None:
        raise OSError("the device is gone")

    monkeypatch.setattr(engine._loop._runner.executor, "check", check)

    def fails_then(jobs: list[Job], asked: Asked) -> Started:
        raise ValueError("injected")

    monkeypatch.setattr(engine._loop._runner, "start", fails_then)
    gate.open.set()
    assert isinstance(kills.exception(60), EngineStopped)
    assert not first.done()
    engine._hand_over(computed[0])
    assert first.result(60).answers


def test_memory_that_is_short_makes_rounds_smaller(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints go first, then a round is halved until it fits, then a request is cut; one fails
    only if no question of it fits alone.
    """
    engine.decide(ask("long enough to be remembered " * 8))
    assert engine.checkpoint_counts()["device"] > 0
    gate = Gate(engine, monkeypatch)
    held, most, longest = engine._loop._runner.start, 2, 100
    pool = engine._loop._runner._pool

    def short(jobs: list[Job], asked: Asked) -> Started:
        prompts = sum(len(job.forest.leaves) for job in jobs)
        if gate.open.is_set() and (
            prompts > most or max(job.forest.ends.max() for job in jobs) > longest
        ):
            gate.rounds.append(-prompts)
            raise PoolExhausted("pages", pool.free + 1, pool.free, pool.units)
        return held(jobs, asked)

    monkeypatch.setattr(engine._loop._runner, "start", short)
    first = engine.submit(ask())
    gate.wait_for_rounds(1)
    waiting = [engine.submit(ask(f"state {i}")) for i in range(8)]
    questions = {f"q{i}": NOUL | {"instructions": f"{i}?"} for i in range(3)}
    waiting.append(engine.submit(ask("s", **questions)))
    large = engine.submit(ask("s", q=NOUL | {"instructions": "really " * 30}))
    wait_until_queued(engine, 10)
    gate.open.set()
    for future in (first, *waiting):
        assert future.result(60).answers
    with pytest.raises(PoolExhausted):
        large.result(60)
    assert engine.checkpoint_counts()["device"] == 0
    assert min(gate.rounds) < -most
    assert engine.is_alive()


def test_nan_fails_its_own_request(poisoned: Path) -> None:
    """Asked together with others, in one round or in many pieces."""
    engine = Engine(EngineConfig(model=str(poisoned), max_prompt_tokens=4096, max_round_tokens=256))
    try:
        alone = engine.decide(ask("fine " * 100)).answers["q"]
        futures = [
            engine.submit(ask(s)) for s in (f"bad {POISON} " * 30, "fine " * 100, f"{POISON}")
        ]
        for bad in (futures[0], futures[2]):
            with pytest.raises(NonFiniteOutput, match="question 'q'"):
                bad.result(30)
        answer = futures[1].result(30).answers["q"]
        assert abs(answer.noul - alone.noul) < 1e-5  # type: ignore[union-attr]
        assert_balanced(engine)
    finally:
        engine.close()


REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")


class Noted(logging.Handler):
    """What is logged, with the request that the context names."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((REQUEST_ID.get(), record.getMessage()))


def test_who_left_is_not_told_of_a_fault(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that leaves while its round runs, and fails, costs nobody else anything."""
    for fault in (ValueError, None):  # of the round; of the request's values
        with monkeypatch.context() as patch:
            gate = Gate(engine, patch)
            left = engine.submit(ask("left"))
            gate.wait_for_rounds(1)
            stays = engine.submit(ask("stays"))
            wait_until_queued(engine, 1)
            assert left.cancel()
            gate.fault, gate.nan = fault, fault is None
            gate.open.set()
            with pytest.raises(RoundFailed if fault else NonFiniteOutput):
                stays.result(60)
        assert engine.decide(ask("later")).answers
        assert engine.is_alive()


def test_a_state_whose_values_were_not_finite_is_not_resumed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it left is forgotten: were a fault that passes to blame, it would last for ever. The
    log says nothing of what was asked.
    """
    state = "long enough to be remembered " * 8
    with monkeypatch.context() as patch:
        gate = Gate(engine, patch)
        gate.nan = True
        gate.open.set()
        with pytest.raises(NonFiniteOutput):
            engine.decide(ask(state, secret=NOUL))
    assert "the model's output is not finite" in caplog.text
    assert "secret" not in caplog.text
    assert engine.checkpoint_counts()["device"] == 0
    assert engine.decide(ask(state)).usage.x_reused_tokens == 0
    assert engine.decide(ask(state)).usage.x_reused_tokens > 0


def test_lines_about_a_request_are_logged_in_its_callers_context(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From the rendering threads and the engine's own, in company and alone."""
    noted, name = Noted(), "flide_engine"
    caplog.set_level(logging.DEBUG, name)
    monkeypatch.setattr(logging.getLogger(name), "handlers", [noted])
    gate = Gate(engine, monkeypatch)

    def submit(number: int) -> Any:
        REQUEST_ID.set(f"id {number}")
        return engine.submit(ask(f"state {number}"))

    first = copy_context().run(submit, 0)
    gate.wait_for_rounds(1)
    waiting = []
    for i in (1, 2):  # the second could be rendered first
        waiting.append(copy_context().run(submit, i))
        wait_until_queued(engine, i)
    gate.fault = ValueError
    gate.open.set()
    for future in (first, *waiting):
        with pytest.raises(RoundFailed):
            future.result(60)
    gate.fault = None
    copy_context().run(submit, 3).result(60)
    company = [i for i, line in noted.lines if line.startswith("a round of 2 requests failed")]
    assert company == ["id 1", "id 2"]
    assert [i for i, line in noted.lines if "the request's round failed" in line] == [
        "id 0", "id 1", "id 2",
    ]  # fmt: skip
    assert [i for i, line in noted.lines if line.startswith("computed")] == ["id 3"]
