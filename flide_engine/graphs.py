"""CUDA graphs of whole forward passes, one a bucket of stream lengths, captured at start.

A replay costs one copy of the round's tables, one launch, and one copy of the logits back. Which
tree it runs is in the tables; the graph only fixes the most rows and nodes.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flide_engine.cache.pool import Pool
from flide_engine.config import GRAIN
from flide_engine.device_plan import Capacity, Tables
from flide_engine.errors import RoundTooLarge
from flide_engine.executor import Eager, Executor
from flide_engine.kernels import REFERENCE, Kernels
from flide_engine.layout.buckets import smallest_bucket
from flide_engine.layout.plan import RoundPlan
from flide_engine.layout.stream import Job, lay_out
from flide_engine.layout.tree import build_forest
from flide_engine.models.base import DecisionModel, StateTensors
from flide_engine.readout import Asked, Floats

log = logging.getLogger(__name__)

WARM_UPS = 2
CUDA = torch.device("cuda")

MOST_PARTS = 256
"""Numbers of logits for which a landing keeps its slices ready."""


class Replay:
    """A replayed round; its logits are on their way to the host."""

    def __init__(
        self, rows: int, done: torch.cuda.Event, logits: Floats, hidden: Tensor | None
    ) -> None:
        """logits, hidden: where they will be, on the host, once `done`."""
        self.rows, self._done, self._logits, self._hidden = rows, done, logits, hidden
        done.record()

    def is_done(self) -> bool:
        """See Pending."""
        return bool(self._done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> tuple[Floats, Floats | None]:
        """See Pending."""
        self._done.synchronize()
        return self._logits.copy(), None if self._hidden is None else self._hidden.numpy()


class Landing:
    """Where the logits of every other round of a bucket come to the host."""

    def __init__(self, logits: Tensor) -> None:
        """logits: of the bucket, on the device."""
        self._device = logits
        self._host = torch.empty(logits.shape, dtype=torch.float32, pin_memory=True)
        self._values: Floats = self._host.numpy()
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}

    def bring(self, count: int) -> Floats:
        """Begins to copy the first `count`, and returns where they will be."""
        parts = self._parts.get(count)
        if parts is None:  # a slice of a tensor costs as much as the copy
            if len(self._parts) == MOST_PARTS:
                del self._parts[next(iter(self._parts))]
            parts = self._parts[count] = self._host[:count], self._device[:count]
        parts[0].copy_(parts[1], non_blocking=True)
        return self._values[:count]


class Bucket:
    """One captured forward pass over at most `capacity.rows` rows."""

    def __init__(
        self, model: DecisionModel, state: StateTensors, capacity: Capacity, example: RoundPlan,
        pool: Any,
    ) -> None:  # fmt: skip
        """example: a small plan that is run to warm up."""
        self.tables = Tables(capacity, CUDA)
        assert self.tables.fill(example, Asked.every_vector(len(example.read_rows)))
        self.tables.upload()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._forward(model, state)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.hidden, self.logits = self._forward(model, state)
        self._landings = [Landing(self.logits) for _ in range(2)]

    def _forward(self, model: DecisionModel, state: StateTensors) -> tuple[Tensor, Tensor]:
        hidden = model.forward(self.tables.stream, state)
        return hidden, model.label_logits(hidden, self.tables.label_reads, self.tables.label_rows)

    def replay(self, plan: RoundPlan, asked: Asked) -> Replay:
        """Runs what the tables hold: this plan."""
        self.tables.upload()
        self.graph.replay()
        self._landings.reverse()
        landing = self._landings[0]
        logits = landing.bring(len(asked.reads))
        hidden = None
        if asked.vectors:  # before the next replay, which writes where these are
            found = self.hidden[: len(plan.read_rows)]
            hidden = torch.empty(found.shape, dtype=torch.float32, pin_memory=True)
            hidden.copy_(found, non_blocking=True)
        return Replay(self.tables.capacity.rows, landing.done, logits, hidden)


LADDER = (
    64, 128, 192, 256, 384, 512, 640, 768, 832, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584,
    4096, 4864, 5632, 6400, 7296, 8192, 10240, 12288, 14336, 16384,
)  # fmt: skip
"""Rows of the buckets: products take whole tiles of 128 rows, so rungs between them gain little."""

SMALL_TILE, TILE, SMALL_ROWS = 16, 32, 1024
"""Query rows of an attention tile in buckets of up to SMALL_ROWS rows, and in larger ones: small
ones fill the card with half the rows a program. Both give the same bits where a tile times its
query heads is at least LEAST_PRODUCT rows; below, products take other instructions."""

LEAST_PRODUCT = 64

PART = 0
"""Grains after which a tile's keys go to another program, 0: never. Bits depend on it: one value
for every round and replica. Not measured on a card yet; 32 and 64 are to be tried, for agents'
steps on long histories, whose few tiles leave most of the card idle."""

HISTORY = 8192
"""Grains of earlier rounds that the page lists of one round may name."""


def ladder(most: int, turn: int, small: int = SMALL_TILE, part: int = 0) -> list[Capacity]:
    """Capacities of all buckets up to `most` rows.

    turn: attention tiles that run at once. small: query rows of a tile in short buckets. part:
    grains of keys that one program takes of a tile, 0: all.
    """
    rungs = [r for r in LADDER if r < most] + [most]
    return [Capacity.of(r, small if r <= SMALL_ROWS else TILE, HISTORY, turn, part) for r in rungs]


class Graphs:
    """An Executor over buckets in ascending order, all in one memory pool.

    At most one round may be under way when the next is started: two host buffers take turns.
    """

    runs_ahead = True

    def __init__(
        self, model: DecisionModel, state: StateTensors, capacities: Sequence[Capacity]
    ) -> None:
        """Captures the largest first, so that the others fit into its memory.

        Warms up with a round that touches no page and no slot.
        """
        began = time.monotonic()
        # a graph knows addresses only: what it reads must not go before it
        self.model, self._state = model, state
        text = np.arange(min(GRAIN, capacities[0].rows) - 1, dtype=np.int32)
        nothing = np.zeros(0, np.int32)
        example, _ = lay_out([Job(build_forest([text]))]).bind(nothing, nothing)
        self.buckets: list[Bucket] = []
        pool = None
        for capacity in sorted(capacities, key=lambda c: c.rows, reverse=True):
            self.buckets.insert(0, Bucket(model, state, capacity, example, pool))
            pool = pool or self.buckets[0].graph.pool()
        self._rows = [b.tables.capacity.rows for b in self.buckets]
        self.lengths: Sequence[int] = sorted(set(self._rows))
        torch.cuda.synchronize()
        log.info("captured %d graphs in %.1f s", len(self.buckets), time.monotonic() - began)

    def bucket_of(self, tokens: int) -> int:
        """See Executor."""
        return smallest_bucket(tokens, self.lengths)

    def fill(self, plan: RoundPlan, asked: Asked) -> Bucket | None:
        """The smallest bucket that holds a plan, filled with it; None if none does."""
        first = bisect_left(self._rows, plan.num_rows)
        return next((b for b in self.buckets[first:] if b.tables.fill(plan, asked)), None)

    def start(self, plan: RoundPlan, asked: Asked) -> Replay:
        """See Executor."""
        bucket = self.fill(plan, asked)
        if bucket is None:
            largest = self.buckets[-1].tables.capacity
            raise RoundTooLarge(plan.num_rows, plan.num_nodes, largest.rows, largest.nodes)
        return bucket.replay(plan, asked)

    def check(self) -> None:
        """See Executor."""
        torch.cuda.synchronize()


def executor_for(
    model: DecisionModel, pool: Pool, kernels: Kernels, device: torch.device, most: int
) -> Executor:
    """Captured graphs for the GPU kernels, else eager execution. most: rows of a round."""
    if device.type == "cpu" or kernels is REFERENCE:
        return Eager(model, pool.tensors, device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    turn = max(1, processors // model.state_shape.kv_heads)
    small = SMALL_TILE if SMALL_TILE * model.query_heads >= LEAST_PRODUCT else TILE
    return Graphs(model, pool.tensors, ladder(most, turn, small, PART))
