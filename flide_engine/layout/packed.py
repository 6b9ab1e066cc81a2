"""A round's plan by one compiled call, in one array: every call, and every array that Python is
handed, is a microsecond that a round waits.
"""

import numpy as np

from flide_engine.config import GRAIN
from flide_engine.layout.compiled import compiled, copy_into
from flide_engine.layout.lookups import (
    NO_SLOT,
    PAGES,
    PARENT,
    POSITION,
    SLOT,
    START,
    arrange,
    look_up,
    write_rows_of,
)
from flide_engine.layout.plan import CHAIN_COLUMNS, NOWHERE, Ints

PARTS = (
    "cu_seqlens", "starts", "parents", "level_ends", "chain_rows", "page_lists", "page_list_ends",
    "write_rows", "store_nodes", "store_positions", "store_rows", "read_rows", "tokens",
    "positions",
)  # fmt: skip
"""Arrays of a `RoundPlan` that `plan_round` packs as they are, in this order."""

SHAPES = (("chain_rows", (-1, CHAIN_COLUMNS)), ("write_rows", (-1, GRAIN)), ("store_rows", (-1, 3)))
"""Of those that are no vectors."""

BOUND = ("initial_slots", "pages")
"""Those that it packs coded, as `Lookups` says, after all others; then come those of marks."""


@compiled
def plan_round(
    jobs: Ints, parents: Ints, starts: Ints, ends: Ints, leaves: Ints, texts: Ints, pages: Ints,
    marks: Ints,
) -> tuple[Ints, Ints]:  # fmt: skip
    """PARTS, BOUND, and of each mark its slot and then its pages, one after the other; and where
    each ends.

    jobs [J, 5]: how many nodes each has, how many leaves, whether these are read, and position and
    slot (or NO_SLOT) that it resumes from. parents, starts, ends, leaves, texts: of the jobs'
    forests, one after the other, nodes numbered within each. pages: those of all anchors. marks
    [M, 3]: job, node and position. Raises ValueError as `arrange` does.
    """
    count, rows = len(starts), len(texts)
    above, of = np.empty(count, np.int32), np.empty(count, np.int32)
    firsts = np.zeros(len(jobs), np.int32)
    anchors = np.empty((3, len(jobs)), np.int32)
    n, held = 0, 0
    for j in range(len(jobs)):
        held += jobs[j, 3] // GRAIN
        anchors[POSITION, j], anchors[SLOT, j], anchors[PAGES, j] = jobs[j, 3], jobs[j, 4], held
        firsts[j] = n
        for _ in range(jobs[j, 0]):
            of[n], above[n] = j, parents[n] + firsts[j] if parents[n] >= 0 else -1
            n += 1
    nodes, cu_seqlens, level_ends, order, places = arrange(
        above, starts, ends, of, anchors[POSITION]
    )
    marked = np.empty((2, len(marks)), np.int32)
    for m in range(len(marks)):
        marked[0, m], marked[1, m] = places[firsts[marks[m, 0]] + marks[m, 1]], marks[m, 2]
    found = look_up(nodes, anchors, pages, marked[0], marked[1])
    read_rows = np.empty(len(leaves), np.int32)
    reads, leaf = 0, 0
    for j in range(len(jobs)):
        for _ in range(jobs[j, 1]):
            if jobs[j, 2]:
                read_rows[reads] = cu_seqlens[places[firsts[j] + leaves[leaf]] + 1] - 1
                reads += 1
            leaf += 1
    tokens, positions = np.empty(rows, np.int32), np.empty(rows, np.int32)
    write_rows_of(texts, order, nodes[START], cu_seqlens, tokens, positions)
    parts = (
        cu_seqlens, nodes[START], nodes[PARENT], level_ends, found.chain_rows.reshape(-1),
        found.page_lists, found.page_list_ends, found.write_rows.reshape(-1),
        found.store_nodes, found.store_positions, found.store_rows.reshape(-1),
        read_rows[:reads], tokens, positions,
        found.initial_slots, found.pages, found.mark_slots, found.mark_pages,
    )  # fmt: skip
    return _pack(parts)


@compiled
def _pack(parts: tuple[Ints, ...]) -> tuple[Ints, Ints]:
    """Arrays one after the other, and where each ends."""
    ends = np.empty(len(parts), np.int32)
    total = 0
    for i in range(len(parts)):
        total += len(parts[i])
        ends[i] = total
    flat = np.empty(total, np.int32)
    for i in range(len(parts)):
        copy_into(flat[ends[i] - len(parts[i]) :], parts[i])
    return flat, ends


@compiled
def bind_numbers(flat: Ints, ends: Ints, pages: Ints, slots: Ints, places: Ints) -> Ints:
    """What `plan_round` packed coded, with numbers of `pages` and `slots` in place of codes, and
    `pages` after it.

    places: by number of a page, what a plan calls it instead, which those of marks do not; empty:
    its number.
    """
    first, lists = ends[len(PARTS) - 1], ends[len(PARTS) + 1]
    own, marks, count = ends[len(PARTS)], ends[len(PARTS) + 2], len(flat) - first
    out = np.empty(count + len(pages), np.int32)
    for i in range(first, len(flat)):
        code = flat[i]
        if i < own or lists <= i < marks:  # slots
            number = NOWHERE if code == NO_SLOT else code if code >= 0 else slots[-1 - code]
        else:
            number = code if code >= 0 else pages[-1 - code]
            if i < lists and len(places):
                number = places[number]
        out[i - first] = number
    for i in range(len(pages)):
        out[count + i] = places[pages[i]] if len(places) else pages[i]
    return out
