"""One round on the device: pages and slots from the pool, the plan, the forward pass.

`Runner` is used by one thread. It knows streams, models and the pool; it knows no request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flide_engine.cache.pool import Accounting, Pool
from flide_engine.kernels.stream import StreamTensors
from flide_engine.layout.plan import Anchor, Ints, RoundPlan
from flide_engine.layout.stream import Fork, Job, lay_out
from flide_engine.models.base import DecisionModel


@dataclass(frozen=True)
class RoundResult:
    """hidden [R, H]: vectors of all reads, job by job; checkpoints: those of each job's marks,
    held.
    """

    hidden: Tensor
    checkpoints: tuple[tuple[Anchor, ...], ...]


class Runner:
    """A model and its pool on one device."""

    def __init__(self, model: DecisionModel, pool: Pool, fork: Fork, device: torch.device) -> None:
        self.model, self.fork, self.device = model, fork, device
        self._pool = pool

    def run(self, jobs: Sequence[Job]) -> RoundResult:
        """Runs one round. The checkpoints of its marks are the caller's to `drop`; all else is
        freed.

        Raises PoolExhausted, having taken nothing, if the pool cannot hold the round.
        """
        layout = lay_out(jobs, self.fork)
        pages = self._pool.pages.take(layout.num_pages)
        try:
            slots = self._pool.slots.take(layout.num_slots)
        except Exception:
            self._pool.pages.release(pages)
            raise
        try:
            plan, checkpoints = layout.bind(pages, slots)
            hidden = self.model.forward(to_device(plan, self.device), self._pool.tensors)
            self._hold(checkpoints)
        finally:
            self._pool.pages.release(pages)
            self._pool.slots.release(slots)
        return RoundResult(hidden, checkpoints)

    def _hold(self, checkpoints: tuple[tuple[Anchor, ...], ...]) -> None:
        for anchor in (a for marks in checkpoints for a in marks):
            self._pool.pages.retain(anchor.pages)
            self._pool.slots.retain(_slot(anchor))

    def drop(self, anchor: Anchor) -> None:
        """Gives up a checkpoint; its pages and slot are free once nobody else holds them."""
        self._pool.pages.release(anchor.pages)
        self._pool.slots.release(_slot(anchor))

    def accounting(self) -> Accounting:
        """Bytes of the pool held and in all."""
        return self._pool.accounting()


def _slot(anchor: Anchor) -> Ints:
    return np.array([anchor.slot], np.int32)


def to_device(plan: RoundPlan, device: torch.device) -> StreamTensors:
    """The plan's arrays as tensors on `device`."""
    arrays = {
        name: torch.from_numpy(getattr(plan, name)).to(device)
        for name in StreamTensors.__dataclass_fields__
        if name != "level_ends"
    }
    return StreamTensors(level_ends=tuple(plan.level_ends.tolist()), **arrays)
