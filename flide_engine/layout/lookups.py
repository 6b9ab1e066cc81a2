"""The lookups of a plan, in compiled loops over the nodes of a round: a round waits for them.

Nodes are numbered in stream order. Pages and slots that the round makes are coded -1 - number, in
the order in which they are first needed; those of anchors have the pool's numbers.
"""

from typing import NamedTuple

import numpy as np

from flide_engine.config import GRAIN
from flide_engine.layout.compiled import compiled, copy_into
from flide_engine.layout.plan import CHAIN_COLUMNS, NOWHERE, Ints

NO_SLOT = np.iinfo(np.int32).max
"""Code of the state before the first token: zeros."""


PARENT, START, END, ROW, JOB, GRAINS = range(6)
"""Rows of a round's nodes [6, N], parents first: parent or -1, chain positions, first stream row,
job, and grains that end in the nodes before it. One array: a compiled function counts references to
each array that it is handed, which for several costs more than most of these do."""

POSITION, SLOT, PAGES = range(3)
"""Rows of anchors [3, J], what each job resumes from: position (0: nothing), slot (or NO_SLOT), and
where its pages end among those of all anchors."""

PAGE, STATE = range(2)
"""What is asked for, found [2, G + 1, 3]: found[kind, g, 0] is the number of the page of grain g of
all nodes, or of the state at its end, -1 if nobody asked; found[kind, -1, 0] counts them; and by
number, found[kind, i, 1:] are the node and the position of the end."""


@compiled
def arrange(
    parents: Ints, starts: Ints, ends: Ints, jobs: Ints, positions: Ints
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Nodes in stream order, by dependency level: by how many state stores lie between a node and
    what the round started from. positions [J]: of the jobs' anchors.

    Also cu_seqlens [N + 1]: rows of node n are cu_seqlens[n] .. cu_seqlens[n + 1]; level_ends [L]:
    nodes of level l are level_ends[l - 1] .. level_ends[l]; order [N]: former number of each node;
    places [N]: new number of each former one. Raises ValueError if a root does not start at its
    job's position.
    """
    count = len(starts)
    given = np.empty((6, count), np.int32)
    levels = np.zeros(count, np.int32)
    sizes = np.zeros(count, np.int32)
    for i in range(count):
        given[PARENT, i], given[START, i], given[END, i] = parents[i], starts[i], ends[i]
        if parents[i] < 0 and starts[i] != positions[jobs[i]]:  # loops index by what lies between
            raise ValueError("a forest does not start where its checkpoint ends")
        fork = starts[i] // GRAIN * GRAIN
        if fork > positions[jobs[i]]:
            owner = _holder(given, i, fork - 1)
            if owner != i:
                levels[i] = levels[owner] + 1
        sizes[levels[i]] += 1
    level_ends = np.cumsum(sizes[: levels.max() + 1]).astype(np.int32)
    order, places = np.empty(count, np.int32), np.empty(count, np.int32)
    free = level_ends - sizes[: len(level_ends)]
    for i in range(count):
        places[i] = free[levels[i]]
        order[places[i]] = i
        free[levels[i]] += 1
    nodes = np.empty((6, count), np.int32)
    cu_seqlens = np.zeros(count + 1, np.int32)
    grains = 0
    for n in range(count):
        i = order[n]
        nodes[PARENT, n] = places[parents[i]] if parents[i] >= 0 else -1
        nodes[START, n], nodes[END, n], nodes[JOB, n] = starts[i], ends[i], jobs[i]
        nodes[ROW, n], nodes[GRAINS, n] = cu_seqlens[n], grains
        grains += ends[i] // GRAIN - starts[i] // GRAIN
        cu_seqlens[n + 1] = cu_seqlens[n] + ends[i] - starts[i]
    return nodes, cu_seqlens, level_ends, order, places


@compiled
def _holder(nodes: Ints, node: int, position: int) -> int:
    """The deepest of the node and its ancestors that holds a position; -1 if none does."""
    while node >= 0 and not nodes[START, node] <= position < nodes[END, node]:
        node = nodes[PARENT, node]
    return node


@compiled
def _locate(nodes: Ints, anchors: Ints, node: int, first: int, out: Ints) -> None:
    """Stream rows, convolution slot rows or NOWHERE of chain positions first, first + 1, ..."""
    job, holder, i = nodes[JOB, node], node, len(out) - 1
    while i >= 0:
        holder = _holder(nodes, holder, first + i)
        if holder < 0:
            break
        row = nodes[ROW, holder] - nodes[START, holder] + first
        low = max(0, nodes[START, holder] - first)
        own = out[low : i + 1]
        for j in range(len(own)):  # from 0 on, so that it is done for several at once
            own[j] = row + low + j
        i = low - 1
    for j in range(i + 1):
        back = anchors[POSITION, job] - first - j
        held = first + j >= 0 and 1 <= back <= 3
        out[j] = -2 - (3 * anchors[SLOT, job] + 3 - back) if held else NOWHERE


@compiled
def _number(nodes: Ints, found: Ints, kind: int, node: int, position: int) -> int:
    """Number of the page whose grain ends at `position`, or of the state there, of which the round
    computes the token before, seen from `node`.
    """
    owner = _holder(nodes, node, position - 1)
    at = nodes[GRAINS, owner] + position // GRAIN - 1 - nodes[START, owner] // GRAIN
    if found[kind, at, 0] < 0:
        number = found[kind, at, 0] = found[kind, -1, 0]
        found[kind, -1, 0] += 1
        found[kind, number, 1], found[kind, number, 2] = owner, position
    return int(found[kind, at, 0])


@compiled
def _slot(nodes: Ints, anchors: Ints, found: Ints, node: int, position: int) -> int:
    """Code of the slot of the state after `position` tokens, seen from `node`, which may store
    it.
    """
    job = nodes[JOB, node]
    if position == anchors[POSITION, job]:
        return int(anchors[SLOT, job])
    return -1 - _number(nodes, found, STATE, node, position)


@compiled
def _list_pages(
    nodes: Ints, anchors: Ints, held: Ints, found: Ints, node: int, position: int, out: Ints
) -> None:
    """Codes of the pages of positions 0 .. position - 1, seen from `node`. held: the anchors'."""
    job = nodes[JOB, node]
    done = min(anchors[POSITION, job], position) // GRAIN
    begin = anchors[PAGES, job] - anchors[POSITION, job] // GRAIN
    copy_into(out, held[begin : begin + done])
    for grain in range(done, position // GRAIN):
        out[grain] = -1 - _number(nodes, found, PAGE, node, GRAIN * grain + GRAIN)


class Lookups(NamedTuple):
    """Arrays of `RoundPlan` by name, coded, and of each mark: slot, and its pages one after the
    other.
    """

    initial_slots: Ints
    chain_rows: Ints
    page_lists: Ints
    page_list_ends: Ints
    pages: Ints
    write_rows: Ints
    store_nodes: Ints
    store_positions: Ints
    store_rows: Ints
    mark_slots: Ints
    mark_pages: Ints


@compiled
def look_up(
    nodes: Ints, anchors: Ints, held: Ints, mark_nodes: Ints, mark_positions: Ints
) -> Lookups:
    """All lookups of a round, and the pages and states that they and the marks ask for. held: pages
    of all anchors.
    """
    count = nodes.shape[1]
    grains = nodes[GRAINS, -1] + nodes[END, -1] // GRAIN - nodes[START, -1] // GRAIN
    found = np.empty((2, grains + 1, 3), np.int32)
    for kind in range(2):
        for i in range(grains):
            found[kind, i, 0] = -1
        found[kind, grains, 0] = 0
    mark_slots = np.empty(len(mark_nodes), np.int32)
    mark_pages = np.empty(mark_positions.sum() // GRAIN, np.int32)
    low = 0
    for m in range(len(mark_nodes)):
        node, position = mark_nodes[m], mark_positions[m]
        mark_slots[m] = _slot(nodes, anchors, found, node, position)
        high = low + position // GRAIN
        _list_pages(nodes, anchors, held, found, node, position, mark_pages[low:high])
        low = high
    page_lists, list_nodes, page_list_ends = _page_lists(nodes, anchors.shape[1])
    pages = np.empty(page_list_ends[-1], np.int32)
    low = 0
    for k in range(len(list_nodes)):
        node, high = list_nodes[k], page_list_ends[k]
        fork = nodes[START, node] // GRAIN * GRAIN
        _list_pages(nodes, anchors, held, found, node, fork, pages[low:high])
        low = high
    initial_slots = np.empty(count, np.int32)
    chain_rows = np.full((count, CHAIN_COLUMNS), NOWHERE, np.int32)
    for n in range(count):
        fork = nodes[START, n] // GRAIN * GRAIN
        initial_slots[n] = _slot(nodes, anchors, found, n, fork)
        before = nodes[START, n] - fork + 3
        _locate(nodes, anchors, n, fork - 3, chain_rows[n, :before])
    write_rows = np.empty((found[PAGE, -1, 0], GRAIN), np.int32)
    for i in range(len(write_rows)):
        node, end = found[PAGE, i, 1], found[PAGE, i, 2]
        _locate(nodes, anchors, node, end - GRAIN, write_rows[i])
    stores = found[STATE, : found[STATE, -1, 0]]
    store_rows = np.empty((len(stores), 3), np.int32)
    for i in range(len(stores)):
        _locate(nodes, anchors, stores[i, 1], stores[i, 2] - 3, store_rows[i])
    return Lookups(
        initial_slots, chain_rows, page_lists, page_list_ends, pages, write_rows,
        stores[:, 1].copy(), stores[:, 2].copy(), store_rows, mark_slots, mark_pages,
    )  # fmt: skip


@compiled
def _page_lists(nodes: Ints, jobs: int) -> tuple[Ints, Ints, Ints]:
    """Page list of each node, a node of each list, and where each list ends; nodes with one parent,
    and roots of one job, have a list in common.
    """
    count = nodes.shape[1]
    of_parent = np.full(count + jobs, -1, np.int32)
    page_lists = np.empty(count, np.int32)
    list_nodes = np.empty(count, np.int32)
    ends = np.empty(count, np.int32)
    lists, total = 0, 0
    for n in range(count):
        parent = nodes[PARENT, n] if nodes[PARENT, n] >= 0 else count + nodes[JOB, n]
        if of_parent[parent] < 0:
            of_parent[parent] = lists
            list_nodes[lists] = n
            total += nodes[START, n] // GRAIN
            ends[lists] = total
            lists += 1
        page_lists[n] = of_parent[parent]
    return page_lists, list_nodes[:lists], ends[:lists]


@compiled
def write_rows_of(
    texts: Ints, order: Ints, starts: Ints, cu_seqlens: Ints, tokens: Ints, positions: Ints
) -> None:
    """Token and chain position of each row. texts: tokens of all nodes, in their former order."""
    firsts = np.empty(len(order), np.int32)
    for n in range(len(order)):
        firsts[order[n]] = cu_seqlens[n + 1] - cu_seqlens[n]
    at = 0
    for i in range(len(order)):
        size, firsts[i] = firsts[i], at
        at += size
    for n in range(len(order)):
        low, high, first = cu_seqlens[n], cu_seqlens[n + 1], firsts[order[n]]
        copy_into(tokens[low:high], texts[first : first + high - low])
        here = positions[low:high]
        for i in range(len(here)):
            here[i] = starts[n] + i
