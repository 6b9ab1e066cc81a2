"""One int32 buffer a round: every array of a plan and its work lists, at a bucket's capacity.

Written on the host as one array, copied once, and read by kernels through views that never move, so
a captured graph sees each round's tree without being captured again.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flide_engine.kernels.stream import StreamTasks, StreamTensors
from flide_engine.layout.buckets import ROWS_A_PROMPT
from flide_engine.layout.plan import RoundPlan
from flide_engine.layout.tasks import copy_plan, write_queries, write_states
from flide_engine.readout import Asked

Ints = NDArray[np.int32]

COPIED = (
    "cu_seqlens", "starts", "initial_slots", "chain_rows", "pages", "write_pages", "write_rows",
    "read_rows", "tokens", "positions", "label_reads", "label_rows", "counts",
)  # fmt: skip
"""Tables of what the device takes as it is, in the order in which `copy_plan` does."""

STATES = (
    "chunk_rows", "chunk_skips", "chunk_slots", "chunk_sources", "scans", "resumed", "counts",
)  # fmt: skip
QUERIES = (
    "row_nodes", "row_taps", "tile_queries", "tile_nodes", "tile_ends", "tile_pages", "tile_parts",
    "tile_sums", "read_tile_queries", "read_tile_nodes", "read_tile_ends", "read_tile_pages",
    "read_tile_parts", "read_tile_sums", "counts",
)  # fmt: skip
"""Work lists, in the order in which `write_states` and `write_queries` take them."""

PARTS_A_TILE = 16
"""Room for parts beyond the first, for each tile that may be cut."""


@dataclass(frozen=True)
class Capacity:
    """The most that a bucket of `rows` takes of each thing."""

    rows: int
    nodes: int
    chunks: int
    tiles: int
    tile: int
    reads: int
    pages: int
    writes: int
    passed: int
    labels: int
    turn: int = 1
    split: int = 0

    @property
    def sums(self) -> int:
        """Tiles that may be cut into parts."""
        return self.rows // self.tile + 16 if self.split else 0

    @classmethod
    def of(cls, rows: int, tile: int, history: int, turn: int = 1, split: int = 0) -> "Capacity":
        """Of a bucket: room for many short branches, and for `history` grains of pages.

        turn: attention tiles that run at once. split: grains after which a tile's keys are cut.
        """
        nodes = rows // ROWS_A_PROMPT + 72
        return cls(
            rows=rows,
            nodes=nodes,
            chunks=rows // 64 + 2 * nodes,
            tiles=rows // tile + nodes,
            tile=tile,
            reads=nodes,
            pages=rows // 64 + nodes + history,
            writes=rows // 64 + nodes,
            passed=rows // 64 + 2 * nodes,
            labels=4 * rows + 1024,
            turn=turn,
            split=split,
        )

    @classmethod
    def exactly(cls, plan: RoundPlan, tile: int, turn: int = 1, split: int = 0) -> "Capacity":
        """Of one plan."""
        n = plan.num_nodes
        return cls(
            rows=len(plan.tokens),
            nodes=n,
            chunks=len(plan.tokens) // 64 + 2 * n,
            tiles=len(plan.tokens) // tile + n,
            tile=tile,
            reads=max(1, len(plan.read_rows)),
            pages=max(1, len(plan.pages)),
            writes=max(1, len(plan.write_pages)),
            passed=len(plan.tokens) // 64 + 2 * n + len(plan.store_nodes),
            labels=256,
            turn=turn,
            split=split,
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each array in the buffer, in order."""
        a, n, r = self.tiles, self.nodes, self.reads
        cut_a, cut_r = (a, r) if self.split else (0, 0)
        parts = PARTS_A_TILE * self.sums
        return {
            "tokens": (self.rows,),
            "positions": (self.rows,),
            "cu_seqlens": (n + 1,),
            "starts": (n,),
            "initial_slots": (n,),
            "chain_rows": (n, 66),
            "pages": (self.pages,),
            "write_pages": (self.writes,),
            "write_rows": (self.writes, 64),
            "read_rows": (r,),
            "label_reads": (self.labels,),
            "label_rows": (self.labels,),
            "counts": (12,),
            "row_nodes": (self.rows,),
            "row_taps": (self.rows, 3),
            "chunk_rows": (self.chunks, 64),
            "chunk_skips": (self.chunks,),
            "chunk_slots": (self.chunks,),
            "chunk_sources": (self.chunks,),
            "scans": (n, 6),
            "resumed": (n, 2),
            "tile_queries": (a, self.tile),
            "tile_nodes": (a, 2),
            "tile_ends": (a, 2),
            "tile_pages": (a, 2),
            "read_tile_queries": (r, self.tile),
            "read_tile_nodes": (r, 2),
            "read_tile_ends": (r, 2),
            "read_tile_pages": (r, 2),
            "tile_parts": (cut_a + parts, 2),
            "tile_sums": (cut_a, 2),
            "read_tile_parts": (cut_r + parts, 2),
            "read_tile_sums": (cut_r, 2),
        }


class Tables:
    """The buffer of one bucket on the host and on a device, and the views of both."""

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        self.capacity = capacity
        shapes = capacity.shapes()
        sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
        total = sum(-(-size // 4) * 4 for size in sizes.values())
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(total, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._device = torch.zeros(total, dtype=torch.int32, device=device)
        self._turn = 0
        views: dict[str, Tensor] = {}
        hosts: list[dict[str, Ints]] = [{}, {}]
        at = 0
        for name, shape in shapes.items():
            size = sizes[name]
            for host, buffer in zip(hosts, self._hosts, strict=True):
                host[name] = buffer[at : at + size].view(shape).numpy()
            views[name] = self._device[at : at + size].view(shape)
            at += -(-size // 4) * 4  # every array begins on 16 bytes
        self._views = hosts
        self._lists = [
            tuple(tuple(host[name] for name in names) for names in (COPIED, STATES, QUERIES))
            for host in hosts
        ]
        self.stream = _stream(views, capacity)
        self.label_reads, self.label_rows = views["label_reads"], views["label_rows"]

    @property
    def host(self) -> dict[str, Ints]:
        """The arrays of the next upload."""
        return self._views[self._turn]

    def fill(self, plan: RoundPlan, asked: Asked) -> bool:
        """Writes a plan and its work lists on the host. False if the bucket is too small for it."""
        most = self.capacity
        if plan.num_rows > most.rows or plan.num_nodes > most.nodes:
            return False
        copied, states, queries = self._lists[self._turn]
        return (
            copy_plan(
                plan.cu_seqlens, plan.starts, plan.initial_slots, plan.chain_rows, plan.pages,
                plan.write_pages, plan.write_rows, plan.read_rows, plan.tokens, plan.positions,
                asked.reads, asked.rows, *copied,
            )
            and write_states(
                most.passed, plan.cu_seqlens, plan.starts, plan.initial_slots, plan.chain_rows,
                plan.store_nodes, plan.store_positions, plan.store_slots, *states,
            )
            and write_queries(
                most.tile, most.turn, most.split, most.sums, plan.cu_seqlens, plan.starts,
                plan.parents, plan.chain_rows, plan.page_lists, plan.page_list_ends,
                plan.read_rows, *queries,
            )
        )  # fmt: skip

    def upload(self) -> None:
        """One copy of the whole buffer, asynchronous on the current stream.

        The next round is filled into the other host buffer: this one is free again when the round
        after it is filled.
        """
        self._device.copy_(self._hosts[self._turn], non_blocking=True)
        self._turn ^= 1


def _stream(views: dict[str, Tensor], most: Capacity) -> StreamTensors:
    lists = {name: views[name] for name in StreamTasks.__dataclass_fields__ if name in views}
    tasks = StreamTasks(**lists, passed_states=most.passed, split=most.split, sums=most.sums)
    nothing = views["counts"][:0]
    plan = {
        name: views.get(name, nothing)
        for name in StreamTensors.__dataclass_fields__
        if name not in {"level_ends", "tasks"}
    }
    return StreamTensors(level_ends=(), tasks=tasks, **plan)
