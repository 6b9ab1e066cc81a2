"""Rounds as policy: order, budget, long work, refusals. No engine, no clock but the one given."""

from dataclasses import dataclass

import pytest

from flide_engine.errors import Overloaded
from flide_engine.scheduler import Scheduler


@dataclass(eq=False)
class Item:
    """Work of a few pieces, each of `tokens`."""

    name: str
    tokens: int
    pieces: int = 1
    gone_at: float = float("inf")

    @property
    def waiting_tokens(self) -> int:
        return self.tokens * self.pieces

    @property
    def is_long(self) -> bool:
        return self.pieces > 1

    def is_gone(self, now: float) -> bool:
        return now >= self.gone_at


def names(items: list[Item]) -> list[str]:
    return [item.name for item in items]


def test_first_come_first_served_within_the_budget() -> None:
    """A round takes what fits, in order, and lets smaller work fill the rest."""
    scheduler: Scheduler[Item] = Scheduler(100, 10_000)
    for item in (Item("a", 60), Item("b", 60), Item("c", 30), Item("d", 20)):
        scheduler.add(item)
    assert names(scheduler.next_round(0.0)[0]) == ["a", "c"]
    assert names(scheduler.next_round(0.0)[0]) == ["b", "d"]
    assert len(scheduler) == 0


def test_work_larger_than_a_round_is_taken_alone() -> None:
    """It can only be larger if the caller cut it so; leaving it would starve it."""
    scheduler: Scheduler[Item] = Scheduler(100, 10_000)
    scheduler.add(Item("big", 150))
    scheduler.add(Item("small", 1))
    assert names(scheduler.next_round(0.0)[0]) == ["big"]


def test_those_who_left_are_not_run() -> None:
    """Cancelled and late work leaves the queue without taking room."""
    scheduler: Scheduler[Item] = Scheduler(100, 10_000)
    for item in (Item("late", 90, gone_at=5.0), Item("here", 90)):
        scheduler.add(item)
    taken, gone = scheduler.next_round(5.0)
    assert (names(taken), names(gone)) == (["here"], ["late"])


def test_one_long_request_at_a_time_and_short_ones_between() -> None:
    """Only one request holds checkpoints between rounds, so two never wait for each other's
    memory.
    """
    scheduler: Scheduler[Item] = Scheduler(100, 10_000)
    first, second, short = Item("first", 80, 3), Item("second", 80, 3), Item("short", 90)
    for item in (first, second, short):
        scheduler.add(item)
    taken, _ = scheduler.next_round(0.0)
    assert names(taken) == ["first"]
    scheduler.put_back(taken)
    assert names(scheduler.next_round(0.0)[0]) == ["short"]
    taken, _ = scheduler.next_round(0.0)
    assert names(taken) == ["first"]
    scheduler.finished(first)
    assert names(scheduler.next_round(0.0)[0]) == ["second"]


def test_a_full_queue_refuses_with_a_time() -> None:
    """The time to try again is how long the queue takes at the measured rate; a lone request is
    never refused.
    """
    scheduler: Scheduler[Item] = Scheduler(100, 150)
    scheduler.add(Item("alone", 500))
    scheduler.next_round(0.0)
    scheduler.add(Item("a", 100))
    scheduler.observe(tokens=100, seconds=1.0)
    with pytest.raises(Overloaded) as refused:
        scheduler.add(Item("b", 100))
    assert refused.value.retry_after_ms == 1000
    assert "max_queued_tokens" in str(refused.value)
    assert names(scheduler.next_round(0.0)[0]) == ["a"]


def test_put_back_at_the_front_keeps_the_order() -> None:
    """Work that did not fit the pool runs first next time."""
    scheduler: Scheduler[Item] = Scheduler(100, 10_000)
    scheduler.add(Item("later", 10))
    scheduler.put_back([Item("x", 10), Item("y", 10)], front=True)
    assert names(scheduler.next_round(0.0)[0]) == ["x", "y", "later"]


def test_drain_empties() -> None:
    """Everything that waits comes out once."""
    scheduler: Scheduler[Item] = Scheduler(100, 10_000)
    scheduler.add(Item("a", 10))
    assert names(scheduler.drain()) == ["a"]
    assert len(scheduler) == 0
