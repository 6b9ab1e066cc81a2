"""Work lists of the GPU kernels, derived from a plan: chunks of the delta rule, tiles of attention.

The kernels walk these lists with a fixed number of programs, so empty slots cost nothing and launch
shapes do not depend on the tree. Written in place by compiled loops: a round waits for them, and as
array operations they took 250 us of a 2 ms round.
"""

import numpy as np

from flide_engine.config import GRAIN
from flide_engine.layout.compiled import compiled
from flide_engine.layout.plan import NOWHERE, Ints, RoundPlan


@compiled
def count_chunks(cu_seqlens: Ints, starts: Ints) -> int:
    """Chunks of 64 chain positions of all nodes."""
    total = 0
    for n in range(len(starts)):
        total += (starts[n] % GRAIN + cu_seqlens[n + 1] - cu_seqlens[n] + GRAIN - 1) // GRAIN
    return total


@compiled
def write_chunks(
    cu_seqlens: Ints, starts: Ints, chain_rows: Ints, rows: Ints, skips: Ints, firsts: Ints
) -> None:
    """Chunks of 64 chain positions, node by node.

    rows [C, 64]: stream rows of the chunk's positions; those past the node's end hold -1.
    skips [C]: how many of them belong to ancestors, their outputs are not this node's.
    firsts [N + 1]: first chunk of each node, then their number.
    """
    c = 0
    for n in range(len(starts)):
        firsts[n] = c
        tail = starts[n] % GRAIN
        low, own = cu_seqlens[n], cu_seqlens[n + 1] - cu_seqlens[n]
        for at in range(0, tail + own, GRAIN):
            skips[c] = tail if at == 0 else 0
            for j in range(GRAIN):
                place = at + j - tail
                if place < 0:
                    rows[c, j] = chain_rows[n, j + 3]
                else:
                    rows[c, j] = low + place if place < own else NOWHERE
            c += 1
    firsts[len(starts)] = c


@compiled
def write_scans(
    starts: Ints, initial_slots: Ints, stores: Ints, firsts: Ints,
    slots: Ints, sources: Ints, scans: Ints, resumed: Ints,
) -> tuple[int, int]:  # fmt: skip
    """The chains of states; returns how many there are, and how many slots of before this round
    are resumed from.

    stores [M, 3]: node, position and slot of each store. slots [C]: slot the state after a chunk is
    stored in, or -1. sources [C]: number of the state before the chunk among those passed on, or
    -1: zeros.
    scans [K, 6]: a run of chunks whose states are needed: its first chunk, how many, the slot it
    starts from or -1, and the number under which it passes on the state after its first chunk;
    further ones follow. A node's last chunk is part of it only if its state is stored. Then the
    scan before it that stores that slot, or -1, and the how manieth of its stores that is.
    resumed [Q, 2]: slots of before this round that chunks begin with, and their numbers.
    """
    slots[: firsts[-1]] = -1
    for m in range(len(stores)):
        n = stores[m, 0]
        slots[firsts[n] + (stores[m, 1] - starts[n] // GRAIN * GRAIN) // GRAIN - 1] = stores[m, 2]
    passed, count = 0, 0
    number_of = {-1: -1}
    stored_by = {-1: (-1, 0)}
    for n in range(len(starts)):
        first, chunks = firsts[n], firsts[n + 1] - firsts[n]
        run = chunks if slots[first + chunks - 1] >= 0 else chunks - 1
        if run > 0:
            scans[count, 0], scans[count, 1] = first, run
            scans[count, 2], scans[count, 3] = initial_slots[n], passed
            scans[count, 4], scans[count, 5] = stored_by.get(initial_slots[n], (-1, 0))
            count += 1
        for i in range(1, chunks):
            sources[first + i] = passed + i - 1
        stored = 0
        for i in range(run):
            if slots[first + i] >= 0:
                stored += 1
                number_of[slots[first + i]] = passed + i
                stored_by[slots[first + i]] = (count - 1, stored)
        passed += run
    resumes = 0
    for n in range(len(starts)):
        slot = initial_slots[n]
        if slot not in number_of:
            number_of[slot] = passed + resumes
            resumed[resumes, 0], resumed[resumes, 1] = slot, passed + resumes
            resumes += 1
        sources[firsts[n]] = number_of[slot]
    return count, resumes


@compiled
def write_tiles(
    rows: Ints, order: Ints, tile: int, turn: int, cu_seqlens: Ints, starts: Ints, parents: Ints,
    page_lists: Ints, page_list_ends: Ints,
    queries: Ints, nodes: Ints, ends: Ints, pages: Ints,
) -> int:  # fmt: skip
    """Tiles of query rows that share their ancestors, those with most keys first: how many, or -1
    if there is no room for them.

    rows [R]: stream rows of the queries, order [R]: which sorts them. turn: how many tiles are
    taken at once, so that none gets the longest of every turn.
    queries [A, tile]: indices of queries, -1 where there is none. nodes [A, 2]: first and last node
    of the queries, all with one page list and one start. ends [A, 2]: stream row of the last query;
    and steps of 64 keys of the node's own, counted from its grain, that every query sees whole: 0
    where the queries are of several nodes. pages [A, 2]: first entry and number of the pages.
    """
    total = len(rows)
    begins = np.empty(total + 1, np.int32)
    first = np.empty(total, np.int32)
    cost = np.empty(total, np.int32)
    count, node, size = 0, 0, tile
    for i in range(total):
        row = rows[order[i]]
        before = node
        while row >= cu_seqlens[node + 1]:
            node += 1
        same = i > 0 and (
            page_lists[node] == page_lists[before]
            and starts[node] == starts[before]
            and parents[node] == parents[before]
        )
        if size == tile or not same:
            begins[count], first[count], size = i, node, 0
            count += 1
        size += 1
        cost[count - 1] = starts[node] + row - cu_seqlens[node]
    begins[count] = total
    if count > len(queries):
        return -1
    falling = np.argsort(-cost[:count])
    for a in range(count):
        place = a
        around = a // turn * turn
        if a // turn % 2 == 1 and around + turn <= count:
            place = around + turn - 1 - (a - around)
        t = falling[a]
        low, high = begins[t], begins[t + 1]
        for j in range(tile):
            queries[place, j] = order[low + j] if low + j < high else -1
        head, last = first[t], rows[order[high - 1]]
        tail_node = head
        while last >= cu_seqlens[tail_node + 1]:
            tail_node += 1
        nodes[place, 0], nodes[place, 1] = head, tail_node
        seen = rows[order[low]] - cu_seqlens[head] + starts[head] % GRAIN + 1
        ends[place, 0], ends[place, 1] = last, seen // GRAIN if head == tail_node else 0
        pages[place, 0] = page_list_ends[page_lists[head] - 1] if page_lists[head] > 0 else 0
        pages[place, 1] = page_list_ends[page_lists[head]] - pages[place, 0]
    return count


@compiled
def write_parts(
    count: int, split: int, most: int, rows: Ints, row_nodes: Ints, cu_seqlens: Ints, starts: Ints,
    queries: Ints, parts: Ints, sums: Ints,
) -> int:  # fmt: skip
    """Cuts tiles at every `split` grains of the prompt, so that few of them with many keys are work
    for many programs: how many parts there are, or -1 if there is no room for them.

    count, queries [A, tile]: `write_tiles`' own, of rows [R]; row_nodes [T]: `write_rows`'.
    parts [I, 2]: tile, and which part of it; those before it of the same tile come earlier.
    sums [A, 2]: how many parts a tile has, and where what they add up to is kept, below `most`; -1
    where there is but one.
    """
    kept, total, longest = 0, 0, 0
    for a in range(count):
        deepest = 0
        for j in range(queries.shape[1]):
            if queries[a, j] >= 0:
                row = rows[queries[a, j]]
                n = row_nodes[row]
                deepest = max(deepest, starts[n] + row - cu_seqlens[n])
        here = deepest // (GRAIN * split) + 1
        sums[a, 0], sums[a, 1] = here, kept if here > 1 else -1
        kept += here > 1
        total += here
        longest = max(longest, here)
    if kept > most or total > len(parts):
        return -1
    i = 0
    for part in range(longest):
        for a in range(count):
            if part < sums[a, 0]:
                parts[i, 0], parts[i, 1] = a, part
                i += 1
    return total


@compiled
def write_rows(
    cu_seqlens: Ints, starts: Ints, chain_rows: Ints, row_nodes: Ints, row_taps: Ints
) -> None:
    """Node of each row, -1 for padding; and the three positions before each row's [T, 3], coded as
    `RoundPlan.chain_rows`, nowhere for padding.
    """
    for n in range(len(starts)):
        low, tail = cu_seqlens[n], starts[n] % GRAIN
        for row in range(low, cu_seqlens[n + 1]):
            row_nodes[row] = n
            for tap in range(3):
                place = row - low + tap - 3
                row_taps[row, tap] = low + place if place >= 0 else chain_rows[n, tail + 3 + place]
    row_nodes[cu_seqlens[-1] :] = -1
    row_taps[cu_seqlens[-1] :] = NOWHERE


def stores_of(plan: RoundPlan) -> Ints:
    """[M, 3]: node, position and slot of each store of a plan."""
    stores = np.empty((len(plan.store_nodes), 3), np.int32)
    stores[:, 0], stores[:, 1] = plan.store_nodes, plan.store_positions
    stores[:, 2] = plan.store_slots
    return stores
