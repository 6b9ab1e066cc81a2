"""What late rounds are worth, simulated: `python -m benchmarks.late_rounds`.

The scheduler and the pacing of the engine on a virtual clock, without threads: the steps of
`RoundLoop` are mirrored here, what the device, the host and the clients take is given below.
*early* begins a round as soon as the one before it runs, *late* when that one is about to end.
Nothing in here is a measurement of the simulated rates. Writes benchmarks/results/late_rounds.json.
"""

import heapq
import itertools
import json
import random
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.results_file import Row, stamp, write
from benchmarks.shapes import tokens_of
from flide_engine.graphs import LADDER
from flide_engine.layout.buckets import smallest_bucket
from flide_engine.pacing import Pacing
from flide_engine.scheduler import Scheduler

MS: Mapping[str, Mapping[int, float]] = {
    "race1": {512: 2.08, 1024: 3.4, 2048: 6.0, 8192: 20.9, 16384: 41.0},
    "race_all": {512: 2.08, 832: 3.24, 2048: 6.2, 8192: 21.9, 16384: 43.9},
    "quality_all": {8192: 25.3, 16384: 48.7},
}
"""Milliseconds of a round by its rows, 0.8B on an H200: replays where there are any (race1,
race_all), else from the rates measured with full rounds; 1,024 and 2,048 rows, and race1 at 16,384,
are guesses between those."""

SPREAD = 0.02  # of a round's time around the predicted one, one standard deviation
TURN_S = 0.7e-3  # mean time from an answer to the client's next request; three tenths of it fixed
HAND_OUT_S = 20e-6  # from one answer of a round to the next
WAKE_S = 60e-6  # mean time by which a thread wakes up late
SLOW_S = 5e-3  # longest time that it wakes up, or forms a round, late in a slow moment
SAME = ("case", "work", "round_tokens", "mode")


@dataclass(frozen=True)
class Case:
    """Who asks. clients: in a closed loop. rate: requests a second in an open loop beside it, of
    race1 and another tenant. batch: whether the clients' work is batch work. slow: part of the
    moments in which the host is slow.
    """

    name: str
    work: str
    clients: int = 0
    rate: float = 0.0
    batch: bool = False
    slow: float = 0.0
    seconds: float = 10.0


CASES = (
    *(
        Case(f"{clients} clients", work, clients, seconds=40.0 if work == "quality_all" else 10.0)
        for clients in (1, 8, 64)
        for work in MS
    ),
    *(Case(f"{rate} a second", "race1", rate=rate, seconds=30.0) for rate in (100, 300, 500, 650)),
    Case("64 clients, slow host", "race1", 64, slow=0.02),
    Case("50 a second beside 64 clients", "race1", 64, 50.0, seconds=30.0),
    Case("50 a second beside 64 batch clients", "race1", 64, 50.0, batch=True, seconds=30.0),
)


@dataclass(eq=False)
class Request:
    """One request in the scheduler's eyes."""

    tokens: int
    asked: float
    tenant: str
    deadline: float | None = None
    is_long: bool = False
    is_coming: bool = False
    alone: bool = False

    @property
    def waiting_tokens(self) -> int:
        """All of it is one piece."""
        return self.tokens

    def is_gone(self, now: float) -> bool:
        """Nobody leaves."""
        return False


@dataclass
class Running:
    """A round on the device. seen: when it was seen to be over, if before it was collected."""

    works: list[Request]
    began: float
    end: float
    seen: float | None = None


@dataclass
class Simulation:
    """One engine under one load. free: when the device has run all that it was given; idle: seconds
    for which it then waited for a round that followed another.
    """

    case: Case
    round_tokens: int
    late: bool
    seed: int = 0
    now: float = 0.0
    free: float = 0.0
    idle: float = 0.0
    rounds: int = 0
    tokens: int = 0
    spans: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random, self._ticks = random.Random(self.seed), itertools.count()
        self._open = random.Random(self.seed + 1)  # the same, whatever else happens
        self._lengths = [r for r in LADDER if r <= self.round_tokens]
        table = {rows: ms_of(self.case.work, rows) for rows in self._lengths}
        self.scheduler: Scheduler[Request] = Scheduler(
            self.round_tokens, 1 << 40, table, self._bucket_of
        )
        self.pacing = Pacing()
        self._under_way: Running | None = None
        self._coming: list[tuple[float, int, str]] = []
        for _ in range(self.case.clients):
            self._ask(self._random.uniform(0.0, 0.005), "clients")
        if self.case.rate:
            self._ask(self._open.expovariate(self.case.rate), "open")

    def run(self) -> Row:
        """Everything until the time is over; the first tenth is warm-up."""
        while self.now < self.case.seconds:
            self._turn()
        row: Row = {"case": self.case.name, "work": self.case.work}
        row |= {"round_tokens": self.round_tokens, "mode": "late" if self.late else "early"}
        for tenant, spans in sorted(self.spans.items()):
            ordered, head = sorted(spans), "" if len(self.spans) == 1 else f"{tenant}_"
            row[f"{head}rps"] = round(len(ordered) / (0.9 * self.case.seconds), 1)
            row[f"{head}p50_ms"] = round(1000 * ordered[len(ordered) // 2], 1)
            row[f"{head}p99_ms"] = round(1000 * ordered[int(0.99 * len(ordered))], 1)
        row["round_mean"] = round(self.tokens / self.rounds)
        row["idle_share"] = round(self.idle / self.case.seconds, 4)
        return row

    def _turn(self) -> None:
        """As `RoundLoop`: waits until a round is due, begins it, collects the one before."""
        if self.late:
            self._await_due()
        self._arrive()
        began, running = self.now, self._under_way
        works, _ = self.scheduler.next_round(began)
        self._under_way = self._launched(works, began) if works else None
        if running is not None:
            self._collect(running)
        elif not works:
            self.now = max(self.now, self._coming[0][0]) + self._wakes()

    def _await_due(self) -> None:
        while True:
            self._arrive()
            running = self._under_way
            if running and running.seen is None and running.end <= self.now:
                running.seen = self.now
                self.pacing.ended(self.now)
            full = self.scheduler.expected_tokens >= self.round_tokens
            wait_s = self.pacing.wait_s(self.now, full)
            if not wait_s:
                return
            self.now += wait_s + self._wakes()

    def _launched(self, works: list[Request], began: float) -> Running:
        tokens = sum(work.tokens for work in works)
        rows = self._bucket_of(tokens)
        host_ms = (0.2 + 0.3 * rows / LADDER[-1]) * self._random.uniform(0.8, 1.2)
        self.now += host_ms / 1000 + self._slow()
        self.pacing.launched(self.now, self.scheduler.round_ms(tokens) / 1000)
        if self._under_way is not None:
            self.idle += max(0.0, self.now - self.free)
        seconds = ms_of(self.case.work, rows) / 1000 * self._random.lognormvariate(0.0, SPREAD)
        self.free = max(self.now, self.free) + seconds
        self.rounds += 1
        self.tokens += tokens
        return Running(works, began, self.free)

    def _collect(self, running: Running) -> None:
        self.now = max(self.now, running.end)
        ended = self.now if running.seen is None else running.seen
        if running.seen is None:
            self.pacing.ended(self.now)
        tokens = sum(work.tokens for work in running.works)
        self.scheduler.observe(tokens, ended - running.began, ended)
        for work in running.works:
            self.now += HAND_OUT_S
            self.scheduler.finished(work)
            if 0.1 * self.case.seconds <= self.now < self.case.seconds:
                self.spans.setdefault(work.tenant, []).append(self.now - work.asked)
            if work.tenant == "clients":
                think = self._random.expovariate(1.0 / (0.7 * TURN_S))
                self._ask(self.now + 0.3 * TURN_S + think, "clients")

    def _ask(self, when: float, tenant: str) -> None:
        heapq.heappush(self._coming, (when, next(self._ticks), tenant))

    def _arrive(self) -> None:
        """What has been asked by now."""
        while self._coming and self._coming[0][0] <= self.now:
            when, _, tenant = heapq.heappop(self._coming)
            tokens = tokens_of(self.case.work if tenant == "clients" else "race1")
            batch = self.case.batch and tenant == "clients"
            self.scheduler.add(Request(tokens, when, tenant), when, batch)
            if tenant == "open":
                self._ask(when + self._open.expovariate(self.case.rate), tenant)

    def _wakes(self) -> float:
        return self._random.expovariate(1.0 / WAKE_S) + self._slow()

    def _slow(self) -> float:
        return SLOW_S * self._random.random() if self._random.random() < self.case.slow else 0.0

    def _bucket_of(self, tokens: int) -> int:
        return smallest_bucket(tokens, self._lengths)


def ms_of(work: str, rows: int) -> float:
    """What a round of so many rows takes on the device."""
    known = MS[work]
    lengths = sorted(known)
    at = min(bisect_left(lengths, rows), len(lengths) - 1)
    high = lengths[at]
    if at == 0:  # 0.7 ms are what a round costs however short it is
        return 0.7 + (known[high] - 0.7) * rows / high
    low = lengths[at - 1]
    return known[low] + (known[high] - known[low]) * (rows - low) / (high - low)


def main() -> None:
    """Every case, with rounds of both lengths, early and late."""
    rows: list[Row] = []
    for case in CASES:
        for round_tokens in (8192, 16384):
            for late in (False, True):
                rows.append(Simulation(case, round_tokens, late).run())
                print(json.dumps(rows[-1]), flush=True)
    print("written to", write("late_rounds", stamp(rows), SAME))


if __name__ == "__main__":
    main()
