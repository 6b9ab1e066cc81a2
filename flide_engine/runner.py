"""One round on the device: pages and slots from the pool, the plan, its execution.

`Runner` is used by one thread. It knows streams, executors and the pool; it knows no request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flide_engine.cache.pool import Accounting, Pool
from flide_engine.config import GRAIN
from flide_engine.executor import Executor, Pending
from flide_engine.layout.plan import Anchor, Mark
from flide_engine.layout.stream import Fork, Job, lay_out
from flide_engine.layout.tree import build_forest, common_prefix
from flide_engine.readout import Asked, for_each, is_finite


@dataclass(frozen=True)
class Started:
    """A round under way. checkpoints: those of each job's marks, held; what they stand for is
    there for every later round.
    """

    pending: Pending
    asked: Asked
    checkpoints: tuple[tuple[Anchor, ...], ...]


class Runner:
    """An executor and its pool on one device."""

    def __init__(self, executor: Executor, pool: Pool, fork: Fork) -> None:
        self.executor, self.fork, self._pool = executor, fork, pool
        _compile_loops()

    def start(self, jobs: Sequence[Job], asked: Asked) -> Started:
        """Begins one round. The checkpoints of its marks are the caller's to `drop`; all else is
        freed at once: rounds run one after the other, so whoever takes it next comes later.

        Raises PoolExhausted or RoundTooLarge, having taken nothing, if the round does not fit.
        """
        layout = lay_out(jobs, self.fork)
        pages, slots = self._pool.take(layout.num_pages, layout.num_slots)
        try:
            plan, checkpoints = layout.bind(pages, slots, self._pool.page_places)
            pending = self.executor.start(plan, asked)
            for anchor in (a for marks in checkpoints for a in marks):
                self.hold(anchor)
        finally:
            self._pool.pages.release(pages)
            self._pool.slots.release(slots)
        return Started(pending, asked, checkpoints)

    def hold(self, anchor: Anchor) -> None:
        """One more holder of a checkpoint, who will `drop` it."""
        self._pool.pages.retain(anchor.pages)
        self._pool.slots.retain_one(anchor.slot)

    def drop(self, anchor: Anchor) -> None:
        """Gives up a checkpoint; its pages and slot are free once nobody else holds them."""
        self._pool.pages.release(anchor.pages)
        self._pool.slots.release_one(anchor.slot)

    def accounting(self) -> Accounting:
        """Bytes of the pool held and in all."""
        return self._pool.accounting()


def _compile_loops() -> None:
    """Puts a small round together, so that no request waits for the compiler."""
    text, numbers = np.zeros(GRAIN + 1, np.int32), np.zeros(1, np.int32)
    lay_out([Job(build_forest([text]), marks=(Mark(0, GRAIN),))]).bind(numbers, numbers)
    for_each(numbers, 1)
    is_finite(np.zeros(1, np.float32), None)
    common_prefix([text, text.copy()], 0, 1)
