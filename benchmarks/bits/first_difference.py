"""Where bits of a prompt in a round leave those of the prompt alone: layer, position, row."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flide_engine.cache.pool import Pool
from flide_engine.device_plan import Capacity, Tables
from flide_engine.errors import PoolExhausted
from flide_engine.executor import Eager, Executor, to_device
from flide_engine.graphs import TILE, Graphs
from flide_engine.kernels.stream import StreamTensors
from flide_engine.layout.plan import RoundPlan
from flide_engine.layout.stream import Job, lay_out
from flide_engine.layout.tree import build_forest
from flide_engine.models.qwen3_5 import Qwen35
from flide_engine.readout import Asked

Tokens = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Difference:
    """A question whose logits depend on more than its prompt: the prompt's tokens, the largest
    difference of a logit, the paths it took, and where it begins ("" if that was not looked for).
    """

    tokens: int
    largest: float
    paths: tuple[str, ...]
    where: str

    def __str__(self) -> str:
        return (
            f"a prompt of {self.tokens} tokens has other bits ({', '.join(self.paths)}), by up to"
            f" {self.largest:.2g} in a logit, from {self.where or 'somewhere'} on"
        )


def same_bits(got: Floats, want: Floats) -> bool:
    """Whether two arrays are equal bit for bit: NaN equals itself, -0.0 does not equal 0.0."""
    return torch.equal(*(torch.from_numpy(x.copy()).view(torch.int32) for x in (got, want)))


def first_difference(
    executor: Any, pool: Pool, jobs: Sequence[Job], read: int, prompt: Tokens
) -> str:
    """Runs a round and one of its prompts alone again, kernel by kernel, and compares the residual
    streams: the half of a layer, the position in the prompt and the row of the round.

    executor: one that has its model. read: which of the round's reads is the prompt's. The
    checkpoints that the round resumed from must still be there.
    """
    model: Any = executor.model if isinstance(executor, Graphs) else executor._model
    try:
        plan, together = _recorded(model, pool, executor, jobs)
        _, alone = _recorded(model, pool, executor, [Job(build_forest([prompt]))])
    except PoolExhausted as error:
        return f"no room to look: {error}"
    rows = rows_of(plan, read)
    whole = 2 * len(model.layers) - 1  # later calls get the rows that are read
    for call, (here, there) in enumerate(zip(together, alone, strict=True)):
        of = rows if call < whole else [rows[-1]]
        mine = here[rows if call < whole else [read]]
        other = there[: len(prompt)] if call < whole else there[:1]
        differ = (mine != other[len(other) - len(mine) :]).any(1).nonzero()
        if len(differ):
            at = int(differ[0])
            position = len(prompt) - len(of) + at
            return f"{_half(call)}, position {position} (row {of[at]} of the round)"
    return "not seen kernel by kernel"


def rows_of(plan: RoundPlan, read: int) -> list[int]:
    """Stream rows of a read's prompt, in order of position, from where its round resumed."""
    node = int(np.searchsorted(plan.cu_seqlens, plan.read_rows[read], side="right")) - 1
    rows: list[int] = []
    while node >= 0:
        rows = [*range(plan.cu_seqlens[node], plan.cu_seqlens[node + 1]), *rows]
        node = int(plan.parents[node])
    return rows


def _half(call: int) -> str:
    """What the sum of a norm's `call` has just been given."""
    if not call:
        return "embedding"
    return f"layer {(call - 1) // 2}, {'mixer' if call % 2 else 'MLP'}"


def _recorded(
    model: Qwen35, pool: Pool, executor: Executor, jobs: Sequence[Job]
) -> tuple[RoundPlan, list[Tensor]]:
    """The plan of a round, and the residual stream before each norm. Raises PoolExhausted."""
    layout = lay_out(jobs)
    pages, slots = pool.take(layout.num_pages, layout.num_slots)
    seen: list[Tensor] = []
    norm = model.ops.add_rms_norm

    def record(
        x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total, normed = norm(x, delta, weight, eps)
        seen.append(total)
        return total, normed

    try:
        plan = layout.bind(pages, slots, pool.page_places)[0]
        twin = copy(model)
        twin.ops = replace(model.ops, add_rms_norm=record)
        twin.forward(_on_device(plan, executor, pool.device), pool.tensors)
    finally:
        pool.pages.release(pages)
        pool.slots.release(slots)
    return plan, seen


def _on_device(plan: RoundPlan, executor: Executor, device: torch.device) -> StreamTensors:
    """A plan as the executor would run it, padded to its bucket."""
    if isinstance(executor, Eager):
        return to_device(plan, device)
    buckets = executor.buckets if isinstance(executor, Graphs) else []
    asked = Asked.every_vector(len(plan.read_rows))
    for capacity in (*(b.tables.capacity for b in buckets), Capacity.exactly(plan, TILE)):
        if plan.num_rows <= capacity.rows:
            tables = Tables(capacity, device)
            if tables.fill(plan, asked):
                tables.upload()
                return tables.stream
    raise AssertionError("a plan fits its own capacity")
