"""Seeded workloads: endless sessions of requests, the same for the same seed on every machine.

A *session* is what one caller asks in order: one request; or its questions one by one; or an
agent's steps, each over the state of the step before, grown. The records come from a folder of
workload files, or from `loadtest.synthetic` where there is none.
"""

import gzip
import heapq
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from loadtest import synthetic
from loadtest.synthetic import Record

DATA = Path("../shared/workloads")
"""Default folder of workload files, beside the checkout."""

FILES = {
    "race": "race_like",
    "race_all": "race_all_like",
    "quality_all": "quality_like",
    "multirc": "multirc_like",
    "routing": "intent_routing",
    "response_eval": "response_eval",
    "agents": "agent_trajectories",
}
"""Workload -> its file."""

MIXED = {
    "race": 20,
    "race_all": 15,
    "routing": 20,
    "multirc": 10,
    "agents": 30,
    "quality_all": 3,
    "response_eval": 2,
}
"""Percent of the mixed workload's requests: mostly short ones and agents' steps, some documents."""

NAMES = (*FILES, "mixed")
ROUTING_OPTIONS = 150
"""The routing workload takes records with at least so many options."""


@dataclass(frozen=True)
class Request:
    """One request: the workload it is of, and the body of `POST /v1/systemone`."""

    work: str
    body: dict[str, Any]

    @property
    def questions(self) -> int:
        """Number of questions asked."""
        return len(self.body["questions"])


@dataclass(frozen=True)
class Step:
    """One request of a session; think_s: seconds between the answer before and this request."""

    request: Request
    think_s: float


Session = Iterator[Step]


@dataclass(frozen=True)
class Options:
    """How records become requests.

    one_by_one: a request for each question instead of one for all. think_s: mean think time of an
    agent between an answer and its next step, seconds; drawn from an exponential distribution.
    model: the model asked for.
    """

    one_by_one: bool = False
    think_s: float = 5.0
    model: str = "jev-latest"


class Workload:
    """Requests of one workload, or of a mix of them, drawn by seed. Made by `load`."""

    def __init__(self, name: str, records: dict[str, list[Record]], options: Options) -> None:
        """records: of each workload that `name` draws from."""
        self.name, self._records, self._options = name, records, options

    def open_stream(self, seed: int) -> "OpenStream":
        """Requests for due times that come from outside."""
        return OpenStream(self._sessions(str(seed)), self._draws(str(seed)))

    def client(self, seed: int, number: int) -> Iterator[Step]:
        """Endless steps of one closed-loop client; clients of one seed differ by their number."""
        own = f"{seed} {number}"
        parts = {work: _joined(found) for work, found in self._sessions(own).items()}
        for work in self._draws(own):
            yield next(parts[work])

    def _sessions(self, seed: str) -> dict[str, Iterator[Session]]:
        return {work: self._of(work, random.Random(f"{work} {seed}")) for work in self._records}

    def _draws(self, seed: str) -> Iterator[str]:
        """Which workload each request is of, endlessly."""
        rng = random.Random(f"draws {seed}")
        names = list(self._records)
        shares = [MIXED[name] for name in names] if len(names) > 1 else [1]
        while True:
            yield rng.choices(names, shares)[0]

    def _of(self, work: str, rng: random.Random) -> Iterator[Session]:
        """Endless sessions of one workload; each pass over the records is in a new order."""
        groups = _groups(work, self._records[work])
        while True:
            rng.shuffle(groups)
            for group in groups:
                for record in group:
                    yield self._session(work, record, random.Random(rng.random()))

    def _session(self, work: str, record: Record, rng: random.Random) -> Session:
        state, first = "", True
        for step in record.get("steps") or [{"append": record["state"], **record}]:
            state += step["append"]
            asked = {q["id"]: question(q) for q in step["questions"]}
            parts = [{k: v} for k, v in asked.items()] if self._options.one_by_one else [asked]
            for i, part in enumerate(parts):
                mean = self._options.think_s
                pause = rng.expovariate(1 / mean) if mean and not (i or first) else 0.0
                body = {"model": self._options.model, "state": state, "questions": part}
                yield Step(Request(work, body), pause)
                first = False


class OpenStream:
    """Requests for due times that come from outside, in the order of the due times.

    At each due time a workload is drawn; of its sessions the one whose next request has been ready
    longest goes on, or a new one starts. What is sent does not depend on how fast answers come: it
    is the same against every server. At least (agents' requests/s) x (think time) agents are
    active.
    """

    def __init__(self, sessions: dict[str, Iterator[Session]], draws: Iterator[str]) -> None:
        """sessions: endless, by workload. draws: the workload of each request."""
        self._sessions, self._draws = sessions, draws
        self._ready: dict[str, list[tuple[float, int, Step, Session]]] = {w: [] for w in sessions}
        self._count = 0

    def at(self, due_s: float) -> Request:
        """The request of this due time (seconds, not before that of the call before)."""
        work = next(self._draws)
        ready = self._ready[work]
        if ready and ready[0][0] <= due_s:
            _, _, step, session = heapq.heappop(ready)
        else:
            session = next(self._sessions[work])
            step = next(session)
        if (following := next(session, None)) is not None:
            self._count += 1
            heapq.heappush(ready, (due_s + following.think_s, self._count, following, session))
        return step.request


def _joined(sessions: Iterator[Session]) -> Iterator[Step]:
    for session in sessions:
        yield from session


def question(record: Record) -> dict[str, Any]:
    """A record's question as it goes over the wire; a score's levels become a list."""
    criteria = record["criteria"]
    if record["type"] == "score" and isinstance(criteria, dict):
        criteria = list(criteria.values())
    asked = {"type": record["type"], "instructions": record["instructions"]}
    return asked if criteria is None else {**asked, "criteria": criteria}


def load(name: str, data: Path | None = DATA, options: Options = Options()) -> Workload:
    """The workload of this name. data: folder of workload files; synthetic records if it is
    absent or None.

    Raises ValueError for an unknown name, and FileNotFoundError if the folder lacks a file.
    """
    if name not in NAMES:
        raise ValueError(f"no workload {name!r}; there are {', '.join(NAMES)}")
    wanted: Iterable[str] = MIXED if name == "mixed" else (name,)
    return Workload(
        name, {work: _kept(work, records(FILES[work], data)) for work in wanted}, options
    )


def records(file: str, data: Path | None = DATA) -> list[Record]:
    """The records of a workload file, named without its ending; synthetic ones if the folder is
    absent or None. Raises FileNotFoundError if the folder lacks the file.
    """
    if data is None or not data.is_dir():
        return synthetic.records(file)
    return list(_read(data / f"{file}.jsonl.gz"))


@lru_cache
def _read(path: Path) -> tuple[Record, ...]:
    """A file's records, which nobody changes: every level of a run asks for them again."""
    with gzip.open(path, "rt") as lines:
        return tuple(json.loads(line) for line in lines)


def _kept(work: str, records: list[Record]) -> list[Record]:
    if work != "routing":
        return records
    return [r for r in records if len(r["questions"][0]["criteria"]) >= ROUTING_OPTIONS]


def _groups(work: str, records: list[Record]) -> list[list[Record]]:
    """Records that stay together when the order is drawn: those with a common opening."""
    if work != "response_eval":
        return [[r] for r in records]
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["state"][:400], []).append(record)
    return list(found.values())
