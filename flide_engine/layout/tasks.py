"""Work lists of the GPU kernels, derived from a plan: chunks of the delta rule, tiles of attention.

The kernels walk these lists with a fixed number of programs, so empty slots cost nothing and launch
shapes do not depend on the tree. Written in place by compiled loops: a round waits for them, and as
array operations they took 250 us of a 2 ms round.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

from flide_engine.config import GRAIN
from flide_engine.layout.plan import NOWHERE, Ints, RoundPlan

MIN_PIECE = 8
"""Fewest chunks of a piece: shorter ones cost more launches than their overlap saves."""

F = TypeVar("F", bound=Callable[..., Any])


def _compiled(function: F) -> F:
    return cast(F, numba.njit(cache=True, nogil=True)(function))


@_compiled
def cut_pieces(cu_seqlens: Ints, starts: Ints, level_ends: Ints, stages: int) -> Ints:
    """Runs of chunks in the order in which their states follow from each other: [P, 5].

    Each: its stage, node, first chunk counted from the node's grain, number of chunks, and whether
    the node goes on. A stage needs states of earlier ones only. Nodes of level 0 are cut so that
    the chain of one stage runs while the next is prepared; one of a later level has a stage of its
    level.
    """
    spare = stages - len(level_ends) + 1
    found = np.empty((len(starts) + spare * level_ends[0], 5), np.int32)
    count = 0
    for part in range(spare):
        for n in range(level_ends[0]):
            chunks = (starts[n] % GRAIN + cu_seqlens[n + 1] - cu_seqlens[n] + GRAIN - 1) // GRAIN
            parts = min(spare, max(1, chunks // MIN_PIECE))
            low, high = chunks * part // parts, chunks * (part + 1) // parts
            if part < parts:
                found[count, 0], found[count, 1] = part, n
                found[count, 2], found[count, 3] = low, high - low
                found[count, 4] = 1 if part + 1 < parts else 0
                count += 1
    level = 0
    for n in range(level_ends[0], len(starts)):
        while n >= level_ends[level]:
            level += 1
        chunks = (starts[n] % GRAIN + cu_seqlens[n + 1] - cu_seqlens[n] + GRAIN - 1) // GRAIN
        found[count, 0], found[count, 1] = spare - 1 + level, n
        found[count, 2], found[count, 3], found[count, 4] = 0, chunks, 0
        count += 1
    return found[:count]


@_compiled
def write_chunks(
    pieces: Ints, cu_seqlens: Ints, starts: Ints, chain_rows: Ints,
    rows: Ints, skips: Ints, stage_chunks: Ints,
) -> None:  # fmt: skip
    """Chunks of 64 chain positions, piece by piece.

    rows [C, 64]: stream rows of the chunk's positions; those past the node's end hold -1.
    skips [C]: how many of them belong to ancestors, their outputs are not this node's.
    stage_chunks [S + 1]: chunks of stage s are stage_chunks[s] .. stage_chunks[s + 1].
    """
    c, stage = 0, 0
    stage_chunks[0] = 0
    for k in range(len(pieces)):
        n = pieces[k, 1]
        while stage < pieces[k, 0]:
            stage += 1
            stage_chunks[stage] = c
        tail = starts[n] % GRAIN
        low, own = cu_seqlens[n], cu_seqlens[n + 1] - cu_seqlens[n]
        for i in range(pieces[k, 2], pieces[k, 2] + pieces[k, 3]):
            skips[c] = tail if i == 0 else 0
            for j in range(GRAIN):
                place = GRAIN * i + j - tail
                if place < 0:
                    rows[c, j] = chain_rows[n, j + 3]
                else:
                    rows[c, j] = low + place if place < own else NOWHERE
            c += 1
    for at in range(stage + 1, len(stage_chunks)):
        stage_chunks[at] = c


@_compiled
def write_scans(
    pieces: Ints, starts: Ints, initial_slots: Ints, stores: Ints,
    slots: Ints, sources: Ints, scans: Ints, stage_scans: Ints, resumed: Ints,
) -> int:  # fmt: skip
    """The chains of states; returns how many slots of before this round are resumed from.

    stores [M, 3]: node, position and slot of each store. slots [C]: slot the state after a chunk is
    stored in, or -1. sources [C]: number of the state before the chunk among those passed on, or
    -1: zeros.
    scans [K, 6]: a run of chunks whose states are needed: its first chunk, how many, the slot it
    starts from or -1, the number under which it passes on the state after its first chunk (further
    ones follow), and the carries it starts from instead and ends in, or -1. A node's last chunk is
    part of it only if its state is stored.
    stage_scans [S + 1]: scans of stage s are stage_scans[s] .. stage_scans[s + 1].
    resumed [Q, 2]: slots of before this round that chunks begin with, and their numbers.
    """
    first_of = np.empty(len(pieces), np.int32)  # chunk
    carry_of = np.full(len(starts), -1, np.int32)
    c, carries = 0, 0
    for k in range(len(pieces)):
        first_of[k] = c
        slots[c : c + pieces[k, 3]] = -1
        for m in range(len(stores)):
            if stores[m, 0] == pieces[k, 1]:
                i = (stores[m, 1] - starts[pieces[k, 1]] // GRAIN * GRAIN) // GRAIN - 1
                if pieces[k, 2] <= i < pieces[k, 2] + pieces[k, 3]:
                    slots[c + i - pieces[k, 2]] = stores[m, 2]
        c += pieces[k, 3]
    passed, count, stage = 0, 0, 0
    last_of = np.full(len(starts), -1, np.int32)  # number of the state after the node's last piece
    number_of = {-1: -1}
    stage_scans[0] = 0
    for k in range(len(pieces)):
        n, first, run = pieces[k, 1], first_of[k], pieces[k, 3]
        while stage < pieces[k, 0]:
            stage += 1
            stage_scans[stage] = count
        goes_on = pieces[k, 4] == 1
        if not goes_on and slots[first + run - 1] < 0:
            run -= 1
        if goes_on and carry_of[n] < 0:
            carry_of[n] = carries
            carries += 1
        if run > 0:
            scans[count, 0], scans[count, 1] = first, run
            scans[count, 2], scans[count, 3] = initial_slots[n], passed
            scans[count, 4] = carry_of[n] if pieces[k, 2] > 0 else -1
            scans[count, 5] = carry_of[n] if goes_on else -1
            count += 1
        if pieces[k, 2] > 0:
            sources[first] = last_of[n]
        for i in range(1, pieces[k, 3]):
            sources[first + i] = passed + i - 1
        for i in range(run):
            if slots[first + i] >= 0:
                number_of[slots[first + i]] = passed + i
        passed += run
        last_of[n] = passed - 1
    for at in range(stage + 1, len(stage_scans)):
        stage_scans[at] = count
    before = 0
    for k in range(len(pieces)):
        if pieces[k, 2] == 0:
            slot = initial_slots[pieces[k, 1]]
            if slot not in number_of:
                number_of[slot] = passed + before
                resumed[before, 0], resumed[before, 1] = slot, passed + before
                before += 1
            sources[first_of[k]] = number_of[slot]
    return before


@_compiled
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


@_compiled
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
    return np.stack([plan.store_nodes, plan.store_positions, plan.store_slots], 1)
