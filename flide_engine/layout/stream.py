"""Lays the forests of a round out as one flat stream and derives the lookups of `RoundPlan`.

Two steps, so that this stays pure: `lay_out` counts in pages and slots of the round's own (0, 1,
...); `Layout.bind` puts the pool's numbers in their place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flide_engine.config import GRAIN
from flide_engine.layout.lookups import NO_SLOT
from flide_engine.layout.packed import PARTS, SHAPES, bind_numbers, plan_round
from flide_engine.layout.plan import Anchor, Ints, Mark, RoundPlan, joined
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

    num_pages, num_slots: how many the round needs. marks: of each job, the position of each mark.
    packed, ends: what `plan_round` gave.
    """

    num_pages: int
    num_slots: int
    marks: tuple[tuple[int, ...], ...]
    packed: Ints
    ends: Ints

    def bind(
        self, pages: Ints, slots: Ints, places: Ints | None = None
    ) -> tuple[RoundPlan, tuple[tuple[Anchor, ...], ...]]:
        """The plan with the pool's `pages` [num_pages] and `slots` [num_slots], and each job's
        checkpoints.

        places: where the page of each number is in memory now, which is what the plan then says;
        the checkpoints keep the numbers.
        """
        moved = _NOTHING if places is None else places
        bound = bind_numbers(self.packed, self.ends, pages, slots, moved)
        arrays, at = {}, 0
        ends = self.ends.tolist()
        for name, end in zip(PARTS, ends, strict=False):
            arrays[name] = self.packed[at:end]
            at = end
        for name, shape in SHAPES:
            arrays[name] = arrays[name].reshape(shape)
        nodes, lists, mark_slots, mark_pages = (end - at for end in ends[len(PARTS) :])
        plan = RoundPlan(
            num_rows=len(arrays["tokens"]),
            initial_slots=bound[:nodes],
            pages=bound[nodes:lists],
            write_pages=bound[mark_pages:],
            store_slots=slots,
            **arrays,
        )
        if mark_slots == lists:
            return plan, tuple(() for _ in self.marks)
        states, at = iter(bound[lists:mark_slots].tolist()), mark_slots
        anchors = []
        for marks in self.marks:
            own = []
            for position in marks:
                own.append(Anchor(position, next(states), bound[at : at + position // GRAIN]))
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


def lay_out(jobs: Sequence[Job], fork: Fork = "token") -> Layout:
    """The stream of `jobs`, nodes ordered by dependency level.

    fork: "token" starts a branch at its first own token and takes what lies between the grain and
    it through `chain_rows`; "grain" starts it at the grain and repeats those tokens. Same answers.

    Raises ValueError if a mark lies outside its node or off the grain, or if a forest does not
    start where its checkpoint ends.
    """
    forests = [_at_grains(job.forest) if fork == "grain" else job.forest for job in jobs]
    numbers, pages, marks = [], [], []
    for at, (job, forest) in enumerate(zip(jobs, forests, strict=True)):
        anchor, position, slot = job.anchor, 0, NO_SLOT
        if anchor is not None:
            position, slot = anchor.position, anchor.slot
            pages.append(anchor.pages)
        numbers.append((len(forest.starts), len(forest.leaves), job.reads, position, slot))
        for mark in job.marks:
            _check_mark(forest, mark)
            marks.append((at, mark.node, mark.position))
    packed, ends = plan_round(
        np.array(numbers, np.int32),
        joined([forest.parents for forest in forests]),
        joined([forest.starts for forest in forests]),
        joined([forest.ends for forest in forests]),
        joined([forest.leaves for forest in forests]),
        joined([forest.tokens for forest in forests]),
        joined(pages) if pages else _NOTHING,
        np.array(marks, np.int32) if marks else _NO_MARKS,
    )
    written, stored = PARTS.index("write_rows"), PARTS.index("store_nodes")
    return Layout(
        int(ends[written] - ends[written - 1]) // GRAIN,
        int(ends[stored] - ends[stored - 1]),
        tuple(tuple(m.position for m in job.marks) for job in jobs),
        packed,
        ends,
    )


_NOTHING = np.zeros(0, np.int32)
_NO_MARKS = np.zeros((0, 3), np.int32)


def _check_mark(forest: Forest, mark: Mark) -> None:
    start, end, position = forest.starts[mark.node], forest.ends[mark.node], mark.position
    if position % GRAIN or not start < position <= end:
        raise ValueError(f"no checkpoint at {position} in a node of positions {start} to {end}")
