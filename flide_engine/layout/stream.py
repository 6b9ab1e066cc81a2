"""Lays the forests of a round out as one flat stream and derives the lookups of `RoundPlan`.

Two steps, so that this stays pure: `lay_out` counts in pages and slots of the round's own (0, 1,
...); `Layout.bind` puts the pool's numbers in their place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from flide_engine.config import GRAIN
from flide_engine.layout.lookups import (
    NO_SLOT,
    Anchors,
    Stream,
    arrange,
    look_up,
    put_numbers,
    write_rows_of,
)
from flide_engine.layout.plan import Anchor, Ints, Mark, RoundPlan
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

    num_pages, num_slots: how many the round needs. arrays: the plan's fields; pages and slots of
    anchors have the pool's numbers, new ones are coded -1 - number. marks: of each job, the
    position of each mark; mark_slots, mark_pages: what they will have, one after the other, coded
    alike.
    """

    num_pages: int
    num_slots: int
    arrays: dict[str, Any]
    marks: tuple[tuple[int, ...], ...]
    mark_slots: Ints
    mark_pages: Ints

    def bind(
        self, pages: Ints, slots: Ints, places: Ints | None = None
    ) -> tuple[RoundPlan, tuple[tuple[Anchor, ...], ...]]:
        """The plan with the pool's `pages` [num_pages] and `slots` [num_slots], and each job's
        checkpoints.

        places: where the page of each number is in memory now, which is what the plan then says;
        the checkpoints keep the numbers.
        """
        listed = put_numbers(self.arrays["pages"], pages)
        plan = RoundPlan(
            **self.arrays
            | {
                "pages": listed if places is None else places[listed],
                "write_pages": pages if places is None else places[pages],
                "store_slots": slots,
                "initial_slots": put_numbers(self.arrays["initial_slots"], slots),
            }
        )
        if not len(self.mark_slots):
            return plan, tuple(() for _ in self.marks)
        bound = iter(put_numbers(self.mark_slots, slots).tolist())
        listed, at = put_numbers(self.mark_pages, pages), 0
        anchors = []
        for marks in self.marks:
            own = []
            for position in marks:
                own.append(Anchor(position, next(bound), listed[at : at + position // GRAIN]))
                at += position // GRAIN
            anchors.append(tuple(own))
        return plan, tuple(anchors)


def _at_grains(forest: Forest) -> Forest:
    """The forest, each node starting at the grain before it and carrying its ancestors' tokens
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
    return Forest.of(moved, forest.leaves.tolist())


def _joined(forests: Sequence[Forest]) -> tuple[Ints, Ints, list[int]]:
    """Parent, start, end and forest of all nodes [4, N], their tokens one after the other, and the
    first node of each forest.
    """
    offsets, nodes = [], 0
    for forest in forests:
        offsets.append(nodes)
        nodes += len(forest.starts)
    given = np.empty((4, nodes), np.int32)
    for number, (forest, low) in enumerate(zip(forests, offsets, strict=True)):
        here = given[:, low : low + len(forest.starts)]
        here[0], here[1], here[2], here[3] = forest.parents, forest.starts, forest.ends, number
        if low:
            here[0, forest.parents >= 0] += low
    if len(forests) == 1:
        return given, forests[0].tokens, offsets
    return given, np.concatenate([forest.tokens for forest in forests]), offsets


def lay_out(jobs: Sequence[Job], fork: Fork = "token") -> Layout:
    """The stream of `jobs`, nodes ordered by dependency level.

    fork: "token" starts a branch at its first own token and takes what lies between the grain and
    it through `chain_rows`; "grain" starts it at the grain and repeats those tokens. Same answers.

    Raises ValueError if a mark lies outside its node or off the grain, or if a forest does not
    start where its checkpoint ends.
    """
    forests = [_at_grains(job.forest) if fork == "grain" else job.forest for job in jobs]
    given, texts, offsets = _joined(forests)
    anchors = _anchors(jobs)
    stream = Stream(*arrange(given[0], given[1], given[2], given[3], anchors.positions))
    places, cu_seqlens = stream.places, stream.cu_seqlens
    marks = [
        (o + m.node, m.position) for o, job in zip(offsets, jobs, strict=True) for m in job.marks
    ]
    for node, position in marks:
        _check_mark(int(given[1, node]), int(given[2, node]), position)
    marked = np.array(marks, np.int32).reshape(-1, 2)
    arrays = look_up(
        stream.nodes, anchors, places[marked[:, 0]], np.ascontiguousarray(marked[:, 1])
    )._asdict()
    mark_slots, mark_pages = arrays.pop("mark_slots"), arrays.pop("mark_pages")
    leaves = [
        f.leaves + o for o, f, job in zip(offsets, forests, jobs, strict=True) if job.reads
    ] or [_NOTHING]
    rows = int(cu_seqlens[-1])
    tokens, positions = np.empty((2, rows), np.int32)
    write_rows_of(texts, stream.order, stream.nodes.starts, cu_seqlens, tokens, positions)
    arrays |= {
        "num_rows": rows,
        "cu_seqlens": cu_seqlens,
        "starts": stream.nodes.starts,
        "parents": stream.nodes.parents,
        "level_ends": stream.level_ends,
        "read_rows": cu_seqlens[places[np.concatenate(leaves)] + 1] - 1,
        "tokens": tokens,
        "positions": positions,
    }
    return Layout(
        len(arrays["write_rows"]),
        len(arrays["store_nodes"]),
        arrays,
        tuple(tuple(m.position for m in job.marks) for job in jobs),
        mark_slots,
        mark_pages,
    )


def _anchors(jobs: Sequence[Job]) -> Anchors:
    positions: list[int] = []
    slots: list[int] = []
    ends: list[int] = []
    pages = [_NOTHING]
    for job in jobs:
        positions.append(job.anchor.position if job.anchor else 0)
        slots.append(job.anchor.slot if job.anchor else NO_SLOT)
        if job.anchor:
            pages.append(job.anchor.pages)
        ends.append((ends[-1] if ends else 0) + positions[-1] // GRAIN)
    numbers = np.array([positions, slots, ends], np.int32)
    return Anchors(numbers[0], numbers[1], numbers[2], np.concatenate(pages))


_NOTHING = np.zeros(0, np.int32)


def _check_mark(start: int, end: int, position: int) -> None:
    if position % GRAIN or not start < position <= end:
        raise ValueError(f"no checkpoint at {position} in a node of positions {start} to {end}")
