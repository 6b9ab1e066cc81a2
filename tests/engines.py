"""Requests for an engine in this process, and a gate that holds its rounds."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flide_engine import Engine
from flide_engine.executor import Pending
from flide_engine.layout.stream import Job
from flide_engine.readout import Asked
from flide_engine.runner import Started
from tests.waiting import PATIENCE_S, until

NOUL = {"type": "noul", "instructions": "Is it late?"}


def ask(state: Any = "The parcel is late.", **questions: Any) -> dict[str, Any]:
    """A request."""
    return {"state": state, "questions": questions or {"q": NOUL}}


def assert_balanced(engine: Engine) -> None:
    """With its checkpoints forgotten, an idle engine holds nothing."""
    engine.drop_checkpoints()
    held = engine.accounting()
    assert held.page_bytes_held == held.slot_bytes_held == 0


def wait_until_queued(engine: Engine, count: int) -> None:
    """Until so many requests wait for a round, and none is rendered."""
    until(lambda: engine._loop.waiting == engine.waiting == count, f"{count} never waited")


def wait_until_rendered(engine: Engine) -> None:
    """Until whatever has been submitted waits for a round, runs, or has ended."""
    until(lambda: engine._loop.waiting == engine.waiting, "some are rendered for ever")


def submit_together(engine: Engine, requests: Callable[[], Iterable["Future[Any]"]]) -> list[Any]:
    """Futures of what `requests` submits: no round is formed before all of it waits for one, though
    rendering threads may be slow. Nothing else may be asked meanwhile.
    """
    futures: list[Any] = []

    def are_queued() -> bool:
        assert not any(future.done() for future in futures)
        return engine._loop.waiting == len(futures)

    def submit() -> None:
        futures.extend(requests())
        until(are_queued, "not all are queued")

    engine._loop.call(submit)
    return futures


class Lost:
    """A round whose device has failed."""

    rows = 0

    def wait(self) -> Any:
        raise OSError("the device is gone")


class NotANumber:
    """A round that ran, and of which nothing can be read."""

    def __init__(self, pending: Pending) -> None:
        self._pending, self.rows = pending, pending.rows

    def wait(self) -> Any:
        logits, hidden = self._pending.wait()
        return logits * np.nan, None if hidden is None else hidden * np.nan


class Leaking:
    """A round in which one value that is not finite makes all so, as neighbours in an attention
    tile can on a GPU.
    """

    def __init__(self, pending: Pending) -> None:
        self._pending, self.rows = pending, pending.rows

    def is_done(self) -> bool:
        return self._pending.is_done()

    def wait(self) -> Any:
        logits, hidden = self._pending.wait()
        return (logits, hidden) if np.isfinite(logits).all() else (logits * np.nan, hidden)


def leak(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has all rounds leak what is not finite; grows by the prompts of each."""
    rounds: list[int] = []
    start = engine._loop._runner.start

    def leaking(jobs: list[Job], asked: Asked) -> Started:
        rounds.append(sum(len(job.forest.leaves) for job in jobs))
        started = start(jobs, asked)
        return replace(started, pending=Leaking(started.pending))

    monkeypatch.setattr(engine._loop._runner, "start", leaking)
    return rounds


class Gate:
    """Holds the engine's rounds until it is opened; counts them and notes their sizes."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.rounds: list[int] = []
        self.fault: type[Exception] | None = None
        self.lost = self.nan = False
        start = engine._loop._runner.start

        def held(jobs: list[Job], asked: Asked) -> Started:
            self.rounds.append(len(jobs))
            self.open.wait(2 * PATIENCE_S)
            if self.fault is not None:
                raise self.fault("injected")
            started = start(jobs, asked)
            if self.nan:
                return replace(started, pending=NotANumber(started.pending))
            return replace(started, pending=Lost()) if self.lost else started

        monkeypatch.setattr(engine._loop._runner, "start", held)

    def wait_for_rounds(self, count: int) -> None:
        """Until that many rounds have begun."""
        until(lambda: len(self.rounds) >= count, f"fewer than {count} rounds")
