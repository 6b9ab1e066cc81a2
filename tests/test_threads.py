"""Rendering threads: tenants take turns, and one's burst delays another by one job at most."""

import threading

import pytest

from flide_engine.errors import NotReady
from flide_engine.threads import FairThreads
from tests.waiting import PATIENCE_S


def test_tenants_take_turns() -> None:
    """In a burst of one, the jobs of the others come between; those of one stay in order."""
    threads = FairThreads(1, "test")
    done: list[str] = []
    hold, held = threading.Event(), threading.Event()

    def first() -> None:
        held.set()
        hold.wait(PATIENCE_S)

    threads.submit("a", first)
    assert held.wait(PATIENCE_S)
    for i in range(4):
        threads.submit("a", lambda i=i: done.append(f"a{i}"))  # type: ignore[misc]
    for i in range(2):
        threads.submit("b", lambda i=i: done.append(f"b{i}"))  # type: ignore[misc]
    threads.submit("c", lambda: done.append("c0"))
    hold.set()
    threads.shutdown()
    assert done == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_all_that_was_submitted_is_run() -> None:
    """By several threads, and before a shutdown returns."""
    threads = FairThreads(3, "test")
    done: list[int] = []
    for i in range(1000):
        threads.submit(str(i % 7), lambda i=i: done.append(i))  # type: ignore[misc]
    threads.shutdown()
    assert sorted(done) == list(range(1000))
    assert not any(thread.name.startswith("test_") for thread in threading.enumerate())


def test_nothing_is_taken_once_they_end() -> None:
    """A job that nobody would run is refused."""
    threads = FairThreads(1, "test")
    threads.shutdown()
    with pytest.raises(NotReady):
        threads.submit("a", lambda: None)
