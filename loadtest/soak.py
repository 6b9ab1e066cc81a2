"""A soak: many clients ask a mix for a while. Every request must end once, in a way it may, and
every answer must be the one its request gets alone.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from loadtest.soak_mix import ANSWERED, LEFT, Ask, Mix

GIVE_UP_S = 120.0
"""After so long a request without an end counts as hung."""

MOST_TOLD = 20

Answers = Mapping[str, Any]
"""Answers by question id, as on the wire."""


class Target(Protocol):
    """What is soaked."""

    async def ask(self, ask: Ask) -> tuple[str, Answers]:
        """(the end, the answers if it is `ANSWERED`). Cancelled if its caller leaves."""
        ...


@dataclass
class Report:
    """What came of a soak. ends: by kind and end. wrong: requests that ended as they must not,
    were answered otherwise than alone, or hung; told: the first of them. worst: largest difference
    of a number from that answer. spans_ms: of answered requests.
    """

    asked: int = 0
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: int = 0
    told: list[str] = field(default_factory=list)
    worst: float = 0.0
    spans_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def __add__(self, other: "Report") -> "Report":
        return Report(
            self.asked + other.asked,
            self.ends + other.ends,
            self.wrong + other.wrong,
            self.told + other.told,
            max(self.worst, other.worst, key=lambda worst: (math.isnan(worst), worst)),
            self.spans_ms + other.spans_ms,
            self.seconds + other.seconds,
        )

    @property
    def answered(self) -> int:
        """Requests with an answer."""
        return sum(n for (_, end), n in self.ends.items() if end == ANSWERED)

    def percentile(self, share: float) -> float:
        """Nearest-rank percentile of the answered requests' milliseconds; NaN for none."""
        ordered = sorted(self.spans_ms)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan

    def row(self) -> dict[str, str | int | float | None]:
        """The numbers, flat."""
        by_end: Counter[str] = Counter()
        for (_, end), count in self.ends.items():
            by_end[end] += count
        return {
            "seconds": round(self.seconds, 1),
            "asked": self.asked,
            "wrong": self.wrong,
            "worst_difference": float(f"{self.worst:.2g}"),
            "rps": round(self.answered / self.seconds, 1) if self.seconds else None,
            "p50_ms": round(self.percentile(0.5), 2),
            "p99_ms": round(self.percentile(0.99), 2),
            **{f"ended_{end}": by_end[end] for end in sorted(by_end)},
        }


class Soak:
    """Clients over a target."""

    def __init__(
        self,
        mix: Mix,
        target: Target,
        alone: Sequence[Answers],
        tolerance: float,
        may_end: Callable[[Ask], frozenset[str]] | None = None,
    ) -> None:
        """alone: answers of `mix.good`, each asked alone. may_end: the ends a request may have, in
        the target's words; none: `Ask.ends`.
        """
        self._mix, self._target, self._alone = mix, target, alone
        self._tolerance, self._may_end = tolerance, may_end or (lambda ask: ask.ends)
        self._clients: dict[int, Iterator[Ask]] = {}

    async def run(self, clients: int, seconds: float, least: int = 0) -> Report:
        """So many clients for so long, and until so many requests have been asked; returns when the
        last one has ended. Called again, they go on where they were.
        """
        report, began = Report(), time.monotonic()

        async def client(number: int) -> None:
            asks = self._clients.setdefault(number, self._mix.client(number))
            while time.monotonic() - began < seconds or report.asked < least:
                await self._one(next(asks), report)

        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(client(number))
        report.seconds = time.monotonic() - began
        return report

    async def _one(self, ask: Ask, report: Report) -> None:
        report.asked += 1
        began = time.monotonic()
        end, answers = await self._ended(ask)
        report.ends[ask.kind, end] += 1
        if end not in self._may_end(ask):
            self._tell(report, f"{ask.kind}: {end}, not {sorted(self._may_end(ask))}")
        elif end == ANSWERED:
            report.spans_ms.append(1000 * (time.monotonic() - began))
            off = difference(answers, self._alone[ask.known])
            report.worst = report.worst if off <= report.worst else off
            if not off <= self._tolerance:
                self._tell(report, f"{ask.kind} {ask.known}: off by {off:.2g} from asked alone")

    async def _ended(self, ask: Ask) -> tuple[str, Answers]:
        """How it ended; its caller leaves when it is time."""
        asked = asyncio.ensure_future(self._target.ask(ask))
        done, _ = await asyncio.wait([asked], timeout=ask.leave_s or GIVE_UP_S)
        if done:
            return asked.result()
        asked.cancel()
        await asyncio.wait([asked], timeout=GIVE_UP_S)
        if ask.leave_s is None or not asked.done():
            return "hung", {}
        return (LEFT, {}) if asked.cancelled() else asked.result()

    def _tell(self, report: Report, what: str) -> None:
        report.wrong += 1
        if len(report.told) < MOST_TOLD:
            report.told.append(what)


def numbers(answer: Mapping[str, Any]) -> list[float]:
    """Every probability of one answer, and its value."""
    if answer["type"] == "noul":
        return [answer["noul"]]
    value = [answer["score"]] if answer["type"] == "score" else []
    return [*answer["probabilities"].values(), *value]


def difference(got: Answers, expected: Answers) -> float:
    """Largest difference of a number, NaN if one is; infinite if questions, options or types
    differ.
    """
    if list(got) != list(expected):
        return math.inf
    worst = 0.0
    for one, other in zip(got.values(), expected.values(), strict=True):
        ours, theirs = numbers(one), numbers(other)
        if one["type"] != other["type"] or len(ours) != len(theirs):
            return math.inf
        for off in (abs(a - b) for a, b in zip(ours, theirs, strict=True)):
            worst = worst if off <= worst else off  # NaN stays
    return worst
