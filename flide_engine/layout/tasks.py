"""Work lists of the GPU kernels, derived from a plan: chunks of the delta rule, tiles of attention.

The kernels walk these lists with a fixed number of programs, so empty slots cost nothing and launch
shapes do not depend on the tree. Pure numpy.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from flide_engine.config import GRAIN
from flide_engine.layout.plan import NOWHERE, Ints, RoundPlan

CHUNK_COLUMNS = GRAIN + 3
"""Columns of `ChunkTasks.rows`: three predecessors of the chunk, then its 64 positions."""


@dataclass(frozen=True)
class ChunkTasks:
    """Chunks of 64 chain positions, node by node; C chunks, N nodes.

    rows [C, 67]: stream rows of positions p-3 .. p+63 of a chunk that begins at p, coded as
        `RoundPlan.chain_rows`; positions past the node's end hold -1.
    lengths [C]: positions of the chunk that exist. skips [C]: how many of them belong to ancestors,
        their outputs are not this node's.
    slots [C]: slot the state after the chunk is stored in, or -1.
    node_ends [N]: chunks of node n are node_ends[n-1] .. node_ends[n].
    """

    rows: Ints
    lengths: Ints
    skips: Ints
    slots: Ints
    node_ends: Ints


def chunk_tasks(plan: RoundPlan) -> ChunkTasks:
    """The chunks of all nodes of a plan."""
    tails = plan.starts % GRAIN
    sizes = tails + np.diff(plan.cu_seqlens)
    counts = -(-sizes // GRAIN)
    ends = np.cumsum(counts, dtype=np.int32)
    total = int(ends[-1])
    node = np.repeat(np.arange(plan.num_nodes), counts)
    index = np.arange(total) - (ends - counts)[node]
    # offset of each column from the node's grain F, and from its first own token
    offset = GRAIN * index[:, None] + np.arange(-3, GRAIN)[None, :]  # [C, 67]
    own = offset - tails[node][:, None]
    column = np.clip(offset + 3, 0, plan.chain_rows.shape[1] - 1)
    rows = np.where(
        own >= 0, plan.cu_seqlens[node][:, None] + own, plan.chain_rows[node[:, None], column]
    )
    rows[offset >= sizes[node][:, None]] = NOWHERE
    slots = np.full(total, -1, np.int32)
    at = (plan.store_positions - plan.starts[plan.store_nodes] // GRAIN * GRAIN) // GRAIN - 1
    slots[(ends - counts)[plan.store_nodes] + at] = plan.store_slots
    return ChunkTasks(
        rows.astype(np.int32),
        np.minimum(sizes[node] - GRAIN * index, GRAIN).astype(np.int32),
        np.where(index == 0, tails[node], 0).astype(np.int32),
        slots,
        ends,
    )


@dataclass(frozen=True)
class AttentionTiles:
    """Tiles of query rows that share their ancestors: A tiles of at most `tile` queries.

    queries [A, tile]: indices of queries, -1 where there is none. nodes [A]: a node whose page list
    and chain rows hold for every query of the tile. first_keys, last_keys [A]: stream rows between
    which the own keys of the tile's nodes lie; a query sees those of its own node up to itself.
    """

    queries: Ints
    nodes: Ints
    first_keys: Ints
    last_keys: Ints


def attention_tiles(plan: RoundPlan, rows: Ints, tile: int) -> AttentionTiles:
    """Tiles for queries at the stream rows `rows` [R], in any order."""
    if not len(rows):
        none = np.zeros(0, np.int32)
        return AttentionTiles(none.reshape(0, tile), none, none, none)
    order = np.argsort(rows, kind="stable")
    node = np.searchsorted(plan.cu_seqlens, rows[order], side="right") - 1
    # siblings stand side by side: they share a page list and a start
    breaks = np.zeros(len(rows), bool)
    breaks[0] = True
    for of_node in (plan.page_lists, plan.starts, plan.parents):
        breaks[1:] |= np.diff(of_node[node]) != 0
    bounds = np.append(np.flatnonzero(breaks), len(rows))
    firsts = np.concatenate([np.arange(a, b, tile) for a, b in pairwise(bounds)]).astype(np.int64)
    stops = np.minimum(firsts + tile, bounds[np.searchsorted(bounds, firsts, side="right")])
    index = firsts[:, None] + np.arange(tile)[None, :]
    inside = index < stops[:, None]
    queries = np.where(inside, order[np.minimum(index, len(rows) - 1)], -1)
    return AttentionTiles(
        queries.astype(np.int32),
        node[firsts].astype(np.int32),
        plan.cu_seqlens[node[firsts]].astype(np.int32),
        rows[order[stops - 1]].astype(np.int32),
    )
