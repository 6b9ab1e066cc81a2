"""Turns between tenants: each gets its share of the tokens while it has work, and nobody more.

Start-time fair queueing: a tenant's tag is the tokens it was served over its weight, never less
than that of those who are served now, and the least tag is next. So of two tenants that both have
work, neither is ever ahead by more than what it was served last. Inside a tenant: first come,
first served. All operations cost the logarithm of the number of tenants.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Schedulable(Protocol):
    """A request in the queue. `tokens`, `waiting_tokens` and `is_long` may change while it is
    planned or runs, and at no other time.
    """

    @property
    def tenant(self) -> str:
        """Whose share of the rounds it counts for."""
        ...

    @property
    def deadline(self) -> float | None:
        """When its answer is of no more use, on the scheduler's clock; None: never."""
        ...

    @property
    def tokens(self) -> int:
        """New tokens of its next piece; until it is planned, an upper bound."""
        ...

    @property
    def waiting_tokens(self) -> int:
        """New tokens of all its pieces to come; until it is planned, an upper bound."""
        ...

    @property
    def is_long(self) -> bool:
        """Whether it takes several rounds and so holds checkpoints between them; known once it is
        planned.
        """
        ...

    @property
    def alone(self) -> bool:
        """Whether it shares no round, and goes before everybody's turn."""
        ...

    @property
    def is_coming(self) -> bool:
        """Whether the state it starts from is still on its way to the device; known once it is
        planned.
        """
        ...

    def is_gone(self, now: float) -> bool:
        """Whether its caller has left or its deadline has passed: it will not be run."""
        ...


W = TypeVar("W", bound=Schedulable)


@dataclass(slots=True, eq=False)
class Entry(Generic[W]):
    """Work in one queue. It is put into one once: what moves or comes back is a new entry, so
    that what an old one leaves behind in heaps and queues is known to be dead.

    seq: order of arrival. background: whether it only fills what rounds leave. tokens: of all its
    pieces to come, as far as known; is_planned: whether that is exact. running: tokens of the piece
    that was taken last. ran: tokens of those before it.
    """

    work: W
    seq: int
    arrived: float
    background: bool
    tokens: int
    is_planned: bool = False
    running: int = 0
    ran: int = 0
    queue: "FairQueue[W] | None" = None

    def leave(self) -> None:
        """Out of its queue, if it is in one."""
        if self.queue is not None:
            self.queue.remove(self)


@dataclass(slots=True)
class Backlog:
    """Tokens that wait: those of planned work, and an upper bound of the others'."""

    planned: int = 0
    unplanned: int = 0

    @property
    def tokens(self) -> int:
        """Upper bound of all."""
        return self.planned + self.unplanned

    def add(self, entry: Entry[W], sign: int) -> None:
        """Counts an entry in (1) or out (-1)."""
        if entry.is_planned:
            self.planned += sign * entry.tokens
        else:
            self.unplanned += sign * entry.tokens


@dataclass(slots=True, eq=False)
class Lane(Generic[W]):
    """One tenant's work in order. tag: tokens served over weight. stamp: its valid mark in the heap
    of lanes, or -1: it is in none.
    """

    weight: float
    tag: float
    entries: deque[Entry[W]] = field(default_factory=deque)
    backlog: Backlog = field(default_factory=Backlog)
    count: int = 0
    stamp: int = -1


class FairQueue(Generic[W]):
    """Work of all tenants, of one class."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """weights: by tenant; others weigh 1."""
        self._weights = weights
        self._lanes: dict[str, Lane[W]] = {}
        self._heap: list[tuple[float, int, int, Lane[W]]] = []  # tag, seq of its head, stamp
        self._stamp = 0
        self._now = 0.0  # virtual time: the least tag of those with work
        self.backlog = Backlog()
        self.alone: deque[Entry[W]] = deque()
        """Entries of work that shares no round: in no lane, though counted and charged there."""
        self.weight = 0.0
        """Sum of the weights of tenants with work."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Entry[W]]:
        yield from self.alone
        for lane in self._lanes.values():
            yield from (entry for entry in lane.entries if entry.queue is self)

    def weight_of(self, tenant: str) -> float:
        """Its weight."""
        return self._weights.get(tenant, 1.0)

    def backlog_of(self, tenant: str) -> Backlog:
        """What waits of one tenant."""
        lane = self._lanes.get(tenant)
        return lane.backlog if lane else Backlog()

    def count_of(self, tenant: str) -> int:
        """Entries of one tenant that wait."""
        lane = self._lanes.get(tenant)
        return lane.count if lane else 0

    def tenants(self) -> set[str]:
        """Those with work here."""
        return {name for name, lane in self._lanes.items() if lane.count}

    def lead(self, tenant: str) -> float:
        """Tokens that a tenant was served beyond the tenant with work that was served least."""
        lane, first = self._lanes.get(tenant), self._first()
        return (lane.tag - first.tag) * lane.weight if lane and first else 0.0

    def append(self, entry: Entry[W], front: bool = False) -> None:
        """Puts an entry behind its tenant's others, or before them."""
        if not self._count:  # a busy time is over: nobody owes anything
            self._lanes.clear()
            self._heap.clear()
            self._now = self.weight = 0.0
        tenant = entry.work.tenant
        lane = self._lanes.get(tenant)
        if lane is None:
            self._forget_idle()
            lane = self._lanes[tenant] = Lane(self.weight_of(tenant), self._now)
        if not lane.count:
            lane.tag = max(lane.tag, self._now)
        self._put(lane, entry, front)

    def put_aside_back(self, entries: list[Entry[W]]) -> None:
        """Returns entries that `pop` gave, in that order, as if they had never been taken out."""
        for entry in reversed(entries):
            self._put(self._lanes[entry.work.tenant], entry, front=True)

    def pop(self, most_lead: float = 0.0, beyond: float | None = None) -> Entry[W] | None:
        """The next entry, out of the queue; None if there is none, or if its tenant's tag is more
        than `most_lead` tokens after `beyond`, the tag of one who was passed over. Work that shares
        no round comes first, whatever its tenant's tag.
        """
        if self.alone:
            entry = self.alone[0]
            self.remove(entry)
            return entry
        while (lane := self._first()) is not None:
            if beyond is not None and (lane.tag - beyond) * lane.weight > most_lead:
                return None
            if beyond is None:  # else one with a lesser tag is out of the queue just now
                self._now = max(self._now, lane.tag)
            entry = lane.entries.popleft()
            if entry.queue is self:
                self.remove(entry)
                return entry
        return None

    def remove(self, entry: Entry[W]) -> None:
        """Takes an entry out, wherever it stands; its place is cleared up later."""
        lane = self._lanes[entry.work.tenant]
        entry.queue = None
        self._count -= 1
        lane.count -= 1
        lane.backlog.add(entry, -1)
        self.backlog.add(entry, -1)
        if entry.work.alone:
            self.alone.remove(entry)
        if not lane.count:
            self.weight -= lane.weight
            lane.entries.clear()
            lane.stamp = -1

    def recount(self, entry: Entry[W], tokens: int) -> None:
        """The tokens of an entry that waits here are known now."""
        lane = self._lanes[entry.work.tenant]
        for backlog in (lane.backlog, self.backlog):
            backlog.add(entry, -1)
        entry.tokens, entry.is_planned = tokens, True
        for backlog in (lane.backlog, self.backlog):
            backlog.add(entry, 1)

    def tag(self, tenant: str) -> float:
        """A tenant's tag; only differences mean something."""
        lane = self._lanes.get(tenant)
        return lane.tag if lane else self._now

    def charge(self, tenant: str, tokens: int) -> None:
        """A tenant is served; a negative number takes that back."""
        lane = self._lanes.get(tenant)
        if lane is None:
            return
        lane.tag += tokens / lane.weight
        if lane.count:
            self._push(lane)

    def _put(self, lane: Lane[W], entry: Entry[W], front: bool) -> None:
        entries = self.alone if entry.work.alone else lane.entries
        if front:
            entries.appendleft(entry)
        else:
            entries.append(entry)
        entry.queue = self
        self._count += 1
        lane.count += 1
        lane.backlog.add(entry, 1)
        self.backlog.add(entry, 1)
        if lane.count == 1:
            self.weight += lane.weight
        if front or lane.count == 1:
            self._push(lane)

    def _push(self, lane: Lane[W]) -> None:
        """Renews a lane's place in the heap; equal tags go by the arrival of what is next."""
        while lane.entries and lane.entries[0].queue is not self:
            lane.entries.popleft()
        self._stamp += 1
        lane.stamp = self._stamp
        seq = lane.entries[0].seq if lane.entries else self._stamp
        heapq.heappush(self._heap, (lane.tag, seq, self._stamp, lane))
        if len(self._heap) > 4 * len(self._lanes) + 64:
            self._heap = [item for item in self._heap if item[2] == item[3].stamp]
            heapq.heapify(self._heap)

    def _first(self) -> Lane[W] | None:
        """The lane with work and the least tag."""
        while self._heap:
            _, _, stamp, lane = self._heap[0]
            if stamp == lane.stamp and lane.count:
                return lane
            heapq.heappop(self._heap)
        return None

    def _forget_idle(self) -> None:
        """Drops tenants that neither wait nor owe, once they are many."""
        if len(self._lanes) > 2 * self._count + 64:
            kept = {
                n: lane for n, lane in self._lanes.items() if lane.count or lane.tag > self._now
            }
            self._lanes = kept
