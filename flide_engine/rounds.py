"""Pieces of requests to the jobs of one round, and where each piece's results come back.

Pieces of one tenant that start from the same place and agree on the grain after it become one
forest: what they have in common is computed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flide_engine.config import GRAIN
from flide_engine.errors import NonFiniteOutput
from flide_engine.families.base import Read
from flide_engine.layout.plan import Mark
from flide_engine.layout.stream import Job
from flide_engine.layout.tree import Forest, build_forest
from flide_engine.readout import Asked, Floats, is_finite, not_finite
from flide_engine.runner import Started
from flide_engine.work import RequestWork


@dataclass(slots=True)
class Piece:
    """One piece of a request, `index` into its replays."""

    work: RequestWork
    index: int


@dataclass(slots=True)
class Place:
    """Where a piece's results are: rows `first` .. `first + count` of the round's reads.

    job, marks: the job and the (position, place among its marks) of each checkpoint it asked for.
    """

    first: int
    count: int
    job: int
    marks: tuple[tuple[int, int], ...]


@dataclass
class Round:
    """Work whose round is under way, and where its results will be.

    ended: when it was seen to be over, if that was before it was collected.
    """

    works: list[RequestWork]
    pieces: list[Piece]
    places: list[Place]
    started: Started
    tokens: int
    began: float
    ended: float | None = None

    def hand_out(self, logits: Floats, hidden: Floats | None) -> dict[RequestWork, NonFiniteOutput]:
        """Gives each work its values; the faults of those that have some which are not finite."""
        bad: dict[RequestWork, dict[str, None]] = {}  # what they are about, in order
        every, finite = self.started.asked.values(logits, hidden), is_finite(logits, hidden)
        for piece, place in zip(self.pieces, self.places, strict=True):
            work = piece.work
            indices = work.reads(piece.index)
            values = every[place.first : place.first + len(indices)]
            if not finite:
                names = not_finite([work.rendered.reads[i] for i in indices], values)
                bad.setdefault(work, {}).update(dict.fromkeys(names))
            work.values.update(zip(indices, values, strict=True))
        return {work: NonFiniteOutput(*names) for work, names in bad.items() if names}


def build_round(pieces: Sequence[Piece]) -> tuple[list[Job], list[Place], Asked]:
    """The jobs of a round, each piece's place, and what is read of all."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, piece in enumerate(pieces):
        groups.setdefault(_group(i, piece) if len(pieces) > 1 else (), []).append(i)
    jobs: list[Job] = []
    places: dict[int, Place] = {}
    reads: list[Read] = []
    first = 0
    for members in groups.values():
        together = [pieces[i] for i in members]
        job, made, first = _job(len(jobs), together, first)
        jobs.append(job)
        places.update(zip(members, made, strict=True))
        for piece in together:
            asked = piece.work.rendered.reads
            reads += [asked[i] for i in piece.work.reads(piece.index)]
    return jobs, [places[i] for i in range(len(pieces))], Asked.of(reads)


def _group(i: int, piece: Piece) -> tuple[object, ...]:
    """What pieces must have in common to share a forest; a piece that cannot share is alone."""
    work, replay = piece.work, piece.work.replays[piece.index]
    text = work.rendered.prompts[replay.prompts[0]]
    if replay.stop is not None or len(text) <= replay.start + GRAIN:
        return (i,)
    anchor = work.anchor(piece.index)
    opening = text[replay.start : replay.start + GRAIN].tobytes()
    return (work.tenant, anchor.slot if anchor else -1, replay.start, opening)


def _job(number: int, pieces: list[Piece], first: int) -> tuple[Job, list[Place], int]:
    """One forest of several pieces, each piece's place, and the number of reads so far."""
    head = pieces[0]
    replay = head.work.replays[head.index]
    anchor = head.work.anchor(head.index)
    if replay.stop is not None:
        text = head.work.rendered.prompts[replay.prompts[0]]
        forest = build_forest([text[: replay.stop]], replay.start)
        wanted = [*_wanted(head, replay.stop - 1), replay.stop]
        marks = tuple(Mark(0, position) for position in wanted)
        place = Place(first, 0, number, tuple((p, i) for i, p in enumerate(wanted)))
        return Job(forest, anchor, marks, reads=False), [place], first
    if len(pieces) == 1 and replay.forest is not None:
        forest = replay.forest
    else:
        texts = [
            p.work.rendered.prompts[i] for p in pieces for i in p.work.replays[p.index].prompts
        ]
        forest = build_forest(texts, replay.start)
    marks_of: dict[Mark, int] = {}
    places: list[Place] = []
    leaf = 0
    for piece in pieces:
        count = len(piece.work.replays[piece.index].prompts)
        own = []
        for position in _wanted(piece, piece.work.rendered.state_tokens):
            mark = Mark(_node_at(forest, forest.leaves[leaf], position), position)
            own.append((position, marks_of.setdefault(mark, len(marks_of))))
        places.append(Place(first, count, number, tuple(own)))
        first += count
        leaf += count
    return Job(forest, anchor, tuple(marks_of)), places, first


def _wanted(piece: Piece, last: int) -> list[int]:
    """Marks of the piece's request that lie in what the piece computes of the state."""
    work, replay = piece.work, piece.work.replays[piece.index]
    if replay.prompts[0] >= work.rendered.state_prompts:
        return []
    return [p for p in work.marks if replay.start < p <= last]


def _node_at(forest: Forest, leaf: int, position: int) -> int:
    """The node on a leaf's path that computes the token before `position`."""
    return next(n for n in forest.path(leaf) if forest.starts[n] < position <= forest.ends[n])
