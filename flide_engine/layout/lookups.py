"""The lookups of a plan, in compiled loops over the nodes of a round: a round waits for them.

Nodes are numbered in stream order. Pages and slots that the round makes are coded -1 - number, in
the order in which they are first needed; those of anchors have the pool's numbers.
"""

from typing import NamedTuple

import numpy as np

from flide_engine.config import GRAIN
from flide_engine.layout.compiled import compiled
from flide_engine.layout.plan import CHAIN_COLUMNS, NOWHERE, Ints

NO_SLOT = np.iinfo(np.int32).max
"""Code of the state before the first token: zeros."""


class Nodes(NamedTuple):
    """A round's nodes, parents first: parent or -1, chain positions, first stream row, job."""

    parents: Ints
    starts: Ints
    ends: Ints
    rows: Ints
    jobs: Ints


class Anchors(NamedTuple):
    """What each job resumes from: position (0: nothing), slot (or NO_SLOT), and its pages, which
    are pages[page_ends[j - 1] : page_ends[j]].
    """

    positions: Ints
    slots: Ints
    page_ends: Ints
    pages: Ints


class Stream(NamedTuple):
    """Nodes in stream order, and how they came there.

    cu_seqlens [N + 1]: rows of node n are cu_seqlens[n] .. cu_seqlens[n + 1]. level_ends [L]: nodes
    of level l are level_ends[l - 1] .. level_ends[l]. order [N]: former number of each node; places
    [N]: new number of each former one.
    """

    nodes: Nodes
    cu_seqlens: Ints
    level_ends: Ints
    order: Ints
    places: Ints


@compiled
def arrange(
    parents: Ints, starts: Ints, ends: Ints, jobs: Ints, positions: Ints
) -> tuple[Nodes, Ints, Ints, Ints, Ints]:
    """Nodes by dependency level: by how many state stores lie between a node and what the round
    started from. positions [J]: of the jobs' anchors. Returns the fields of a `Stream`. Raises
    ValueError if a root does not start at its job's.
    """
    count = len(starts)
    given = Nodes(parents, starts, ends, starts, jobs)
    levels = np.zeros(count, np.int32)
    sizes = np.zeros(count, np.int32)
    for i in range(count):
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
    moved = np.empty(count, np.int32)
    cu_seqlens = np.zeros(count + 1, np.int32)
    for n in range(count):
        i = order[n]
        moved[n] = places[parents[i]] if parents[i] >= 0 else -1
        cu_seqlens[n + 1] = cu_seqlens[n] + ends[i] - starts[i]
    nodes = Nodes(moved, starts[order], ends[order], cu_seqlens[:-1].copy(), jobs[order])
    return nodes, cu_seqlens, level_ends, order, places


@compiled
def _holder(nodes: Nodes, node: int, position: int) -> int:
    """The deepest of the node and its ancestors that holds a position; -1 if none does."""
    while node >= 0 and not nodes.starts[node] <= position < nodes.ends[node]:
        node = int(nodes.parents[node])
    return node


@compiled
def _locate(nodes: Nodes, anchors: Anchors, node: int, first: int, out: Ints) -> None:
    """Stream rows, convolution slot rows or NOWHERE of chain positions first, first + 1, ..."""
    job, holder, i = nodes.jobs[node], node, len(out) - 1
    while i >= 0:
        holder = _holder(nodes, holder, first + i)
        if holder < 0:
            break
        row = nodes.rows[holder] - nodes.starts[holder] + first
        low = max(0, nodes.starts[holder] - first)
        for j in range(low, i + 1):
            out[j] = row + j
        i = low - 1
    for j in range(i + 1):
        back = anchors.positions[job] - first - j
        held = first + j >= 0 and 1 <= back <= 3
        out[j] = -2 - (3 * anchors.slots[job] + 3 - back) if held else NOWHERE


class _Found(NamedTuple):
    """What has been asked for: for each grain of each node the number of the page and of the slot
    at its end, -1 if nobody did; how many of each; and by number, the node and the position of
    the end. bases [N]: place of a node's first grain.
    """

    bases: Ints
    pages: Ints
    slots: Ints
    counts: Ints
    page_places: Ints
    slot_places: Ints


@compiled
def _nothing_found(nodes: Nodes) -> _Found:
    bases = np.zeros(len(nodes.starts), np.int32)
    total = 0
    for n in range(len(bases)):
        bases[n] = total
        total += nodes.ends[n] // GRAIN - nodes.starts[n] // GRAIN
    return _Found(
        bases,
        np.full(total, -1, np.int32),
        np.full(total, -1, np.int32),
        np.zeros(2, np.int32),
        np.empty((total, 2), np.int32),
        np.empty((total, 2), np.int32),
    )


@compiled
def _page(nodes: Nodes, found: _Found, node: int, grain: int) -> int:
    """Code of the page of a grain that the round computes, seen from `node`."""
    owner = _holder(nodes, node, GRAIN * grain + GRAIN - 1)
    at = found.bases[owner] + grain - nodes.starts[owner] // GRAIN
    if found.pages[at] < 0:
        number = found.pages[at] = found.counts[0]
        found.counts[0] += 1
        found.page_places[number, 0], found.page_places[number, 1] = owner, GRAIN * grain + GRAIN
    return -1 - int(found.pages[at])


@compiled
def _slot(nodes: Nodes, anchors: Anchors, found: _Found, node: int, position: int) -> int:
    """Code of the slot of the state after `position` tokens, seen from `node`, which may store
    it.
    """
    job = nodes.jobs[node]
    if position == anchors.positions[job]:
        return int(anchors.slots[job])
    owner = _holder(nodes, node, position - 1)
    at = found.bases[owner] + position // GRAIN - 1 - nodes.starts[owner] // GRAIN
    if found.slots[at] < 0:
        number = found.slots[at] = found.counts[1]
        found.counts[1] += 1
        found.slot_places[number, 0], found.slot_places[number, 1] = owner, position
    return -1 - int(found.slots[at])


@compiled
def _list_pages(
    nodes: Nodes, anchors: Anchors, found: _Found, node: int, position: int, out: Ints
) -> None:
    """Codes of the pages of positions 0 .. position - 1, seen from `node`."""
    job = nodes.jobs[node]
    done = min(anchors.positions[job], position) // GRAIN
    begin = anchors.page_ends[job] - anchors.positions[job] // GRAIN
    out[:done] = anchors.pages[begin : begin + done]
    for grain in range(done, position // GRAIN):
        out[grain] = _page(nodes, found, node, grain)


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
def look_up(nodes: Nodes, anchors: Anchors, mark_nodes: Ints, mark_positions: Ints) -> Lookups:
    """All lookups of a round, and the pages and states that they and the marks ask for."""
    found, count = _nothing_found(nodes), len(nodes.starts)
    mark_slots = np.empty(len(mark_nodes), np.int32)
    mark_pages = np.empty(mark_positions.sum() // GRAIN, np.int32)
    at = 0
    for m in range(len(mark_nodes)):
        node, position = mark_nodes[m], mark_positions[m]
        mark_slots[m] = _slot(nodes, anchors, found, node, position)
        _list_pages(nodes, anchors, found, node, position, mark_pages[at : at + position // GRAIN])
        at += position // GRAIN
    page_lists, list_nodes, page_list_ends = _page_lists(nodes, len(anchors.positions))
    pages = np.empty(page_list_ends[-1], np.int32)
    low = 0
    for k in range(len(list_nodes)):
        node = list_nodes[k]
        fork = nodes.starts[node] // GRAIN * GRAIN
        _list_pages(nodes, anchors, found, node, fork, pages[low : page_list_ends[k]])
        low = page_list_ends[k]
    initial_slots = np.empty(count, np.int32)
    chain_rows = np.full((count, CHAIN_COLUMNS), NOWHERE, np.int32)
    for n in range(count):
        fork = nodes.starts[n] // GRAIN * GRAIN
        initial_slots[n] = _slot(nodes, anchors, found, n, fork)
        before = nodes.starts[n] - fork + 3
        _locate(nodes, anchors, n, fork - 3, chain_rows[n, :before])
    write_rows = np.empty((found.counts[0], GRAIN), np.int32)
    for i in range(len(write_rows)):
        _locate(
            nodes, anchors, found.page_places[i, 0], found.page_places[i, 1] - GRAIN, write_rows[i]
        )
    stores = found.slot_places[: found.counts[1]]
    store_rows = np.empty((len(stores), 3), np.int32)
    for i in range(len(stores)):
        _locate(nodes, anchors, stores[i, 0], stores[i, 1] - 3, store_rows[i])
    return Lookups(
        initial_slots, chain_rows, page_lists, page_list_ends, pages, write_rows,
        stores[:, 0].copy(), stores[:, 1].copy(), store_rows, mark_slots, mark_pages,
    )  # fmt: skip


@compiled
def _page_lists(nodes: Nodes, jobs: int) -> tuple[Ints, Ints, Ints]:
    """Page list of each node, a node of each list, and where each list ends; nodes with one parent,
    and roots of one job, have a list in common.
    """
    count = len(nodes.starts)
    of_parent = np.full(count + jobs, -1, np.int32)
    page_lists = np.empty(count, np.int32)
    list_nodes = np.empty(count, np.int32)
    ends = np.empty(count, np.int32)
    lists, total = 0, 0
    for n in range(count):
        parent = nodes.parents[n] if nodes.parents[n] >= 0 else count + nodes.jobs[n]
        if of_parent[parent] < 0:
            of_parent[parent] = lists
            list_nodes[lists] = n
            total += nodes.starts[n] // GRAIN
            ends[lists] = total
            lists += 1
        page_lists[n] = of_parent[parent]
    return page_lists, list_nodes[:lists].copy(), ends[:lists].copy()


@compiled
def put_numbers(coded: Ints, numbers: Ints) -> Ints:
    """What is coded -1 - i becomes numbers[i]; NO_SLOT becomes -1."""
    out = coded.copy()
    for i in range(len(out)):
        if out[i] == NO_SLOT:
            out[i] = -1
        elif out[i] < 0:
            out[i] = numbers[-1 - out[i]]
    return out


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
        low, first = cu_seqlens[n], firsts[order[n]]
        for i in range(cu_seqlens[n + 1] - low):
            tokens[low + i] = texts[first + i]
            positions[low + i] = starts[n] + i
