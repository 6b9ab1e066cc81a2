"""Simulated replicas: what each holds, what it queues, how long a round takes."""

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass

from router.policy import Choice, Load
from router.receiver import Receiver
from router.routing_key import RouteKey
from router.sim_workload import OPENING_BYTES, State, tokens_of

GRAIN = 64
SLOT_TOKENS = 1600
"""What a checkpoint's recurrent state weighs in tokens: 25 pages of 64 (benchmarks.checkpoints)."""


@dataclass(frozen=True)
class CostModel:
    """Milliseconds of a round.

    rounds: (tokens, ms), ascending; between them a straight line, beyond the last as many rounds as
    it takes. The defaults are those of 0.8B on an H200. history_ms: for each 1,000 tokens of
    history that a request attends to. scale: of everything, for a larger model. budget: tokens of a
    round.
    """

    rounds: tuple[tuple[int, float], ...] = ((512, 2.1), (2048, 5.2), (8192, 21.5))
    history_ms: float = 0.012
    scale: float = 1.0
    budget: int = 8192

    def ms(self, tokens: int, history: int = 0) -> float:
        """A round, or several, of so many new tokens over so many tokens of history in all."""
        whole, rest = divmod(tokens, self.rounds[-1][0])
        ms = whole * self.rounds[-1][1] + (self._line(rest) if rest else 0.0)
        return self.scale * (ms + self.history_ms * history / 1000)

    def _line(self, tokens: int) -> float:
        lengths = [n for n, _ in self.rounds]
        at = bisect_right(lengths, tokens)
        if at == 0:
            return self.rounds[0][1]  # a short round is padded to the smallest bucket
        if at == len(lengths):
            return self.rounds[-1][1]
        (n0, t0), (n1, t1) = self.rounds[at - 1], self.rounds[at]
        return t0 + (t1 - t0) * (tokens - n0) / (n1 - n0)


@dataclass(slots=True)
class Job:
    """One request. tokens: of its state. questions: tokens of them. started: when it was asked.
    needed: tokens that no cache could have saved. due: predicted ms on the replica it was sent to.
    """

    state: State
    key: RouteKey
    tokens: int
    questions: int
    router: int
    started: float
    agent: bool
    choice: Choice | None = None
    needed: int = 0
    due: float = 0.0


@dataclass
class Totals:
    """What a run adds up. computed: tokens. needed: tokens that no cache could have saved."""

    computed: int = 0
    needed: int = 0


class Replica:
    """One engine: a queue, rounds of at most `cost.budget` tokens, a cache by least recent use."""

    def __init__(self, name: str, index: int, cost: CostModel, cache_tokens: int) -> None:
        self.name, self.index, self._cost = name, index, cost
        self.alive = True
        self.queue: deque[Job] = deque()
        self.running: list[Job] = []
        self.until = 0.0  # end of the running round, s
        self.queued_ms = 0.0
        self.held: dict[int, int] = {}  # state -> tokens, least recently used first
        self.shared: set[str] = set()
        self.receiver = Receiver()
        self.step_ms, self.mean_wait = 3.0, 0.0
        self._room, self._size = cache_tokens, 0

    def missing(self, job: Job) -> int:
        """Tokens the job would compute here, the questions included."""
        held = self.held.get(job.state.number, 0)
        shape = job.state.shape
        if not held and shape.common:
            if shape.source in self.shared:
                held = tokens_of(min(shape.common, job.state.size))
            elif "" in self.shared:
                held = tokens_of(OPENING_BYTES)
        return job.tokens - min(held, job.tokens) // GRAIN * GRAIN + job.questions

    def wait_ms(self, now: float) -> float:
        """Predicted wait of a request that arrives now."""
        return max(0.0, 1000 * (self.until - now)) * bool(self.running) + self.queued_ms

    def load(self, now: float) -> Load:
        """What goes back with an answer."""
        per_ms = self._cost.budget / self._cost.ms(self._cost.budget)
        return Load(self.wait_ms(now), self.mean_wait, self.step_ms, per_ms)

    def take(self, job: Job, now: float) -> None:
        """Queues a job."""
        self.mean_wait += 0.02 * (self.wait_ms(now) - self.mean_wait)
        job.due = self._cost.ms(self.missing(job), job.tokens)
        self.queued_ms += job.due
        self.queue.append(job)
        if job.choice is not None:
            self.receiver.received(job.key, job.choice.anchor, job.choice.home, now)

    def start(self, now: float, totals: Totals) -> float:
        """Begins a round of what is queued; returns its ms. The queue must not be empty."""
        tokens = history = 0
        while self.queue:
            new = self.missing(self.queue[0])
            if tokens and tokens + new > self._cost.budget:
                break
            job = self.queue.popleft()
            self.queued_ms = max(0.0, self.queued_ms - job.due)
            tokens, history = tokens + new, history + job.tokens
            self.running.append(job)
            self._keep(job)
        if not self.queue:
            self.queued_ms = 0.0
        totals.computed += tokens
        ms = self._cost.ms(tokens, history)
        self.step_ms += 0.05 * (ms / len(self.running) - self.step_ms)
        self.until = now + ms / 1000
        return ms

    def _keep(self, job: Job) -> None:
        """Remembers a state, forgetting the least recently used where room ends."""
        number = job.state.number
        before = self.held.pop(number, -SLOT_TOKENS)
        self.held[number] = max(job.tokens, before)
        self._size += self.held[number] - before
        if job.state.shape.common:
            self.shared |= {"", job.state.shape.source}
        while self._size > self._room and len(self.held) > 1:
            oldest = next(iter(self.held))
            self._size -= self.held.pop(oldest) + SLOT_TOKENS

    def drain_dead(self) -> list[Job]:
        """The replica died: what it owed answers to."""
        self.alive = False
        owed = [*self.running, *self.queue]
        self.running, self.queue = [], deque()
        return owed
