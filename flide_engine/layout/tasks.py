"""Work lists of the GPU kernels, derived from a plan: chunks of the delta rule, tiles of attention.

The kernels walk these lists with a fixed number of programs, so empty slots cost nothing and launch
shapes do not depend on the tree. Written in place by compiled loops: a round waits for them, and as
array operations they took 250 us of a 2 ms round. `copy_plan`, `write_states` and `write_queries`
are what a bucket calls; each does much, as a call costs as much as most of these loops.
"""

import numpy as np

from flide_engine.config import GRAIN
from flide_engine.layout.compiled import compiled, copy_into
from flide_engine.layout.plan import NOWHERE, Ints


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
def _node_of(row: int, node: int, cu_seqlens: Ints) -> int:
    """The node of a row, which is this one or a later one's."""
    while row >= cu_seqlens[node + 1]:
        node += 1
    return node


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
    count, node, i = 0, 0, 0
    while i < total:
        node = _node_of(rows[order[i]], node, cu_seqlens)
        begins[count], first[count] = i, node
        stop = min(i + tile, total)
        while rows[order[stop - 1]] >= cu_seqlens[node + 1]:  # not all are this node's
            while rows[order[i]] < cu_seqlens[node + 1]:
                i += 1
            other = _node_of(rows[order[i]], node, cu_seqlens)
            if not (
                page_lists[other] == page_lists[node]
                and starts[other] == starts[node]
                and parents[other] == parents[node]
            ):
                stop = i
                break
            node = other
        i = stop
        cost[count] = starts[node] + rows[order[i - 1]] - cu_seqlens[node]
        count += 1
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
        copy_into(queries[place], order[low:high])
        queries[place, high - low :] = -1
        head, last = first[t], rows[order[high - 1]]
        tail_node = _node_of(last, head, cu_seqlens)
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
def write_row_taps(
    cu_seqlens: Ints, starts: Ints, chain_rows: Ints, row_nodes: Ints, row_taps: Ints
) -> None:
    """Node of each row, -1 for padding; and the three positions before each row's [T, 3], coded as
    `RoundPlan.chain_rows`, nowhere for padding.
    """
    for n in range(len(starts)):
        low, tail = cu_seqlens[n], starts[n] % GRAIN
        row_nodes[low : cu_seqlens[n + 1]] = n
        taps = row_taps[low : cu_seqlens[n + 1]]
        for i in range(min(3, len(taps))):
            for tap in range(3):
                back = 3 - i - tap  # how far before the node
                taps[i, tap] = low - back if back <= 0 else chain_rows[n, tail + 3 - back]
        for i in range(3, len(taps)):
            taps[i, 0], taps[i, 1], taps[i, 2] = low + i - 3, low + i - 2, low + i - 1
    row_nodes[cu_seqlens[-1] :] = -1
    row_taps[cu_seqlens[-1] :] = NOWHERE


@compiled
def copy_plan(
    cu_seqlens: Ints, starts: Ints, initial_slots: Ints, chain_rows: Ints, pages: Ints,
    write_pages: Ints, write_rows: Ints, read_rows: Ints, tokens: Ints, positions: Ints,
    label_reads: Ints, label_rows: Ints, to_cu_seqlens: Ints, to_starts: Ints,
    to_initial_slots: Ints, to_chain_rows: Ints, to_pages: Ints, to_write_pages: Ints,
    to_write_rows: Ints, to_read_rows: Ints, to_tokens: Ints, to_positions: Ints,
    to_label_reads: Ints, to_label_rows: Ints, counts: Ints,
) -> bool:  # fmt: skip
    """Copies a plan and what is asked to where there is room, or returns False. Rows of padding
    hold token 0, reads of padding row 0, and products of padding read -1. counts: see
    `StreamTasks`.
    """
    nodes, rows, reads, labels = len(starts), cu_seqlens[-1], len(read_rows), len(label_reads)
    listed, written = len(pages), len(write_pages)
    if nodes > len(to_starts) or rows > len(to_tokens) or labels > len(to_label_reads):
        return False
    if reads > len(to_read_rows) or listed > len(to_pages) or written > len(to_write_pages):
        return False
    copy_into(to_cu_seqlens, cu_seqlens)
    copy_into(to_starts, starts)
    copy_into(to_initial_slots, initial_slots)
    copy_into(to_chain_rows.reshape(-1), chain_rows.reshape(-1))
    copy_into(to_pages, pages)
    copy_into(to_write_pages, write_pages)
    copy_into(to_write_rows.reshape(-1), write_rows.reshape(-1))
    copy_into(to_read_rows, read_rows)
    to_read_rows[reads:] = 0
    copy_into(to_tokens, tokens[:rows])
    to_tokens[rows:] = 0
    copy_into(to_positions, positions[:rows])
    copy_into(to_label_reads, label_reads)
    to_label_reads[labels:] = -1
    copy_into(to_label_rows, label_rows)
    counts[3] = written
    return True


@compiled
def write_states(
    most_passed: int, cu_seqlens: Ints, starts: Ints, initial_slots: Ints, chain_rows: Ints,
    store_nodes: Ints, store_positions: Ints, store_slots: Ints,
    chunk_rows: Ints, chunk_skips: Ints, chunk_slots: Ints, chunk_sources: Ints,
    scans: Ints, resumed: Ints, counts: Ints,
) -> bool:  # fmt: skip
    """What becomes of states: `write_chunks` and `write_scans`, and how many there are of each.
    False if there is no room for them.

    most_passed: room for states that the scans pass on. counts: see `StreamTasks`.
    """
    chunks = count_chunks(cu_seqlens, starts)
    # a node's last chunk passes no state on but for a store, a node resumes from one slot
    if chunks > len(chunk_rows) or chunks + len(store_nodes) > most_passed:
        return False
    firsts = np.empty(len(starts) + 1, np.int32)
    write_chunks(cu_seqlens, starts, chain_rows, chunk_rows, chunk_skips, firsts)
    stores = np.empty((len(store_nodes), 3), np.int32)
    for m in range(len(stores)):
        stores[m, 0], stores[m, 1] = store_nodes[m], store_positions[m]
        stores[m, 2] = store_slots[m]
    runs, begun = write_scans(
        starts, initial_slots, stores, firsts, chunk_slots, chunk_sources, scans, resumed
    )
    counts[0], counts[4], counts[5] = chunks, begun, runs
    return True


@compiled
def _ascending(rows: Ints) -> Ints:
    """The order that sorts rows, found by insertion: they come sorted but for few, if any."""
    order = np.empty(len(rows), np.int32)
    for i in range(len(rows)):
        j = i
        while j > 0 and rows[order[j - 1]] > rows[i]:
            order[j] = order[j - 1]
            j -= 1
        order[j] = i
    return order


@compiled
def write_queries(
    tile: int, turn: int, split: int, most_sums: int, cu_seqlens: Ints, starts: Ints,
    parents: Ints, chain_rows: Ints, page_lists: Ints, page_list_ends: Ints, read_rows: Ints,
    row_nodes: Ints, row_taps: Ints,
    queries: Ints, nodes: Ints, ends: Ints, pages: Ints, parts: Ints, sums: Ints,
    read_queries: Ints, read_nodes: Ints, read_ends: Ints, read_pages: Ints, read_parts: Ints,
    read_sums: Ints, counts: Ints,
) -> bool:  # fmt: skip
    """What rows look at: `write_row_taps`, and for all rows and for those read `write_tiles`, and
    `write_parts` where keys are split. False if there is no room for them. counts: see
    `StreamTasks`.
    """
    write_row_taps(cu_seqlens, starts, chain_rows, row_nodes, row_taps)
    every = np.empty(cu_seqlens[-1], np.int32)
    for i in range(len(every)):
        every[i] = i
    order = _ascending(read_rows)
    all_tiles = write_tiles(
        every, every, tile, turn, cu_seqlens, starts, parents, page_lists, page_list_ends,
        queries, nodes, ends, pages,
    )  # fmt: skip
    read_tiles = write_tiles(
        read_rows, order, tile, turn, cu_seqlens, starts, parents, page_lists, page_list_ends,
        read_queries, read_nodes, read_ends, read_pages,
    )  # fmt: skip
    if all_tiles < 0 or read_tiles < 0:
        return False
    counts[1], counts[2] = all_tiles, read_tiles
    counts[6], counts[7] = 0, 0
    if split > 0:
        counts[6] = write_parts(
            all_tiles, split, most_sums, every, row_nodes, cu_seqlens, starts, queries, parts, sums
        )
        counts[7] = write_parts(
            read_tiles, split, most_sums, read_rows, row_nodes, cu_seqlens, starts,
            read_queries, read_parts, read_sums,
        )  # fmt: skip
    return bool(counts[6] >= 0 and counts[7] >= 0)
