"""Who asks a fleet what: agents with growing histories, a hot document, a careless caller.

Each trajectory is used once. One opening of 8 KiB stands before all of them: without it the runs of
one kind of agent share so little that a hash of a text's first bytes would place them well.
"""

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flide_engine.families.tokenizer import TextTokenizer
from flide_engine.resolve import EMBEDDED
from loadtest.synthetic import Record
from loadtest.workloads import question, records

OPENING_BYTES = 8192
CARELESS = "one for all"
"""The session id that the careless caller sends with everything."""

Way = Literal["http", "client"]


@dataclass(frozen=True)
class Size:
    """How much is asked.

    agents, steps: at most; each step is one request with all its questions. history_tokens: where
    histories are cut, behind the opening. document_asks: requests about the hot document.
    careless: how many of the agents belong to the careless caller. document_tokens: of it.
    """

    agents: int
    steps: int
    history_tokens: int
    document_asks: int
    careless: int
    document_tokens: int = 1 << 20


SIZES = {
    # a quick look; what tests ask; all there is
    "small": Size(16, 4, 2000, 8, 1, 800),
    "ci": Size(24, 8, 2000, 16, 2, 1500),
    "full": Size(75, 61, 1 << 20, 200, 4),
    # a card has done with it in half a minute
    "gpu": Size(48, 24, 1 << 20, 48, 4),
}


@dataclass(frozen=True)
class Caller:
    """One caller's requests, asked in order. session: a session id, or "" for none."""

    name: str
    way: Way
    session: str
    requests: tuple[dict[str, Any], ...]


def records_of(data: Path | None) -> str:
    """What the callers' requests are made of: "trajectories", or "synthetic" records where there is
    no folder of workload files, which is said on stderr.
    """
    if data is not None and data.is_dir():
        return "trajectories"
    print(f"synthetic records: there is no folder {data}, see --data", file=sys.stderr, flush=True)
    return "synthetic"


def callers(size: Size, data: Path | None, variant: int = 0) -> list[Caller]:
    """All callers, half of them over HTTP. data: folder of workload files; synthetic if absent.
    variant: others have another opening and document, so that nothing of theirs has been computed.
    """
    rng = random.Random(0)
    cut = Cutter()
    rows = records("agent_trajectories", data)
    rng.shuffle(rows)
    opening = _opening(data, 2 * variant + 1)
    made = []
    for number, row in enumerate(rows[: size.agents]):
        session = CARELESS if number < size.careless else ""
        way: Way = "http" if number % 2 == 0 else "client"
        asked = _steps(row, opening, size, cut)
        made.append(Caller(row["id"], way, session, tuple(asked[: size.steps])))
    document = records("quality_like", data)[2 * variant]
    # a beginning of its own: mixed workloads have the document, too
    text = f"Document {variant}. " + cut(document["state"], size.document_tokens)
    asked = [
        {"state": text, "questions": {q["id"]: question(q)}} for q in document["questions"]
    ]  # asked one at a time, by two callers, in turn
    half = size.document_asks // 2
    for first, way in ((0, "http"), (1, "client")):
        turn = [asked[(first + 2 * i) % len(asked)] for i in range(half)]
        made.append(Caller(f"document by {way}", way, "", tuple(turn)))
    return made


def _steps(row: Record, opening: str, size: Size, cut: "Cutter") -> list[dict[str, Any]]:
    whole = "".join(step["append"] for step in row["steps"][: size.steps])
    limit = len(cut(whole, size.history_tokens))
    state, made = "", []
    for step in row["steps"][: size.steps]:
        state = (state + step["append"])[:limit]
        questions = {q["id"]: question(q) for q in step["questions"]}
        made.append({"state": opening + state, "questions": questions})
    return made


def _opening(data: Path | None, number: int) -> str:
    """8 KiB of one document, as a common system prompt would stand there."""
    text = records("quality_like", data)[number]["state"].encode()[:OPENING_BYTES]
    return str(text.decode(errors="ignore"))


class Cutter:
    """Cuts texts by tokens of the embedded model's tokenizer, which random models share."""

    def __init__(self) -> None:
        self._tokenizer = TextTokenizer(EMBEDDED)

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._tokenizer.encode(text))

    def __call__(self, text: str, tokens: int) -> str:
        """The longest beginning of a text, to a hundred letters, with at most so many tokens."""
        if len(text.encode()) <= tokens or self.count(text) <= tokens:
            return text
        low, high = 0, len(text)
        while high - low > 100:
            middle = (low + high) // 2
            low, high = (middle, high) if self.count(text[:middle]) <= tokens else (low, middle)
        return text[:low]
