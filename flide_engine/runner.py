"""One round on the device: pages and slots from the pool, the plan, the forward pass.

`Runner` is used by one thread. It knows streams, models and the pool; it knows no request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flide_engine.cache.pool import Accounting, Pool
from flide_engine.device_plan import Capacity, Tables
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

    def __init__(
        self, model: DecisionModel, pool: Pool, fork: Fork, device: torch.device, tile: int | None
    ) -> None:
        """tile: query rows of an attention tile if the kernels need work lists, else None."""
        self.model, self.fork, self.device = model, fork, device
        self._pool, self._tile = pool, tile

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
            hidden = self.model.forward(self._stream(plan), self._pool.tensors)
            for anchor in (a for marks in checkpoints for a in marks):
                self.hold(anchor)
        finally:
            self._pool.pages.release(pages)
            self._pool.slots.release(slots)
        return RoundResult(hidden, checkpoints)

    def _stream(self, plan: RoundPlan) -> StreamTensors:
        if self._tile is None:
            return to_device(plan, self.device)
        tables = Tables(Capacity.exactly(plan, self._tile), self.device)
        assert tables.fill(plan), "a plan must fit a buffer of its own size"
        tables.upload()
        # the host buffer must live until the copy is done: the reads at the round's end wait for it
        self._last = tables
        return tables.stream

    def hold(self, anchor: Anchor) -> None:
        """One more holder of a checkpoint, who will `drop` it."""
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
    arrays: dict[str, Any] = {
        name: torch.from_numpy(getattr(plan, name)).to(device)
        for name in StreamTensors.__dataclass_fields__
        if name not in {"level_ends", "tasks"}
    }
    return StreamTensors(level_ends=tuple(plan.level_ends.tolist()), **arrays)
