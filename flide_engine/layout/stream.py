"""Lays the forests of a round out as one flat stream and derives the lookups of `RoundPlan`.

Two steps, so that this stays pure: `lay_out` counts in pages and slots of the round's own (0, 1,
...); `Layout.bind` puts the pool's numbers in their place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from flide_engine.config import GRAIN
from flide_engine.layout.plan import (
    CHAIN_COLUMNS,
    NOWHERE,
    Anchor,
    Ints,
    Mark,
    RoundPlan,
    conv_slot_row,
)
from flide_engine.layout.tree import Forest, Node

Fork = Literal["token", "grain"]


@dataclass(frozen=True)
class Job:
    """One forest of a round, the checkpoint it resumes from, and the checkpoints to take of it.

    reads: whether the last token of every prompt is read.
    """

    forest: Forest
    anchor: Anchor | None = None
    marks: tuple[Mark, ...] = ()
    reads: bool = True


@dataclass(frozen=True)
class Layout:
    """A plan whose new pages and slots still have the round's own numbers.

    num_pages, num_slots: how many the round needs. plan: pages and slots of anchors have the pool's
    numbers, new ones are coded -1 - number. marks: for each job, for each mark, the (slot, pages)
    it will have, coded alike.
    """

    plan: RoundPlan
    num_pages: int
    num_slots: int
    marks: tuple[tuple[tuple[int, Ints], ...], ...]

    def bind(self, pages: Ints, slots: Ints) -> tuple[RoundPlan, tuple[tuple[Anchor, ...], ...]]:
        """The plan with the pool's `pages` [num_pages] and `slots` [num_slots], and each job's
        checkpoints.
        """

        def put(coded: Ints, ids: Ints) -> Ints:
            bound = coded.copy()
            new = coded < 0
            bound[new] = ids[-1 - coded[new]]
            return bound

        p = self.plan
        has_slot = p.initial_slots != _NO_SLOT
        initial = np.where(has_slot, p.initial_slots, -1).astype(np.int32)
        if not self.num_pages and not self.num_slots:
            return replace(p, initial_slots=initial), tuple(() for _ in self.marks)
        initial[has_slot] = put(p.initial_slots[has_slot], slots)
        plan = replace(
            p,
            pages=put(p.pages, pages),
            write_pages=put(p.write_pages, pages),
            store_slots=put(p.store_slots, slots),
            initial_slots=initial,
        )
        positions = iter(self._mark_positions)
        anchors = tuple(
            tuple(
                Anchor(
                    next(positions),
                    int(put(np.array([slot], np.int32), slots)[0]),
                    put(listed, pages),
                )
                for slot, listed in marks
            )
            for marks in self.marks
        )
        return plan, anchors

    @property
    def _mark_positions(self) -> list[int]:
        return [len(listed) * GRAIN for marks in self.marks for _, listed in marks]


_NO_SLOT = np.iinfo(np.int32).max


class _Chains:
    """Where each chain position of each node lies; nodes of all jobs, numbered in stream order."""

    def __init__(self, nodes: list[Node], anchors: list[Anchor | None], rows: Ints) -> None:
        self.nodes, self.anchors, self.rows = nodes, anchors, rows
        self.page_ids: dict[tuple[int, int], int] = {}
        self.slot_ids: dict[tuple[int, int], int] = {}

    def owner(self, node: int, position: int) -> int:
        """The deepest of the node and its ancestors that holds `position`; -1 if none does."""
        while node >= 0 and not self.nodes[node].start <= position < self.nodes[node].end:
            node = self.nodes[node].parent
        return node

    def locate(self, node: int, first: int, stop: int, anchor: Anchor | None) -> Ints:
        """Stream rows, convolution slot rows or NOWHERE of chain positions first .. stop-1, as
        int32.
        """
        out = np.full(stop - first, NOWHERE, np.int32)
        missing = np.ones(stop - first, bool)
        while node >= 0 and missing.any():
            at = self.nodes[node]
            lo, hi = max(first, at.start), min(stop, at.end)
            if lo < hi:
                span = slice(lo - first, hi - first)
                rows = np.arange(lo - at.start, hi - at.start, dtype=np.int32) + self.rows[node]
                out[span] = np.where(missing[span], rows, out[span])
                missing[span] = False
            node = at.parent
        if anchor is not None:
            for i in np.flatnonzero(missing):
                back = anchor.position - (first + int(i))
                if 1 <= back <= 3:
                    out[i] = conv_slot_row(anchor.slot, 3 - back)
        return out

    def slot_at(self, node: int, position: int) -> int:
        """Code of the slot of the state after `position` tokens, seen from `node` (which may store
        it).
        """
        anchor = self.anchors[node]
        if position == (anchor.position if anchor else 0):
            return anchor.slot if anchor else _NO_SLOT
        owner = self.owner(node, position - 1)
        return -1 - self.slot_ids.setdefault((owner, position), len(self.slot_ids))

    def pages_to(self, node: int, position: int) -> Ints:
        """Codes of the pages of positions 0 .. position-1, seen from `node`."""
        anchor = self.anchors[node]
        done = anchor.position // GRAIN if anchor else 0
        new = [
            -1
            - self.page_ids.setdefault(
                (self.owner(node, GRAIN * g + GRAIN - 1), g), len(self.page_ids)
            )
            for g in range(done, position // GRAIN)
        ]
        held = anchor.pages if anchor else np.zeros(0, np.int32)
        pages: Ints = np.concatenate([held, np.array(new, np.int32)]).astype(np.int32)
        return pages


def _at_grains(forest: Forest) -> list[Node]:
    """The forest's nodes, each starting at the grain before it and carrying its ancestors' tokens
    since.
    """
    moved: list[Node] = []
    for i, node in enumerate(forest.nodes):
        first = node.start // GRAIN * GRAIN
        if node.parent < 0:
            moved.append(node)
            continue
        chain = np.concatenate([forest.nodes[j].tokens for j in forest.path(i)])
        origin = forest.nodes[forest.path(i)[0]].start
        moved.append(Node(node.parent, first, chain[first - origin :]))
    return moved


def _levels(nodes: list[Node], bases: list[int]) -> list[int]:
    """Dependency level of each node: how many state stores lie between it and what the round
    started from.

    bases: position of each node's checkpoint, 0 where there is none.
    """
    levels: list[int] = []
    for i, node in enumerate(nodes):
        fork = node.start // GRAIN * GRAIN
        owner = i
        if fork > bases[i]:
            while not nodes[owner].start < fork <= nodes[owner].end:
                owner = nodes[owner].parent
        levels.append(levels[owner] + 1 if owner != i else 0)
    return levels


def lay_out(jobs: Sequence[Job], fork: Fork = "token", bucket: int | None = None) -> Layout:
    """The stream of `jobs`, nodes ordered by dependency level, padded to `bucket` rows.

    fork: "token" starts a branch at its first own token and takes what lies between the grain and
    it through `chain_rows`; "grain" starts it at the grain and repeats those tokens. Same answers.

    Raises ValueError if a mark lies outside its node or off the grain, or the bucket is too small.
    """
    nodes: list[Node] = []
    anchors: list[Anchor | None] = []
    offsets: list[int] = []
    for job in jobs:
        offsets.append(len(nodes))
        own = _at_grains(job.forest) if fork == "grain" else job.forest.nodes
        nodes += own if not nodes else [_moved(n, n.parent + offsets[-1]) for n in own]
        anchors += [job.anchor] * len(own)
    levels = _levels(nodes, [a.position if a else 0 for a in anchors])
    order = sorted(range(len(nodes)), key=lambda i: levels[i])
    place = list(order)
    for new, old in enumerate(order):
        place[old] = new
    if order != list(range(len(order))):
        nodes = [_moved(nodes[i], place[nodes[i].parent]) for i in order]
        anchors = [anchors[i] for i in order]
    cu_seqlens = np.zeros(len(nodes) + 1, np.int32)
    np.cumsum([len(n.tokens) for n in nodes], out=cu_seqlens[1:])
    chains = _Chains(nodes, anchors, cu_seqlens[:-1])

    marks = tuple(
        tuple(_mark(chains, place[offset + m.node], m.position) for m in job.marks)
        for offset, job in zip(offsets, jobs, strict=True)
    )
    lookups = _node_lookups(chains)
    reads = [
        cu_seqlens[place[offset + leaf] + 1] - 1
        for offset, job in zip(offsets, jobs, strict=True)
        if job.reads
        for leaf in job.forest.leaves
    ]
    plan = RoundPlan(
        num_rows=int(cu_seqlens[-1]),
        cu_seqlens=cu_seqlens,
        starts=np.array([n.start for n in nodes], np.int32),
        parents=np.array([n.parent for n in nodes], np.int32),
        level_ends=np.cumsum(np.bincount(levels), dtype=np.int32),
        read_rows=np.array(reads, np.int32),
        **lookups,
        **_writes_and_stores(chains),
        **_rows(nodes, cu_seqlens, bucket),
    )
    return Layout(plan, len(chains.page_ids), len(chains.slot_ids), marks)


def _moved(node: Node, parent: int) -> Node:
    """A node whose parent, if it has one, has another number."""
    return Node(parent if node.parent >= 0 else -1, node.start, node.tokens)


def _mark(chains: _Chains, node: int, position: int) -> tuple[int, Ints]:
    at = chains.nodes[node]
    if position % GRAIN or not at.start < position <= at.end:
        raise ValueError(
            f"no checkpoint at {position} in a node of positions {at.start} to {at.end}"
        )
    return chains.slot_at(node, position), chains.pages_to(node, position)


def _node_lookups(chains: _Chains) -> dict[str, Ints]:
    """`initial_slots`, `chain_rows` and the page lists; what they need is noted in `chains`."""
    count = len(chains.nodes)
    initial = np.zeros(count, np.int32)
    chain_rows = np.full((count, CHAIN_COLUMNS), NOWHERE, np.int32)
    page_lists = np.zeros(count, np.int32)
    lists: dict[tuple[int, int, int], int] = {}
    pages: list[Ints] = []
    first: dict[tuple[int, int, int], int] = {}
    for i, node in enumerate(chains.nodes):
        anchor = chains.anchors[i]
        # siblings have all of this in common
        key = (node.parent, node.start, id(anchor))
        if (twin := first.setdefault(key, i)) != i:
            initial[i], page_lists[i] = initial[twin], page_lists[twin]
            chain_rows[i] = chain_rows[twin]
            continue
        fork = node.start // GRAIN * GRAIN
        initial[i] = chains.slot_at(i, fork)
        before = chains.locate(node.parent, fork - 3, node.start, anchor)
        chain_rows[i, : node.start - fork + 3] = before
        at = (node.parent, fork, id(anchor))
        if at not in lists:
            lists[at] = len(pages)
            pages.append(chains.pages_to(i, fork))
        page_lists[i] = lists[at]
    ends = np.cumsum([len(p) for p in pages], dtype=np.int32)
    return {
        "initial_slots": initial,
        "chain_rows": chain_rows,
        "page_lists": page_lists,
        "page_list_ends": ends,
        "pages": np.concatenate(pages).astype(np.int32),
    }


def _writes_and_stores(chains: _Chains) -> dict[str, Ints]:
    """The pages and states that the lookups asked for."""
    if not chains.page_ids and not chains.slot_ids:
        return _NO_WRITES
    written = np.array(list(chains.page_ids), np.int64).reshape(-1, 2)  # node, grain
    starts = np.array([n.start for n in chains.nodes], np.int64)[written[:, 0]]
    inside = chains.rows[written[:, 0]] + GRAIN * written[:, 1] - starts
    write_rows = (inside[:, None] + np.arange(GRAIN)).astype(np.int32)
    for i in np.flatnonzero(starts > GRAIN * written[:, 1]):  # grains that begin in an ancestor
        node, grain = (int(n) for n in written[i])
        write_rows[i] = chains.locate(
            node, GRAIN * grain, GRAIN * (grain + 1), chains.anchors[node]
        )
    store_rows = [
        chains.locate(node, position - 3, position, chains.anchors[node])
        for node, position in chains.slot_ids
    ]
    stores = np.array(list(chains.slot_ids), np.int32).reshape(-1, 2)
    return {
        "write_pages": -1 - np.arange(len(write_rows), dtype=np.int32),
        "write_rows": write_rows,
        "store_nodes": np.ascontiguousarray(stores[:, 0]),
        "store_positions": np.ascontiguousarray(stores[:, 1]),
        "store_slots": -1 - np.arange(len(store_rows), dtype=np.int32),
        "store_rows": np.array(store_rows, np.int32).reshape(-1, 3),
    }


_NO_WRITES = {
    "write_pages": np.zeros(0, np.int32),
    "write_rows": np.zeros((0, GRAIN), np.int32),
    "store_nodes": np.zeros(0, np.int32),
    "store_positions": np.zeros(0, np.int32),
    "store_slots": np.zeros(0, np.int32),
    "store_rows": np.zeros((0, 3), np.int32),
}


def _rows(nodes: list[Node], cu_seqlens: Ints, bucket: int | None) -> dict[str, Ints]:
    total = int(cu_seqlens[-1])
    if bucket is not None and bucket < total:
        raise ValueError(f"{total} rows do not fit a bucket of {bucket}")
    tokens, positions = np.zeros((2, bucket or total), np.int32)
    np.concatenate([n.tokens for n in nodes], out=tokens[:total])
    offsets = np.array([n.start for n in nodes], np.int32) - cu_seqlens[:-1]
    positions[:total] = np.arange(total, dtype=np.int32) + np.repeat(offsets, np.diff(cu_seqlens))
    return {"tokens": tokens, "positions": positions}
