"""What the simulated fleet is asked: growing histories of agents, and documents.

Lengths come from the workload file agent_trajectories; texts do not, an entry of a chain is drawn
from what it stands for. Every agent's text begins with one opening of 8 KiB, then with what the
trajectories of its source have in common, then it is its own.
"""

import gzip
import json
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from router.ring import mix
from router.routing_key import (
    COARSE_BYTES,
    FINE_BYTES,
    FINE_END,
    SCHEME,
    RouteKey,
)

OPENING_BYTES = 8192
BYTES_PER_TOKEN = 3.73
"""Mean over agent_trajectories: 65,016 bytes, 17,436 tokens a final history."""


@dataclass(frozen=True)
class Shape:
    """One trajectory's lengths.

    source: whose common beginning it has. common: bytes of that, the opening included. ends: bytes
    of the state at each step, the opening included. questions: tokens of each step's questions.
    """

    source: str
    common: int
    ends: tuple[int, ...]
    questions: tuple[int, ...]


def load_shapes(folder: Path) -> list[Shape]:
    """The shapes in `folder`/agent_trajectories.jsonl.gz."""
    with gzip.open(folder / "agent_trajectories.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    tasks: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        tasks[row["source"]].append(row["steps"][0]["append"])
    common = {s: _common_bytes(texts) for s, texts in tasks.items()}
    shapes = []
    for row in rows:
        sizes = [len(step["append"].encode()) for step in row["steps"]]
        ends = OPENING_BYTES + np.cumsum(sizes)
        asked = [_question_tokens(step["questions"]) for step in row["steps"]]
        shapes.append(
            Shape(
                row["source"],
                OPENING_BYTES + common[row["source"]],
                tuple(map(int, ends)),
                tuple(asked),
            )
        )
    return shapes


def _common_bytes(texts: list[str]) -> int:
    """What all texts begin with; the first and the last in order differ soonest."""
    low, high = min(texts).encode(), max(texts).encode()
    pairs = enumerate(zip(low, high, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(low), len(high)))


def _question_tokens(questions: list[dict[str, object]]) -> int:
    texts = [str(q["instructions"]) + str(q["criteria"] or "") for q in questions]
    return int(sum(len(t.encode()) for t in texts) / BYTES_PER_TOKEN)


def tokens_of(size: int) -> int:
    """Tokens of so many bytes."""
    return int(size / BYTES_PER_TOKEN)


def _grid(size: int) -> int:
    """Entries of a chain before its last: whole grid steps within `size` bytes."""
    fine = min(size, FINE_END) // FINE_BYTES
    return fine + max(0, size - FINE_END) // COARSE_BYTES


def _entries(seed: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """[count] entries that nothing else has."""
    x = np.arange(count, dtype=np.uint64) + np.uint64(mix(seed))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class State:
    """A state that may grow: one agent's history, or one document.

    number: its own. shape, step: where it is. session: of a caller that sends one. best: tokens
    that some replica has computed already. source: whose common beginning it has, "" for none.
    """

    __slots__ = ("_chain", "best", "home", "number", "session", "shape", "source", "step")

    def __init__(self, number: int, shape: Shape, session: str = "") -> None:
        self.number, self.shape, self.session = number, shape, session
        self.step, self.best, self.source = 0, 0, shape.source
        self.home = -1
        count, common = _grid(shape.ends[-1]), _grid(shape.common)
        chain = _entries(number + (1 << 40), count)
        if shape.common:
            shared = _entries(hash_of(shape.source), common)
            opening = _grid(OPENING_BYTES)
            shared[:opening] = _entries(hash_of("opening"), opening)
            chain[:common] = shared[:count]
        self._chain = chain.astype("<u8").tobytes()

    @property
    def size(self) -> int:
        """Bytes of the state now."""
        return self.shape.ends[self.step]

    def key(self) -> RouteKey:
        """The key of the next request."""
        size = self.size
        if self.session:
            return RouteKey(SCHEME, "", self.session, b"", -1, size)
        tail = mix(self.number << 16 | self.step).to_bytes(8, "little")
        return RouteKey(SCHEME, "", "", self._chain[: 8 * _grid(size)] + tail, -1, size)


def hash_of(text: str) -> int:
    """A number that stands for a text, the same in every process."""
    return mix(int.from_bytes(text.encode()[:64], "little") % (1 << 64))


class Documents:
    """Documents with popularity 1 / rank^s, 6,600 tokens each, four questions of 110 tokens."""

    SHAPE = Shape("", 0, (24_600,), (440,))

    def __init__(self, count: int, exponent: float, rng: random.Random) -> None:
        weights = np.arange(1, count + 1) ** -exponent
        self._cumulative = np.cumsum(weights / weights.sum())
        self._states: dict[int, State] = {}
        self._rng = rng

    def draw(self) -> State:
        """The next document asked about."""
        rank = int(np.searchsorted(self._cumulative, self._rng.random()))
        if rank not in self._states:
            self._states[rank] = State((1 << 32) + rank, self.SHAPE)
        return self._states[rank]
