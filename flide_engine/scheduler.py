"""Which work goes into the next round. Pure policy: no threads, no tensors, a clock that is handed
in.

Work is counted in new tokens, and in the milliseconds that rounds of so many tokens took.
Work that shares no round goes before everybody's turn, and its tenant is charged for it. Then goes
interactive work, in fair turns between tenants; batch work fills what a round's bucket leaves, and
whole rounds when nothing else can run. A request of several rounds goes to the back of
its tenant's queue between two of them, so that short requests run between its pieces.

Not thread-safe: whoever shares one holds a lock around every call.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Generic

from flide_engine.admission import Admission, Forecast, Load
from flide_engine.fairness import Entry, FairQueue, Schedulable, W
from flide_engine.packing import Packing, Verdict

__all__ = ["Load", "Schedulable", "Scheduler"]

_LOOK_AHEAD = 8  # work passed over, as it does not fit, before a round is closed
_SURE = 0.8  # of a predicted time: work that could not make its deadline even then is dropped
_AGED_PART = 8  # a round's tokens over those of batch work that become interactive before it
_SWEEP = 64  # entries asked before each round whether their caller has left
_MANY_DEAD = 64


class Scheduler(Generic[W]):
    """Interactive and batch work of many tenants, up to a token budget a round."""

    def __init__(
        self,
        round_tokens: int,
        max_queued_tokens: int,
        table: Mapping[int, float] | None = None,
        bucket_of: Callable[[int], int] | None = None,
        max_queue_ms: int | None = None,
        batch_age_s: float = 10.0,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """table: milliseconds of a round by its tokens, measured at start; none: learned.

        bucket_of: the length that a round of so many tokens, at most `round_tokens`, is padded to;
        none: no padding. max_queue_ms: longest predicted wait of a request that is not refused.
        batch_age_s: after that long, waiting batch work is let in among the interactive, an eighth
        of a round at a time. weights: shares of tenants, 1 unless named. Raises ConfigError for a
        bad table.
        """
        self._round_tokens, self._bucket_of, self._batch_age = round_tokens, bucket_of, batch_age_s
        self._interactive: FairQueue[W] = FairQueue(weights or {})
        self._batch: FairQueue[W] = FairQueue(weights or {})
        self._longs: FairQueue[W] = FairQueue(weights or {})  # wait until no long one has begun
        self._queues = (self._interactive, self._batch, self._longs)
        self._forecast = Forecast(round_tokens, table)
        self._door = Admission(self._forecast, *self._queues, max_queued_tokens, max_queue_ms)
        self._begun: W | None = None  # the one long request that holds checkpoints
        self._out: dict[int, Entry[W]] = {}  # taken and neither finished nor put back, by id
        self._deadlines: list[tuple[float, int, Entry[W]]] = []
        self._sweep: deque[Entry[W]] = deque()
        self._ages: deque[Entry[W]] = deque()  # batch work, oldest first
        self._ticks, self._firsts, self._now = itertools.count(), itertools.count(-1, -1), 0.0

    def __len__(self) -> int:
        return len(self._interactive) + len(self._batch) + len(self._longs)

    def __iter__(self) -> Iterator[W]:
        return (entry.work for queue in self._queues for entry in queue)

    @property
    def queued_tokens(self) -> int:
        """New tokens of everything that waits; an upper bound of those not planned yet."""
        return sum(queue.backlog.tokens for queue in self._queues)

    @property
    def expected_tokens(self) -> float:
        """New tokens of everything that waits, as far as they can be told before it is planned."""
        return self._forecast.expected(*(queue.backlog for queue in self._queues))

    def add(self, work: W, now: float | None = None, batch: bool = False) -> None:
        """Queues new work. Raises Overloaded if too much waits, or if it would wait too long.

        now: time of arrival; none: the last time told. Work is always taken when nothing waits, so
        that the limits refuse load and never a single request. A tenant below its share of
        `max_queued_tokens` is taken also when others fill it; at most twice as much waits then.
        """
        now = self._tell(now)
        if len(self):
            self._door.check(work.tenant, work.waiting_tokens, now, batch)
        entry = Entry(work, next(self._ticks), now, batch and not work.alone, work.waiting_tokens)
        self._enter(entry, self._batch if entry.background else self._interactive)

    def next_round(
        self, now: float, plan: Callable[[W], None] | None = None
    ) -> tuple[list[W], list[W]]:
        """(work of the next round, work that will not be run), both out of the queue.

        Gone is work whose caller has left, and work that cannot be done by its deadline, unless
        there is no other. plan: called with work before it is taken, and with a few a round that
        then are not; `tokens`, `waiting_tokens` and `is_long` are read after it. What it raises is
        passed on, with everything back in the queue.
        """
        self._tell(now)
        start = now + _SURE * self._forecast.under_way_ms(now) / 1000
        packing = Packing[W](self._round_tokens, now, start, plan or (lambda work: None))
        try:
            self._drop_late(packing)
            self._let_in(now)
            if not self._interactive.alone:  # its turn is before all
                self._take_urgent(packing)
            self._fill_both(packing)
            if packing.passed and not packing.taken:
                packing.waits = True  # nothing else can run meanwhile
                self._fill_both(packing)
        except BaseException:
            entries = packing.taken + packing.hopeless + packing.gone
            self.put_back([entry.work for entry in entries], front=True)
            raise
        if packing.hopeless and not packing.taken:
            # costs nobody anything, and were the predicted times wrong, no other round would tell
            self._take(packing.hopeless.pop(0), self._interactive, packing)
        for entry in packing.hopeless:
            self._give_up(entry, packing)
        return [e.work for e in packing.taken], [e.work for e in packing.gone]

    def put_back(self, works: Sequence[W], front: bool = False) -> None:
        """Queues work again: at the back between two pieces, at the front if it did not run."""
        for work in reversed(works) if front else works:
            entry = self._no_longer_out(work)
            entry.background &= not work.alone  # which it may be since
            queue = self._batch if entry.background else self._interactive
            ran = entry.ran + (0 if front else entry.running)
            if front:
                queue.charge(work.tenant, -entry.running)
            elif work.is_long and self._begun is None:  # cut when it was taken already
                self._begun = work
            again = replace(entry, tokens=work.waiting_tokens, running=0, ran=ran)
            self._enter(again, queue, front)

    def take_begun(self, now: float) -> W | None:
        """The long request that holds checkpoints, out of the queue as if its turn had come; None
        if it does not wait.
        """
        for queue, entry in ((q, entry) for q in self._queues for entry in q):
            if entry.work is self._begun:
                queue.remove(entry)
                self._take(entry, queue, Packing[W](0, now, now, lambda _: None))
                return entry.work
        return None

    def finished(self, work: W) -> None:
        """Work that will not come back."""
        if self._begun is work:
            self._begun = None
        if id(work) in self._out:
            entry = self._no_longer_out(work)
            self._forecast.finished(entry.ran + entry.running)
        if not len(self):  # all that is left in these is dead, and holds its request in memory
            for dead in (self._deadlines, self._sweep, self._ages):
                dead.clear()

    def observe(self, tokens: int, seconds: float, now: float | None = None) -> None:
        """A round of `tokens` is over, `seconds` after it was begun, at `now`.

        With `now`, the time in which it waited for the round before it does not count.
        """
        self._forecast.observe(tokens, self._padded(tokens), seconds, now)

    def round_ms(self, tokens: int) -> float:
        """Predicted milliseconds of a round of so many tokens; 0 until known."""
        return self._forecast.costs.ms(self._padded(tokens))

    def drain(self) -> list[W]:
        """Everything that waits, out of the queue, in order of arrival."""
        entries = sorted((e for queue in self._queues for e in queue), key=lambda entry: entry.seq)
        for entry in entries:
            entry.leave()
        self._out.clear()
        self._forecast.reset()
        self._begun = None
        return [entry.work for entry in entries]

    def check_number(
        self, tenant: str, rendering: Mapping[str, int], most: int, now: float
    ) -> None:
        """Raises Overloaded if one more request of a tenant makes too many; rendering: requests of
        all tenants that will be added soon.
        """
        self._door.check_number(tenant, rendering, most, self._tell(now))

    def load(self, now: float) -> Load:
        """What routing and autoscaling want to know."""
        self._tell(now)
        told = self._forecast
        return Load(
            wait_ms=self._door.wait_ms(now),
            mean_wait_ms=told.mean_wait_ms,
            step_ms=told.step_ms,
            tokens_per_ms=told.costs.tokens_per_ms,
            queued_tokens=round(self.expected_tokens),
            refused_tokens=round(told.refused_tokens),
        )

    def _tell(self, now: float | None) -> float:
        """The time, of which the mean of waits is kept."""
        if now is None:
            return self._now
        if now > self._now:
            self._now = now
            self._forecast.told(self._door.wait_ms(now), now)
        return now

    def _enter(self, entry: Entry[W], queue: FairQueue[W], front: bool = False) -> None:
        queue.append(entry, front)
        self._sweep.append(entry)
        if entry.work.deadline is not None:
            heapq.heappush(self._deadlines, (entry.work.deadline, next(self._ticks), entry))
        if queue is self._batch:
            self._ages.append(entry)
        most = _MANY_DEAD + 2 * len(self)  # what left holds its request in memory while it is here
        if len(self._deadlines) > most:
            self._deadlines = [item for item in self._deadlines if item[2].queue is not None]
            heapq.heapify(self._deadlines)
        if len(self._sweep) > most:
            self._sweep = deque(entry for entry in self._sweep if entry.queue is not None)
        if len(self._ages) > most:
            self._ages = deque(entry for entry in self._ages if entry.queue is self._batch)

    def _no_longer_out(self, work: W) -> Entry[W]:
        """The entry of work that was taken; a new one, before all others, if it was not."""
        entry = self._out.pop(id(work), None)
        if entry is None:
            return Entry(work, next(self._firsts), self._now, False, work.waiting_tokens, True)
        self._forecast.returned(entry.running)
        return entry

    def _give_up(self, entry: Entry[W], packing: Packing[W]) -> None:
        entry.leave()
        if self._begun is entry.work:
            self._begun = None
        packing.gone.append(entry)

    def _drop_late(self, packing: Packing[W]) -> None:
        """Work past its deadline, and some whose callers have left: later rounds find the rest."""
        while self._deadlines and self._deadlines[0][0] < packing.now:
            entry = heapq.heappop(self._deadlines)[2]
            if entry.queue is not None:
                self._give_up(entry, packing)
        for _ in range(min(len(self._sweep), _SWEEP)):
            entry = self._sweep.popleft()
            if entry.queue is not None and entry.work.is_gone(packing.now):
                self._give_up(entry, packing)
            elif entry.queue is not None:
                self._sweep.append(entry)

    def _let_in(self, now: float) -> None:
        """Batch work that has waited too long, bit by bit; a long request if none is begun."""
        room = self._round_tokens // _AGED_PART
        while self._ages:
            entry = self._ages[0]
            if entry.queue is self._batch:
                if room <= 0 or now - entry.arrived < self._batch_age:
                    break
                entry.leave()
                self._enter(replace(entry, background=False), self._interactive)
                room -= entry.tokens
            self._ages.popleft()
        if self._begun is None and (long := self._longs.pop()) is not None:
            self._longs.charge(long.work.tenant, long.tokens)
            queue = self._batch if long.background else self._interactive
            self._enter(replace(long), queue, front=True)

    def _take_urgent(self, packing: Packing[W]) -> None:
        """Work that would miss its deadline in the next round and can make it in this one, nearest
        first; the round is kept short enough for it.

        Deadlines give a tenant no larger share: it is served early by about one round at most.
        """
        costs, looked = self._forecast.costs, list[tuple[float, int, Entry[W]]]()
        full_ms = costs.ms(self._round_tokens) if costs.is_known else 0.0
        try:
            while full_ms and self._deadlines and len(looked) < _LOOK_AHEAD:
                deadline, _, entry = self._deadlines[0]
                share = 1.0 if entry.is_planned else self._forecast.new_share
                later = packing.start + (full_ms + costs.ms(share * entry.tokens)) / 1000
                if entry.queue is not None and later < deadline:
                    break
                looked.append(heapq.heappop(self._deadlines))
                ahead = self._interactive.lead(entry.work.tenant) > self._round_tokens
                if entry.queue is not self._interactive or ahead:
                    continue
                verdict = self._verdict(entry, packing)
                if verdict is not Verdict.NO_ROOM:
                    entry.leave()
                    self._settle(entry, verdict, self._interactive, packing)
                if verdict is Verdict.TAKE:
                    fitting = costs.tokens_within(1000 * (deadline - packing.start))
                    packing.room = max(0, min(packing.room, fitting - packing.tokens))
        finally:
            for item in looked:
                if item[2].queue is not None:
                    heapq.heappush(self._deadlines, item)

    def _fill_both(self, packing: Packing[W]) -> None:
        self._fill(self._interactive, packing)
        if self._batch and not (packing.taken and packing.taken[0].work.alone):
            packing.room = self._slack(packing)
            self._fill(self._batch, packing)

    def _fill(self, queue: FairQueue[W], packing: Packing[W]) -> None:
        """Takes work in fair turns until the round is full. Work that is too large for what is left
        is passed over; nobody gets more than a round ahead of its tenant by that.
        """
        aside: list[Entry[W]] = []
        packing.misses = 0
        try:
            while packing.misses < _LOOK_AHEAD and (packing.room > 0 or not packing.taken):
                fair = next((e.work.tenant for e in aside if not e.work.alone), None)
                beyond = None if fair is None else queue.tag(fair)  # who is alone has no turn
                entry = queue.pop(self._round_tokens, beyond)
                if entry is None:
                    break
                aside.append(entry)
                verdict = self._verdict(entry, packing)
                if verdict is not Verdict.NO_ROOM:
                    self._settle(aside.pop(), verdict, queue, packing)
        finally:
            queue.put_aside_back(aside)

    def _slack(self, packing: Packing[W]) -> int:
        """Room for batch work: what is padding otherwise, or all of a round without other work."""
        if not packing.taken:
            return packing.room
        return min(self._padded(packing.tokens), self._round_tokens) - packing.tokens

    def _padded(self, tokens: int) -> int:
        """Rows that a round of so many tokens takes."""
        if self._bucket_of is None or not 0 < tokens <= self._round_tokens:
            return tokens
        return max(tokens, self._bucket_of(tokens))

    def _verdict(self, entry: Entry[W], packing: Packing[W]) -> Verdict:
        """What becomes of work whose turn has come; plans it if it may be taken."""
        work = entry.work
        if work.is_gone(packing.now):
            return Verdict.GONE
        # planned before, it may need less by now: it is planned again once there is room for that
        if not (packing.taken and entry.is_planned and work.tokens > packing.room):
            packing.plan(work)
            self._learn(entry)
            if work.is_long and self._begun is not None and self._begun is not work:
                packing.misses += 1
                return Verdict.NO_ROOM if work.alone else Verdict.BLOCKED
            own_ms = _SURE * self._forecast.costs.ms(entry.tokens)
            if work.deadline is not None and packing.start + own_ms / 1000 > work.deadline:
                return Verdict.HOPELESS
            coming = work.is_coming and not packing.waits  # others run until its state is there
            packing.passed |= coming
            if not coming and (work.tokens <= packing.room or not packing.taken):
                return Verdict.TAKE
        packing.misses += 1
        return Verdict.NO_ROOM

    def _learn(self, entry: Entry[W]) -> None:
        """Counts the new tokens of planned work."""
        tokens = entry.work.waiting_tokens
        if not entry.is_planned:
            self._forecast.planned(entry.tokens, tokens)
        if entry.queue is not None:
            entry.queue.recount(entry, tokens)
        entry.tokens, entry.is_planned = tokens, True

    def _settle(
        self, entry: Entry[W], verdict: Verdict, queue: FairQueue[W], packing: Packing[W]
    ) -> None:
        """Acts on a verdict; the entry is out of its queue."""
        if verdict is Verdict.TAKE:
            self._take(entry, queue, packing)
        elif verdict is Verdict.BLOCKED:
            self._enter(replace(entry), self._longs)
        elif verdict is Verdict.HOPELESS:
            packing.hopeless.append(entry)
        else:
            self._give_up(entry, packing)

    def _take(self, entry: Entry[W], queue: FairQueue[W], packing: Packing[W]) -> None:
        work = entry.work
        if work.is_long:  # what holds checkpoints must not wait for gaps in rounds
            self._begun, entry.background = work, False
        packing.taken.append(entry)  # first: were anything to fail, it would be lost else
        self._out[id(work)] = entry
        queue.charge(work.tenant, work.tokens)
        self._forecast.began(work.tokens, packing.now)
        entry.running = work.tokens
        packing.tokens += entry.running
        packing.room = 0 if work.alone else packing.room - entry.running
