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
from flide_engine.layout.plan import RoundPlan
from flide_engine.layout.tasks import AttentionTiles, attention_tiles, chunk_tasks

Ints = NDArray[np.int32]


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
    levels: int
    passed: int
    turn: int = 1

    @classmethod
    def of(cls, rows: int, tile: int, history: int, turn: int = 1, levels: int = 2) -> "Capacity":
        """Of a bucket: room for many short branches, and for `history` grains of pages."""
        nodes = rows // 12 + 72
        return cls(
            rows=rows,
            nodes=nodes,
            chunks=rows // 64 + 2 * nodes,
            tiles=rows // tile + nodes,
            tile=tile,
            reads=nodes,
            pages=rows // 64 + nodes + history,
            writes=rows // 64 + nodes,
            levels=levels,
            passed=rows // 64 + 2 * nodes,
            turn=turn,
        )

    @classmethod
    def exactly(cls, plan: RoundPlan, tile: int, turn: int = 1) -> "Capacity":
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
            levels=len(plan.level_ends),
            passed=len(plan.tokens) // 64 + 2 * n,
            turn=turn,
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each array in the buffer, in order."""
        a, n, r = self.tiles, self.nodes, self.reads
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
            "counts": (8,),
            "level_scans": (self.levels + 1,),
            "row_nodes": (self.rows,),
            "chunk_rows": (self.chunks, 64),
            "chunk_skips": (self.chunks,),
            "chunk_slots": (self.chunks,),
            "chunk_sources": (self.chunks,),
            "scans": (n, 4),
            "resumed": (n, 2),
            "tile_queries": (a, self.tile),
            "tile_nodes": (a, 2),
            "tile_ends": (a, 2),
            "tile_pages": (a, 2),
            "read_tile_queries": (r, self.tile),
            "read_tile_nodes": (r, 2),
            "read_tile_ends": (r, 2),
            "read_tile_pages": (r, 2),
        }


class Tables:
    """The buffer of one bucket on the host and on a device, and the views of both."""

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        self.capacity = capacity
        shapes = capacity.shapes()
        sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
        total = sum(-(-size // 4) * 4 for size in sizes.values())
        pinned = device.type == "cuda"
        self._host = torch.zeros(total, dtype=torch.int32, pin_memory=pinned)
        self._device = torch.zeros(total, dtype=torch.int32, device=device)
        self.host: dict[str, Ints] = {}
        views: dict[str, Tensor] = {}
        at = 0
        for name, shape in shapes.items():
            size = sizes[name]
            self.host[name] = self._host[at : at + size].view(shape).numpy()
            views[name] = self._device[at : at + size].view(shape)
            at += -(-size // 4) * 4  # every array begins on 16 bytes
        self.stream = _stream(views, capacity.passed)

    def fill(self, plan: RoundPlan) -> bool:
        """Writes a plan and its work lists on the host. False if the bucket is too small for it."""
        levels = len(plan.level_ends)
        if plan.num_rows > self.capacity.rows or levels > self.capacity.levels:
            return False
        chunks = chunk_tasks(plan)
        every = np.arange(plan.num_rows, dtype=np.int32)
        tile, turn = self.capacity.tile, self.capacity.turn
        tiles = attention_tiles(plan, every, tile, turn)
        reads = attention_tiles(plan, plan.read_rows, tile, turn)
        lengths = np.diff(plan.cu_seqlens)
        counts = (
            len(chunks.rows), len(tiles.nodes), len(reads.nodes), len(plan.write_pages),
            len(chunks.resumed),
        )  # fmt: skip
        arrays: dict[str, Ints] = {
            name: getattr(plan, name)
            for name in (
                "cu_seqlens", "starts", "initial_slots", "chain_rows", "pages", "write_pages",
                "write_rows", "read_rows",
            )
        }  # fmt: skip
        arrays |= {
            "tokens": plan.tokens[: plan.num_rows],
            "positions": plan.positions[: plan.num_rows],
            "counts": np.array(counts, np.int32),
            "row_nodes": np.repeat(np.arange(plan.num_nodes, dtype=np.int32), lengths),
            "chunk_rows": chunks.rows,
            "chunk_skips": chunks.skips,
            "chunk_slots": chunks.slots,
            "chunk_sources": chunks.sources,
            "scans": chunks.scans,
            "resumed": chunks.resumed,
            **_tiles("tile_", plan, tiles),
            **_tiles("read_tile_", plan, reads),
        }
        if any(len(array) > len(self.host[name]) for name, array in arrays.items()):
            return False
        if chunks.passed > self.capacity.passed:
            return False
        for name, array in arrays.items():
            self.host[name][: len(array)] = array
        for name, array in (("tokens", plan.tokens), ("read_rows", plan.read_rows)):
            self.host[name][min(len(array), plan.num_rows) :] = 0
        self.host["row_nodes"][plan.num_rows :] = -1
        self.host["level_scans"][:] = len(chunks.scans)
        self.host["level_scans"][0] = 0
        self.host["level_scans"][1 : 1 + levels] = chunks.level_ends
        return True

    def upload(self) -> None:
        """One copy of the whole buffer, asynchronous on the current stream."""
        self._device.copy_(self._host, non_blocking=True)


def _stream(views: dict[str, Tensor], passed: int) -> StreamTensors:
    lists = {n: views[n] for n in StreamTasks.__dataclass_fields__ if n != "passed_states"}
    tasks = StreamTasks(**lists, passed_states=passed)
    nothing = views["counts"][:0]
    plan = {
        name: views.get(name, nothing)
        for name in StreamTensors.__dataclass_fields__
        if name not in {"level_ends", "tasks"}
    }
    return StreamTensors(level_ends=(), tasks=tasks, **plan)


def _tiles(prefix: str, plan: RoundPlan, tiles: AttentionTiles) -> dict[str, Ints]:
    """A tile list's arrays by their names in the buffer."""
    lists = plan.page_lists[tiles.nodes[:, 0]]
    ends = plan.page_list_ends[lists]
    begins = np.where(lists > 0, plan.page_list_ends[lists - 1], 0)
    return {
        f"{prefix}queries": tiles.queries,
        f"{prefix}nodes": tiles.nodes,
        f"{prefix}ends": np.stack([tiles.last_rows, tiles.full], 1),
        f"{prefix}pages": np.stack([begins, ends - begins], 1).astype(np.int32),
    }
