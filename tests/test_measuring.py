"""Costs measured at start: what the scheduler is told, on a scripted clock; nothing is left."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flide_engine import Engine, EngineConfig
from flide_engine.cache.pool import Pool
from flide_engine.errors import Overloaded, RoundTooLarge
from flide_engine.executor import Done
from flide_engine.layout.buckets import smallest_bucket
from flide_engine.layout.plan import RoundPlan
from flide_engine.layout.state_shape import StateShape
from flide_engine.measuring import REPEATS, UNPADDED, measure
from flide_engine.readout import Asked
from flide_engine.runner import Runner
from tests.engines import Gate, ask, assert_balanced, wait_until_queued, wait_until_rendered
from tests.scheduling import cost_ms


class Scripted:
    """An executor that takes as long as told: on a clock of its own, slow at first."""

    runs_ahead = False

    def __init__(self, lengths: tuple[int, ...], most: int = 1 << 20) -> None:
        self.lengths, self._most, self.now = lengths, most, 0.0
        self.seen: list[tuple[int, int]] = []

    def bucket_of(self, tokens: int) -> int:
        return smallest_bucket(tokens, self.lengths)

    def start(self, plan: RoundPlan, asked: Asked) -> Any:
        rows = self.bucket_of(plan.num_rows) if self.lengths else plan.num_rows
        if rows > self._most:
            raise RoundTooLarge(plan.num_rows, plan.num_nodes, self._most, 1)
        before = sum(seen == rows for seen, _ in self.seen)
        self.seen.append((rows, plan.num_nodes))
        slower = (50.0, 1.3, 1.0, 2.0)[before % REPEATS]
        vectors = np.zeros((len(plan.read_rows), 4), np.float32)
        return Waiting(self, slower * cost_ms(rows), Done(rows, np.zeros(0, np.float32), vectors))

    def check(self) -> None:
        """It cannot break."""


class Waiting:
    """A round that is over once it is waited for."""

    def __init__(self, executor: Scripted, ms: float, done: Done) -> None:
        self._executor, self._ms, self._done, self.rows = executor, ms, done, done.rows

    def wait(self) -> Any:
        self._executor.now += self._ms / 1000
        return self._done.wait()


def runner_of(executor: Scripted, units: int = 400) -> Runner:
    """A runner of it over a small pool."""
    shape = StateShape(1, 1, 8, 1, 1, 8, 8, 8, 3)
    return Runner(executor, Pool(shape, units, torch.float32, torch.device("cpu")), "token")


def test_the_table_has_what_each_length_takes() -> None:
    """Every bucket, by its fastest turn; then the pool is free."""
    executor = Scripted((64, 128, 512, 2048))
    runner = runner_of(executor)
    table = measure(runner, 2048, lambda: executor.now)
    assert table == pytest.approx({rows: cost_ms(rows) for rows in (64, 128, 512, 2048)})
    assert [rows for rows, _ in executor.seen] == sorted([64, 128, 512, 2048] * REPEATS)
    assert {nodes for _, nodes in executor.seen} == {5}  # a state and what is asked of it
    held = runner.accounting()
    assert held.page_bytes_held == held.slot_bytes_held == 0


def test_what_does_not_fit_is_left_out() -> None:
    """The pool, or the device: what was measured of the others is used."""
    executor = Scripted((64, 128, 512, 8192), most=128)
    assert set(measure(runner_of(executor), 8192, lambda: executor.now)) == {64, 128}
    executor = Scripted((64, 128, 8192))
    runner = runner_of(executor, 60)  # pages of 3,840 tokens
    assert set(measure(runner, 8192, lambda: executor.now)) == {64, 128}
    assert runner.accounting().page_bytes_held == 0


@pytest.mark.parametrize(("most", "lengths"), [(8192, UNPADDED), (512, (256,)), (128, (128,))])
def test_where_nothing_is_padded_two_lengths_do(most: int, lengths: tuple[int, ...]) -> None:
    """No longer than a round may be."""
    executor = Scripted(())
    assert measure(runner_of(executor), most, lambda: executor.now) == pytest.approx(
        {rows: cost_ms(rows) for rows in lengths}
    )


@pytest.mark.parametrize(("option", "known"), [(True, True), (None, False)])
def test_an_engine_knows_its_pace_before_it_is_asked(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, option: bool | None, known: bool
) -> None:
    """If it is told to measure; on a CPU it is not unless told. What waits behind its very first
    round is refused by predicted time, nothing is counted or held, and answers are as ever.
    """
    asked: list[tuple[int, dict[int, float] | None]] = []

    def measured(runner: Runner, most: int) -> dict[int, float]:
        table = measure(runner, most, real)
        asked.append((most, table))
        return dict.fromkeys(table, 1000.0)

    real: Callable[[], float] = iter(range(1 << 20)).__next__
    monkeypatch.setattr("flide_engine.measuring.measure", measured)
    options: dict[str, Any] = {"model": str(checkpoint), "max_prompt_tokens": 512}
    engine = Engine(
        EngineConfig(**options, max_round_tokens=512, max_queue_ms=500, measure_costs=option)
    )
    try:
        assert [most for most, _ in asked] == [512] * known
        assert (engine.load().tokens_per_ms > 0) is known
        assert engine.counters().rounds == 0
        assert_balanced(engine)
        gate = Gate(engine, monkeypatch)
        first = engine.submit(ask())
        gate.wait_for_rounds(1)
        second = engine.submit(ask())
        wait_until_queued(engine, 1)
        third = engine.submit(ask())
        if known:
            with pytest.raises(Overloaded, match="max_queue_ms"):
                third.result(60)
        wait_until_rendered(engine)  # or it would be judged by a round that was held
        gate.open.set()
        assert first.result(60).answers["q"].noul == pytest.approx(  # type: ignore[union-attr]
            second.result(60).answers["q"].noul  # type: ignore[union-attr]
        )
        if not known:
            assert third.result(60).answers
    finally:
        engine.close()
