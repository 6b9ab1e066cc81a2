"""CUDA graphs of whole forward passes, one a bucket of stream lengths, captured at start.

A replay costs one copy of the round's tables and one launch. Which tree it runs is in the tables;
the graph only fixes the most rows, nodes and levels.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flide_engine.device_plan import Capacity, Tables
from flide_engine.layout.plan import RoundPlan
from flide_engine.models.base import DecisionModel, StateTensors

WARM_UPS = 2


class Bucket:
    """One captured forward pass over at most `capacity.rows` rows."""

    def __init__(
        self, model: DecisionModel, state: StateTensors, capacity: Capacity, example: RoundPlan,
        pool: Any,
    ) -> None:  # fmt: skip
        """example: a small plan that is run to warm up; its pages and slots are overwritten."""
        self.tables = Tables(capacity, torch.device("cuda"))
        assert self.tables.fill(example), "a bucket must hold its warm-up round"
        self.tables.upload()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                model.forward(self.tables.stream, state)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.hidden: Tensor = model.forward(self.tables.stream, state)

    def replay(self) -> Tensor:
        """Runs what the tables hold: hidden vectors [reads, H], valid until the next replay."""
        self.tables.upload()
        self.graph.replay()
        return self.hidden


class Graphs:
    """Buckets in ascending order of rows, each with one and with several levels, over one memory
    pool.
    """

    def __init__(
        self, model: DecisionModel, state: StateTensors, capacities: Sequence[Capacity],
        example: RoundPlan,
    ) -> None:  # fmt: skip
        """Captures the largest first, so that the others fit into its memory."""
        self._buckets: list[Bucket] = []
        pool = None
        for capacity in sorted(capacities, key=lambda c: (c.rows, c.levels), reverse=True):
            self._buckets.insert(0, Bucket(model, state, capacity, example, pool))
            pool = pool or self._buckets[0].graph.pool()

    def fill(self, plan: RoundPlan) -> Bucket | None:
        """The smallest bucket that holds a plan, filled with it; None if none does."""
        return next((b for b in self._buckets if b.tables.fill(plan)), None)
