"""Requests in random company against the same request alone and against each prompt alone, through
any engine that answers a list of requests as one round.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.bits.first_difference import Floats, same_bits
from benchmarks.bits.questions import KINDS, PATHS, questions
from benchmarks.requests import TokenRequest

Answer = Callable[[Sequence[TokenRequest]], Sequence[Sequence[Floats]]]
"""Logits by request and question, of requests that share a round."""

FIRST, PAST = 1000, 200_000
LONG, LONG_SHARE = 10_000, 0.1
"""Tokens of a neighbour that takes a round off its usual path, and how often there is one."""

COUNTS = {"one": 1, "some": 12, "short": 16, "tree": 8}
"""Most questions of each kind, as `questions` counts them."""


@dataclass
class Tally:
    """compared: questions. differing: with other bits than the prompt alone; in_company: with other
    bits than in the same request alone. largest: difference of a logit from the prompt alone.
    by_path, wrong: comparisons with the prompt alone, and differing ones, by path.
    """

    compared: int = 0
    differing: int = 0
    in_company: int = 0
    largest: float = 0.0
    by_path: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)

    def add(self, other: dict[str, Any]) -> None:
        """Another tally, as `told` tells it."""
        self.compared += other["compared"]
        self.differing += other["differing"]
        self.in_company += other["in_company"]
        self.largest = max(self.largest, other["largest"])
        self.by_path.update(other["by_path"])
        self.wrong.update(other["wrong"])

    def told(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "by_path": dict(self.by_path), "wrong": dict(self.wrong)}


def random_round(rng: np.random.Generator) -> list[tuple[TokenRequest, set[str]]]:
    """Two or three requests about states of up to 1,200 tokens, or one and a long neighbour; with
    each one's paths.
    """
    found = []
    long = rng.random() < LONG_SHARE
    for _ in range(1 if long else rng.integers(2, 4)):
        kind = KINDS[rng.integers(len(KINDS))]
        state = rng.integers(FIRST, PAST, rng.integers(2, 1201)).astype(np.int32)
        count = int(rng.integers(1, COUNTS[kind] + 1))
        asked = questions(state, kind, count, int(rng.integers(1 << 31)), PAST, 110)
        paths = {PATHS[kind], "in company"}
        found.append((asked, paths | {"beside a long one"} if long else paths))
    if long:
        state = rng.integers(FIRST, PAST, LONG).astype(np.int32)
        asked = questions(state, "one", 1, int(rng.integers(1 << 31)), PAST, 110)
        found.append((asked, {PATHS["one"], "in company"}))
    return found


def compare(answer: Answer, rounds: int, seed: int, seconds: float) -> Tally:
    """Random rounds through an engine, until time is over."""
    rng, began, tally = np.random.default_rng(seed), time.monotonic(), Tally()
    for _ in range(rounds):
        if time.monotonic() - began > seconds:
            break
        drawn = random_round(rng)
        together = answer([request for request, _ in drawn])
        for (request, paths), in_company in zip(drawn, together, strict=True):
            (as_one,) = answer([request])
            for i, prompt in enumerate(request.prompts):
                ((alone,),) = answer([TokenRequest(request.state, (prompt,))])
                _count(tally, paths, in_company[i], as_one[i], alone)
    return tally


def _count(tally: Tally, paths: set[str], got: Floats, as_one: Floats, alone: Floats) -> None:
    tally.compared += 1
    tally.by_path.update(paths)
    tally.in_company += not same_bits(got, as_one)
    if not same_bits(got, alone):
        tally.differing += 1
        tally.wrong.update(paths)
        tally.largest = max(tally.largest, float(np.abs(got - alone).max()))
