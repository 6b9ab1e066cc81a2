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
from flide_engine.layout.tasks import (
    count_chunks,
    stores_of,
    write_chunks,
    write_parts,
    write_rows,
    write_scans,
    write_tiles,
)
from flide_engine.readout import Asked

Ints = NDArray[np.int32]

COPIED = (
    "cu_seqlens", "starts", "initial_slots", "chain_rows", "pages", "write_pages", "write_rows",
    "read_rows",
)  # fmt: skip
"""Arrays of a plan that the device takes as they are."""

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
        self._every = np.arange(capacity.rows, dtype=np.int32)
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
        chunks = count_chunks(plan.cu_seqlens, plan.starts)
        # a node's last chunk passes no state on but for a store, a node resumes from one slot
        if chunks > most.chunks or chunks + len(plan.store_nodes) > most.passed:
            return False
        host, arrays = self.host, {name: getattr(plan, name) for name in COPIED}
        arrays |= {
            "tokens": plan.tokens[: plan.num_rows],
            "positions": plan.positions[: plan.num_rows],
            "label_reads": asked.reads,
            "label_rows": asked.rows,
        }
        if any(len(array) > len(host[name]) for name, array in arrays.items()):
            return False
        for name, array in arrays.items():
            host[name][: len(array)] = array
        host["tokens"][plan.num_rows :] = 0
        host["read_rows"][len(plan.read_rows) :] = 0
        host["label_reads"][len(asked.reads) :] = -1
        write_rows(
            plan.cu_seqlens, plan.starts, plan.chain_rows, host["row_nodes"], host["row_taps"]
        )
        every = self._every[: plan.num_rows]
        tiles = self._tiles("tile_", plan, every)
        reads = self._tiles("read_tile_", plan, plan.read_rows)
        if tiles < 0 or reads < 0:
            return False
        parts = self._parts("tile_", plan, every, tiles)
        read_parts = self._parts("read_tile_", plan, plan.read_rows, reads)
        if parts < 0 or read_parts < 0:
            return False
        scans, resumed = self._chunks(plan)
        written = len(plan.write_pages)
        host["counts"][:8] = (
            chunks, tiles, reads, written, resumed, scans, parts, read_parts,
        )  # fmt: skip
        return True

    def _tiles(self, prefix: str, plan: RoundPlan, rows: Ints) -> int:
        every = rows is not plan.read_rows
        order = rows if every else np.argsort(rows, kind="stable").astype(np.int32)
        lists = (self.host[f"{prefix}{name}"] for name in ("queries", "nodes", "ends", "pages"))
        return write_tiles(
            rows, order, self.capacity.tile, self.capacity.turn,
            plan.cu_seqlens, plan.starts, plan.parents, plan.page_lists, plan.page_list_ends,
            *lists,
        )  # fmt: skip

    def _parts(self, prefix: str, plan: RoundPlan, rows: Ints, tiles: int) -> int:
        host, most = self.host, self.capacity
        if not most.split:
            return 0
        return write_parts(
            tiles, most.split, most.sums, rows, host["row_nodes"], plan.cu_seqlens, plan.starts,
            *(host[f"{prefix}{name}"] for name in ("queries", "parts", "sums")),
        )  # fmt: skip

    def _chunks(self, plan: RoundPlan) -> tuple[int, int]:
        """Writes chunks and scans: how many scans there are, and states that are resumed from."""
        host, firsts = self.host, np.empty(plan.num_nodes + 1, np.int32)
        write_chunks(
            plan.cu_seqlens, plan.starts, plan.chain_rows,
            host["chunk_rows"], host["chunk_skips"], firsts,
        )  # fmt: skip
        return write_scans(
            plan.starts, plan.initial_slots, stores_of(plan), firsts, host["chunk_slots"],
            host["chunk_sources"], host["scans"], host["resumed"],
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
