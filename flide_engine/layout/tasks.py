"""Work lists of the GPU kernels, derived from a plan: chunks of the delta rule, tiles of attention.

The kernels walk these lists with a fixed number of programs, so empty slots cost nothing and launch
shapes do not depend on the tree. Pure numpy.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from flide_engine.config import GRAIN
from flide_engine.layout.plan import NOWHERE, Ints, RoundPlan


@dataclass(frozen=True)
class ChunkTasks:
    """Chunks of 64 chain positions, node by node; C chunks, K scans, L levels.

    rows [C, 64]: stream rows of the chunk's positions; those past the node's end hold -1.
    skips [C]: how many of them belong to ancestors, their outputs are not this node's.
    slots [C]: slot the state after the chunk is stored in, or -1.
    sources [C]: number of the state before the chunk among those passed on, or -1: zeros.
    scans [K, 4]: a chain of chunks whose states are needed: its first chunk, how many, the slot it
        starts from or -1, and the number under which it passes on the state after its first chunk;
        further ones follow. A node's last chunk is part of it only if its state is stored.
    level_ends [L]: scans of level l are level_ends[l-1] .. level_ends[l].
    resumed [Q, 2]: slots of before this round that chunks begin with, and their numbers.
    passed: how many states are passed on.
    """

    rows: Ints
    skips: Ints
    slots: Ints
    sources: Ints
    scans: Ints
    level_ends: Ints
    resumed: Ints
    passed: int


def chunk_tasks(plan: RoundPlan) -> ChunkTasks:
    """The chunks of all nodes of a plan."""
    tails = plan.starts % GRAIN
    sizes = tails + np.diff(plan.cu_seqlens)
    counts = -(-sizes // GRAIN)
    ends = np.cumsum(counts, dtype=np.int32)
    total, firsts = int(ends[-1]), ends - counts
    node = np.repeat(np.arange(plan.num_nodes), counts)
    index = np.arange(total) - firsts[node]
    # offset of each column from the node's grain F, and from its first own token
    offset = GRAIN * index[:, None] + np.arange(GRAIN)[None, :]  # [C, 64]
    own = offset - tails[node][:, None]
    column = np.minimum(offset + 3, plan.chain_rows.shape[1] - 1)
    rows = np.where(
        own >= 0, plan.cu_seqlens[node][:, None] + own, plan.chain_rows[node[:, None], column]
    )
    rows[offset >= sizes[node][:, None]] = NOWHERE
    slots = np.full(total, -1, np.int32)
    at = (plan.store_positions - plan.starts[plan.store_nodes] // GRAIN * GRAIN) // GRAIN - 1
    slots[firsts[plan.store_nodes] + at] = plan.store_slots

    run = counts - (slots[ends - 1] < 0)
    numbers = np.cumsum(run) - run
    passed = int(run.sum())
    number_of = dict(zip(plan.store_slots.tolist(), (numbers[plan.store_nodes] + at).tolist()))
    resumed = []
    for slot in np.unique(plan.initial_slots).tolist():
        if slot >= 0 and slot not in number_of:
            number_of[slot] = passed + len(resumed)
            resumed.append((slot, number_of[slot]))
    starts = np.array([number_of.get(s, -1) for s in plan.initial_slots.tolist()])
    sources = np.where(index == 0, starts[node], numbers[node] + index - 1)
    needed = np.flatnonzero(run)
    scans = np.stack([firsts, run, plan.initial_slots, numbers], 1)[needed]
    return ChunkTasks(
        rows.astype(np.int32),
        np.where(index == 0, tails[node], 0).astype(np.int32),
        slots,
        sources.astype(np.int32),
        scans.astype(np.int32),
        np.searchsorted(needed, plan.level_ends).astype(np.int32),
        np.array(resumed, np.int32).reshape(-1, 2),
        passed + len(resumed),
    )


@dataclass(frozen=True)
class AttentionTiles:
    """Tiles of query rows that share their ancestors: A tiles of at most `tile` queries, those with
    most keys first.

    queries [A, tile]: indices of queries, -1 where there is none. nodes [A, 2]: first and last node
    of the queries, all with one page list and one start. last_rows [A]: stream row of the last
    query. full [A]: key tiles of the node's own, counted from its grain, that every query sees
    whole; 0 where the queries are of several nodes.
    """

    queries: Ints
    nodes: Ints
    last_rows: Ints
    full: Ints


def attention_tiles(plan: RoundPlan, rows: Ints, tile: int, programs: int = 1) -> AttentionTiles:
    """Tiles for queries at the stream rows `rows` [R], in any order.

    programs: how many programs take tiles in turn, so that none gets the longest of every turn.
    """
    if not len(rows):
        none = np.zeros(0, np.int32)
        return AttentionTiles(none.reshape(0, tile), none.reshape(0, 2), none, none)
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
    first_node, last_node = node[firsts], node[stops - 1]
    tails = plan.starts[first_node] % GRAIN
    before = rows[order[firsts]] - plan.cu_seqlens[first_node] + tails
    full = np.where(first_node == last_node, (before + 1) // GRAIN, 0)
    keys = plan.starts[last_node] + rows[order[stops - 1]] - plan.cu_seqlens[last_node]
    turn = _in_turns(keys, programs)
    return AttentionTiles(
        queries[turn].astype(np.int32),
        np.stack([first_node, last_node], 1)[turn].astype(np.int32),
        rows[order[stops - 1]][turn].astype(np.int32),
        full[turn].astype(np.int32),
    )


def _in_turns(cost: Ints, programs: int) -> Ints:
    """An order by falling cost in which every second turn of `programs` is reversed."""
    order = np.argsort(-cost, kind="stable")
    whole = len(order) // programs * programs
    turns = order[:whole].reshape(-1, programs)
    turns[1::2] = turns[1::2, ::-1]
    last = order[whole:]
    return np.concatenate([turns.ravel(), last[::-1] if len(turns) % 2 else last])
