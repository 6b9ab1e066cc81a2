"""Work and an engine on a clock of its own, for tests of scheduling."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from flide_engine.errors import Overloaded
from flide_engine.layout.buckets import smallest_bucket
from flide_engine.scheduler import Scheduler


@dataclass(eq=False)
class Item:
    """Work of a few pieces, each of `tokens`."""

    name: str
    tokens: int
    pieces: int = 1
    gone_at: float = math.inf
    tenant: str = ""
    deadline: float | None = None
    batch: bool = False
    at: float = 0.0
    is_coming: bool = False
    alone: bool = False

    @property
    def waiting_tokens(self) -> int:
        return self.tokens * self.pieces

    @property
    def is_long(self) -> bool:
        return self.pieces > 1

    def is_gone(self, now: float) -> bool:
        return now >= self.gone_at or (self.deadline is not None and now > self.deadline)


def names(items: Iterable[Item]) -> list[str]:
    return [item.name for item in items]


def cost_ms(tokens: int) -> float:
    """A round of the 0.8B shape on an H200, near enough."""
    return 0.7 + 0.003 * tokens


@dataclass
class Engine:
    """Runs rounds one after the other; `now` is its clock."""

    scheduler: Scheduler[Item]
    plan: Callable[[Item], None] | None = None
    now: float = 0.0
    ended: dict[str, float] = field(default_factory=dict)
    begun: dict[str, float] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    rounds: list[list[Item]] = field(default_factory=list)

    def step(self, arrive: Callable[[float], None] = lambda now: None) -> list[Item]:
        """One round, which takes its time; arrive: called with its end, before it is over."""
        taken, gone = self.scheduler.next_round(self.now, self.plan)
        self.gone += names(gone)
        for item in (*taken, *gone):
            assert item.name not in self.ended
        self.rounds.append(taken)
        for item in taken:
            self.begun.setdefault(item.name, self.now)
        tokens = sum(item.tokens for item in taken)
        began = self.now
        self.now += cost_ms(tokens) / 1000 if taken else 0.001
        arrive(self.now)
        if taken:
            self.scheduler.observe(tokens, self.now - began, self.now)
        for item in taken:
            item.pieces -= 1
            if item.pieces:
                self.scheduler.put_back([item])
            else:
                self.scheduler.finished(item)
                self.ended[item.name] = self.now
        return taken

    def serve(self, arrivals: list[Item], until: float = math.inf) -> dict[str, Overloaded]:
        """Runs until all has arrived and nothing waits, or until then: who was refused."""
        refused: dict[str, Overloaded] = {}
        waiting = sorted(arrivals, key=lambda item: item.at, reverse=True)

        def arrive(now: float) -> None:
            while waiting and waiting[-1].at <= now:
                item = waiting.pop()
                try:
                    self.scheduler.add(item, item.at, item.batch)
                except Overloaded as error:
                    refused[item.name] = error

        while (waiting or len(self.scheduler)) and self.now < until:
            arrive(self.now)
            if len(self.scheduler):
                self.step(arrive)
            elif waiting:
                self.now = max(self.now, waiting[-1].at)
        return refused


def queue_of(*items: Item, room: int = 100) -> Scheduler[Item]:
    """A scheduler with small rounds and those items."""
    scheduler: Scheduler[Item] = Scheduler(room, 1_000_000)
    for item in items:
        scheduler.add(item, item.at, item.batch)
    return scheduler


def buckets(tokens: int) -> int:
    """Rows of a round of so many tokens."""
    return smallest_bucket(tokens, (128, 512, 1024, 4096, 8192))
