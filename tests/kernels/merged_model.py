"""The programs of `merged_kernel` as coroutines: what they claim and wait for, no arithmetic."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from flide_engine.kernels.delta_net_marks import GROUP
from flide_engine.kernels.stream import CHUNKS, ORDERED, ROOTS
from flide_engine.layout.plan import Ints

Flag = tuple[str, int, int, int]
Wait = tuple[Flag, int]
STEP = int(GROUP.value)


@dataclass
class Merged:
    """One launch over tables. spans: time of a "chunk", a "step" of a chain, an "output"."""

    tables: dict[str, Ints]
    heads: int
    parts: int
    programs: int
    spans: Callable[[str], float]
    listed: int = 0
    chained: int = 0
    arrived: int = 0
    flags: Counter[Flag] = field(default_factory=Counter)
    done: list[tuple[str, int, int]] = field(default_factory=list)

    def run(self, resident: int) -> float:
        """Time from the first program's begin to the last one's end, `resident` of them at a time.

        Raises RuntimeError if those that run all wait for what none of them does.
        """
        events: list[tuple[float, int, Iterator[float | Wait]]] = []
        blocked: list[tuple[Wait, int, Iterator[float | Wait]]] = []
        now, started = 0.0, 0
        while events or blocked or started < self.programs:
            while started < self.programs and len(events) + len(blocked) < resident:
                heapq.heappush(events, (now, started, self.program()))
                started += 1
            if not events:
                raise RuntimeError(f"{len(blocked)} programs wait: {[w for w, _, _ in blocked]}")
            now, number, program = heapq.heappop(events)
            wanted = next(program, None)
            if isinstance(wanted, float):
                heapq.heappush(events, (now + wanted, number, program))
            elif wanted is not None:
                blocked.append((wanted, number, program))
            free = [b for b in blocked if self.flags[b[0][0]] >= b[0][1]]
            blocked = [b for b in blocked if self.flags[b[0][0]] < b[0][1]]
            for _, number, program in free:
                heapq.heappush(events, (now, number, program))
        return now

    def program(self) -> Iterator[float | Wait]:
        """One program; what it yields is a time that it takes, or a flag that it waits for."""
        counts, order = self.tables["counts"], self.tables["order"]
        to_prepare = int(counts[CHUNKS]) * self.heads
        roots = int(counts[ROOTS])
        everything = to_prepare + int(counts[ORDERED]) * self.heads
        chains = roots * self.heads * self.parts
        early = min(chains, self.programs // 8) if to_prepare > self.programs else 0
        drained, task = chains == 0, -1
        place = self.arrived
        self.arrived += 1
        if place == 0 or place > early:
            task = self.claim()
        while task < everything:
            if (task < 0 or task >= to_prepare) and not drained:
                number = self.chained
                self.chained += 1
                if number < chains:
                    scan = -1 - int(order[number // (self.heads * self.parts)])
                    yield from self.chain(
                        scan, number // self.parts % self.heads, number % self.parts
                    )
                else:
                    drained = True
                continue
            ticket, head = self.claim(), task % self.heads
            if 0 <= task < to_prepare:
                yield from self.chunk(task // self.heads, head)
            elif task >= 0:
                entry = int(order[roots + (task - to_prepare) // self.heads])
                if entry < 0:
                    for part in range(self.parts):
                        yield from self.chain(-1 - entry, head, part)
                else:
                    yield from self.output(entry, head)
            task = ticket

    def claim(self) -> int:
        """The next of the list."""
        self.listed += 1
        return self.listed - 1

    def prepared(self, chunk: int, head: int) -> Wait:
        """All chunks of a chunk's group."""
        start = chunk // STEP * STEP
        count = min(STEP, int(self.tables["counts"][CHUNKS]) - start)
        return ("prepared", start // STEP, head, 0), count

    def chunk(self, c: int, head: int) -> Iterator[float | Wait]:
        """`prepare_chunk`."""
        yield self.spans("chunk")
        self.done.append(("chunk", c, head))
        self.flags[self.prepared(c, head)[0]] += 1

    def chain(self, k: int, head: int, part: int) -> Iterator[float | Wait]:
        """`_pass_on`, of one slice."""
        scan = self.tables["scans"][k]
        if scan[4] >= 0:
            yield ("passed", int(scan[4]), head, part), int(scan[6])
        first, end = int(scan[0]), int(scan[0] + scan[1])
        for start in range(first // STEP * STEP, end, STEP):
            yield self.prepared(start, head)
            for c in range(max(start, first), min(start + STEP, end)):
                yield self.spans("step")
                self.done.append((f"step {part}", c, head))
            self.flags["passed", k, head, part] += min(start + STEP, end) - max(start, first)

    def output(self, c: int, head: int) -> Iterator[float | Wait]:
        """`_wait_for_output` and `output_chunk`."""
        yield self.prepared(c, head)
        scan, needed = self.tables["chunk_waits"][c].tolist()
        for part in range(self.parts if scan >= 0 else 0):
            yield ("passed", scan, head, part), needed
        yield self.spans("output")
        self.done.append(("output", c, head))


def before(tables: dict[str, Ints], c: int) -> int:
    """The chunk after which the state is what chunk c begins with; -1: none of this round's."""
    scan, count = tables["chunk_waits"][c].tolist()
    return -1 if scan < 0 else int(tables["scans"][scan, 0]) + count - 1


def steps(tables: dict[str, Ints], scans: int) -> Ints:
    """Chunks whose states are passed on, in order."""
    runs = [np.arange(s[0], s[0] + s[1]) for s in tables["scans"][:scans]]
    return np.concatenate([np.zeros(0, np.int32), *runs]).astype(np.int32)
