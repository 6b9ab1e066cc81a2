"""Which work goes into the next round. Pure policy: no threads, no tensors, a clock that is handed
in.

Work is counted in new tokens. Requests go first come, first served; one that takes several rounds
goes to the back of the queue between two of them, so that short requests run between its pieces.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from flide_engine.errors import Overloaded

_RATE_WEIGHT = 0.2  # of the newest round in the running mean of tokens per second
_RETRY_MS = (50, 5000)


class Schedulable(Protocol):
    """A request in the queue."""

    @property
    def tokens(self) -> int:
        """New tokens of its next piece."""
        ...

    @property
    def waiting_tokens(self) -> int:
        """New tokens of all its pieces to come."""
        ...

    @property
    def is_long(self) -> bool:
        """Whether it takes several rounds and so holds checkpoints between them."""
        ...

    def is_gone(self, now: float) -> bool:
        """Whether its caller has left or its deadline has passed: it will not be run."""
        ...


W = TypeVar("W", bound=Schedulable)


class Scheduler(Generic[W]):
    """First come, first served, up to a token budget a round."""

    def __init__(self, round_tokens: int, max_queued_tokens: int) -> None:
        self._round_tokens, self._limit = round_tokens, max_queued_tokens
        self._queue: deque[W] = deque()
        self._begun: W | None = None  # the one long request that holds checkpoints
        self._rate = 0.0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[W]:
        return iter(self._queue)

    @property
    def queued_tokens(self) -> int:
        """New tokens of everything that waits."""
        return sum(work.waiting_tokens for work in self._queue)

    def add(self, work: W) -> None:
        """Queues new work. Raises Overloaded if more than `max_queued_tokens` would wait.

        Work is always taken when nothing waits, so that the limit refuses load and never a single
        request.
        """
        queued = self.queued_tokens
        if self._queue and queued + work.waiting_tokens > self._limit:
            raise Overloaded(
                queued, "tokens", self._limit, "max_queued_tokens", self.retry_after_ms()
            )
        self._queue.append(work)

    def next_round(self, now: float) -> tuple[list[W], list[W]]:
        """(work of the next round, work whose caller has left), both out of the queue."""
        taken: list[W] = []
        gone = [work for work in self._queue if work.is_gone(now)]
        room = self._round_tokens
        kept: deque[W] = deque()
        for work in self._queue:
            if work in gone:
                continue
            waits_its_turn = work.is_long and self._begun not in (None, work)
            if not waits_its_turn and (work.tokens <= room or not taken):
                taken.append(work)
                room -= work.tokens
                if work.is_long:
                    self._begun = work
            else:
                kept.append(work)
        if self._begun in gone:
            self._begun = None
        self._queue = kept
        return taken, gone

    def put_back(self, works: Sequence[W], front: bool = False) -> None:
        """Queues work again: at the back between two pieces, at the front if it did not run."""
        if front:
            self._queue.extendleft(reversed(works))
        else:
            self._queue.extend(works)

    def finished(self, work: W) -> None:
        """Work that will not come back."""
        if self._begun is work:
            self._begun = None

    def observe(self, tokens: int, seconds: float) -> None:
        """A round of `tokens` took `seconds`; keeps the rate that waits are predicted from."""
        rate = tokens / max(seconds, 1e-6)
        self._rate = (
            rate if not self._rate else (1 - _RATE_WEIGHT) * self._rate + _RATE_WEIGHT * rate
        )

    def drain(self) -> list[W]:
        """Everything that waits, out of the queue."""
        works, self._queue, self._begun = list(self._queue), deque(), None
        return works

    def retry_after_ms(self) -> int:
        """When the queue is expected to be empty, from the rate of the rounds so far."""
        predicted = 1000 * self.queued_tokens / self._rate if self._rate else _RETRY_MS[0]
        return int(min(max(predicted, _RETRY_MS[0]), _RETRY_MS[1]))
