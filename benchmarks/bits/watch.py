"""An engine that is watched: what is asked of it is compared, bit by bit, with each prompt alone.

Requests are token ids that go through the engine's queue, scheduler, checkpoints and tiers like any
other; what is compared are the raw float32 logits of the labels.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.bits.first_difference import Difference, Floats, Tokens, first_difference, same_bits
from benchmarks.requests import TokenRequest
from flide_engine import Engine
from flide_engine.cache.index import grain_keys
from flide_engine.config import GRAIN
from flide_engine.errors import RoundTooLarge
from flide_engine.families.base import Read, Rendered
from flide_engine.layout.stream import Job
from flide_engine.loop import Round
from flide_engine.readout import Asked
from flide_engine.runner import Started
from flide_engine.work import RequestWork

PATIENCE_S = 600
LOOKED_INTO = 20
"""Differences of which the layer is looked for: it costs two forward passes each."""

LEVELS = 3
"""Nodes on a path of a tree that counts as deep: a state, a group of questions, a question."""

MOST_KEPT = 4096
"""Prompts whose logits alone are remembered."""


@dataclass(frozen=True)
class Told:
    """A request as it is asked. name: of its state. paths: what is known of how it is served."""

    request: TokenRequest
    name: str
    paths: tuple[str, ...] = ()


class Watched:
    """One engine, its comparisons, and by which paths the compared answers came.

    by_path: comparisons; wrong: differing ones; a question counts under each path that it took.
    compared: questions; resumed: those that began from a checkpoint; differing: what differs.
    """

    def __init__(self, engine: Engine, labels: Tokens) -> None:
        """labels: head rows of every question."""
        self.by_path: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self.compared = self.resumed = 0
        self.differing: list[Difference] = []
        self.labels = labels
        self._expected: dict[bytes, Floats] = {}
        self.attach(engine)

    def attach(self, engine: Engine) -> None:
        """Goes on with another engine: what was asked before must come out alike."""
        self.engine, self._loop = engine, engine._loop
        self._runner, self._full = engine._loop._runner, engine._loop._round_tokens
        self._jobs: dict[int, Sequence[Job]] = {}
        self._paths: dict[int, set[str]] = {}
        self._where: dict[tuple[int, int], str] = {}
        self._fault: Exception | None = None
        for owner, name, around in (
            (self._runner, "start", self._start),
            (self._loop, "_begin", self._begin),
            (self._loop, "_collect", self._collect),
            (engine._checkpoints, "_bring_back", self._bring_back),
        ):
            setattr(owner, name, _around(getattr(owner, name), around))

    def alone(self, prompts: Sequence[Tokens]) -> list[Floats]:
        """The logits of isolated prompts: each a request of one question, in a round of its own,
        that leaves and finds nothing. Computed once each.
        """
        missing = {p.tobytes(): p for p in prompts if p.tobytes() not in self._expected}
        works = [self._work(Told(TokenRequest(0, (p,)), "")) for p in missing.values()]
        for work in works:
            work.alone = True
            self._loop.add(work)
        for key, work in zip(missing, works, strict=True):
            self._expected[key] = work.future.result(PATIENCE_S)[0]
        return [self._expected[p.tobytes()] for p in prompts]

    def ask(
        self,
        told: Sequence[Told],
        limit: int | None = None,
        fault: Exception | None = None,
        cancelled: int | None = None,
    ) -> None:
        """Asks requests together and compares every answer.

        limit: longest piece, in tokens; longer work takes several replays. fault: what the next
        round raises. cancelled: which of them is given up as its round begins; not compared.
        """
        if len(self._expected) > MOST_KEPT:
            self._expected.clear()
        for each in told:
            self.alone(each.request.prompts)
        works = self._works(told)

        def enter() -> None:  # between two rounds, so that they wait together
            self._loop._round_tokens = limit or self._full
            self._fault = fault
            self._paths = {id(work): set(t.paths) for work, t in zip(works, told, strict=True)}
            for work in works:
                self._loop.add(work)
            if cancelled is not None:
                works[cancelled].future.cancel()

        self._loop.call(enter)
        for work in works:
            if not work.future.cancelled():
                self._compare(work, work.future.result(PATIENCE_S))
        self._loop.call(self._leave)

    def values(self, told: Sequence[Told]) -> list[list[Floats]]:
        """The logits of requests by question, compared with nothing."""
        works = self._works(told)
        for work in works:
            self._loop.add(work)
        return [work.future.result(PATIENCE_S) for work in works]

    def _works(self, told: Sequence[Told]) -> list[RequestWork]:
        """Work of requests, with what only files have of their states."""
        works = [self._work(each) for each in told]
        for work in works:
            work.loaded = self.engine._fetch(work)
        return works

    def _leave(self) -> None:
        self._loop._round_tokens, self._fault = self._full, None
        self._paths.clear()
        self._where.clear()
        self._jobs.clear()

    def _work(self, told: Told) -> RequestWork:
        prompts, state = told.request.prompts, told.request.state
        reads = tuple(Read(i, self.labels, str(i)) for i in range(len(prompts)))
        tokens = state + sum(len(p) - state for p in prompts)
        longest = max(map(len, prompts))
        rendered = Rendered(prompts, reads, tokens, longest, len(prompts), state, None)
        future: Future[Any] = Future()
        keys = grain_keys(prompts[0][:state])
        work = RequestWork(rendered, future, None, None, "", told.name, keys)
        work.raw = True
        return work

    def _compare(self, work: RequestWork, values: Sequence[Floats]) -> None:
        paths = self._paths[id(work)]
        if work.is_long:
            paths.add("several replays")
        if max(map(len, work.rendered.prompts)) > self._full:
            paths.add("longer than a round")
        if work.reused:
            self.resumed += len(values)
            if not paths & {"from host memory", "from disk"}:
                paths.add("from the device")
        else:
            paths -= {"handed over", "after a restart", "rolled back or branched"}
        for index, (prompt, got) in enumerate(zip(work.rendered.prompts, values, strict=True)):
            self.compared += 1
            self.by_path.update(paths)
            want = self._expected[prompt.tobytes()]
            if not same_bits(got, want):
                self.wrong.update(paths)
                largest, where = float(np.abs(got - want).max()), self._where.get((id(work), index))
                found = Difference(len(prompt), largest, tuple(sorted(paths)), where or "")
                self.differing.append(found)

    def _start(self, start: Callable[..., Started], jobs: Sequence[Job], asked: Asked) -> Started:
        started = start(jobs, asked)
        self._jobs[id(started)] = jobs
        return started

    def _begin(self, begin: Callable[..., Round | None], works: list[RequestWork]) -> Round | None:
        fault = self._fault
        mine = all(id(work) in self._paths for work in works)
        if fault is None or not mine or (len(works) == 1 and not _can_be_cut(fault, works[0])):
            return begin(works)
        self._fault = None
        name = "halved" if isinstance(fault, RoundTooLarge) else "alone after an error"
        for work in works:
            self._paths[id(work)].add(name if len(works) > 1 else "cut finer")
        start = self._runner.start

        def fail(jobs: Sequence[Job], asked: Asked) -> Started:
            setattr(self._runner, "start", start)  # noqa: B010
            raise fault

        setattr(self._runner, "start", fail)  # noqa: B010
        return begin(works)

    def _collect(self, collect: Callable[..., None], under_way: Round | None) -> None:
        """Before anything is let go, so that a difference can be looked into."""
        if under_way is not None:
            self._look(under_way, self._jobs.pop(id(under_way.started), ()))
        collect(under_way)

    def _look(self, under_way: Round, jobs: Sequence[Job]) -> None:
        values = under_way.started.asked.values(*under_way.started.pending.wait())
        pairs = [
            (piece, place)
            for piece, place in zip(under_way.pieces, under_way.places, strict=True)
            if id(piece.work) in self._paths
        ]
        for piece, place in pairs:
            work, forest = piece.work, jobs[place.job].forest
            paths = self._paths[id(work)]
            if len(under_way.works) > 1:
                paths.add("in company")
            if any(q.job == place.job and p.work is not work for p, q in pairs):
                paths.add("shared trunk")
            if any(len(forest.path(leaf)) >= LEVELS for leaf in forest.leaves):
                paths.add("three levels and more")
            for at, index in enumerate(work.reads(piece.index)):
                prompt, read = work.rendered.prompts[index], place.first + at
                if same_bits(values[read], self._expected[prompt.tobytes()]):
                    continue
                if len(self.differing) + len(self._where) < LOOKED_INTO:
                    self._where[id(work), index] = first_difference(
                        self._runner.executor, self._runner._pool, jobs, read, prompt
                    )

    def _bring_back(self, bring_back: Callable[..., None], work: RequestWork, limit: int) -> None:
        counters = self.engine._checkpoints.counters
        host, disk = counters.from_host, counters.from_disk
        bring_back(work, limit)
        paths = self._paths.get(id(work), set())
        if counters.from_host > host:
            paths.add("from host memory")
        if counters.from_disk > disk:
            paths.add("from disk")


def _can_be_cut(fault: Exception, work: RequestWork) -> bool:
    """Whether a request alone outlives a fault: any other is told to its caller."""
    return isinstance(fault, RoundTooLarge) and not work.at and work.limit >= 4 * GRAIN


def _around(inner: Callable[..., Any], outer: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: outer(inner, *arguments)
