"""As much of PromQL as alert rules about counters need, evaluated over samples.

Follows promql/functions.go and engine.go of Prometheus 3: `increase` extrapolates to its window and
knows nothing of the time before a series; a name alone looks back for five minutes.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

Labels = tuple[str, ...]
"""Values of a series' labels; the first is what sums are by."""

Samples = Sequence[tuple[float, float | None]]
"""(second, value), in order; None: from here on the series is gone."""

Vector = dict[Labels, float]
LOOK_BACK_S = 300.0


class Rule:
    """An expression of sums by one label, `or`, `unless`, `> number`, `offset` and functions of
    ranges in minutes.
    """

    def __init__(self, expr: str, series: Mapping[Labels, Samples]) -> None:
        """series: of the one metric that the expression is about."""
        self._tokens = re.findall(r"\w+|[()\[\]>]", expr)
        self._series = series

    def at(self, now: float) -> Vector:
        """What the expression finds at a second."""
        self._now, self._left = now, list(self._tokens)
        found = self._or()
        assert not self._left, f"not understood: {self._left}"
        return found

    def _take(self, *expected: str) -> None:
        for token in expected:
            assert self._left.pop(0) == token, f"{token} expected before {self._left}"

    def _next(self, token: str) -> bool:
        if self._left[:1] != [token]:
            return False
        self._left.pop(0)
        return True

    def _or(self) -> Vector:
        found = self._unless()
        while self._next("or"):
            found = self._unless() | found
        return found

    def _unless(self) -> Vector:
        found = self._greater()
        while self._next("unless"):
            without = self._greater()
            found = {labels: value for labels, value in found.items() if labels not in without}
        return found

    def _greater(self) -> Vector:
        found = self._one()
        if not self._next(">"):
            return found
        least = float(self._left.pop(0))
        return {labels: value for labels, value in found.items() if value > least}

    def _one(self) -> Vector:
        if self._next("("):
            found = self._or()
            self._take(")")
            return found
        name = self._left.pop(0)
        if name == "sum":
            self._take("by", "(", "application", ")", "(")
            parts = self._or()
            self._take(")")
            keys = dict.fromkeys(labels[:1] for labels in parts)
            return {key: sum(v for k, v in parts.items() if k[:1] == key) for key in keys}
        if name in RANGES:
            self._take("(")
            self._left.pop(0)
            self._take("[")
            begin = self._now - self._seconds()
            self._take("]", ")")
            told = {k: RANGES[name](_within(s, begin, self._now), begin, self._now)
                    for k, s in self._series.items()}  # fmt: skip
            return {labels: value for labels, value in told.items() if value is not None}
        at = self._now - (self._seconds() if self._next("offset") else 0.0)
        seen = {k: [v for t, v in s if at - LOOK_BACK_S < t <= at] for k, s in self._series.items()}
        return {labels: v[-1] for labels, v in seen.items() if v and v[-1] is not None}

    def _seconds(self) -> float:
        return 60.0 * int(self._left.pop(0).removesuffix("m"))


def _within(samples: Samples, begin: float, end: float) -> list[tuple[float, float]]:
    return [(t, v) for t, v in samples if begin < t <= end and v is not None]


def _increase(seen: Sequence[tuple[float, float]], begin: float, end: float) -> float | None:
    if len(seen) < 2:
        return None
    values = [value for _, value in seen]
    gained = sum(b - a if b >= a else b for a, b in pairwise(values))
    span = seen[-1][0] - seen[0][0]
    each = span / (len(seen) - 1)
    before, after = seen[0][0] - begin, end - seen[-1][0]
    before, after = (each / 2 if gap >= 1.1 * each else gap for gap in (before, after))
    if gained > 0:
        before = min(before, span * values[0] / gained)  # a counter was never below zero
    return gained * (span + before + after) / span


def _largest(seen: Sequence[tuple[float, float]], begin: float, end: float) -> float | None:
    return max((value for _, value in seen), default=None)


RANGES: dict[str, Callable[[Sequence[tuple[float, float]], float, float], float | None]] = {
    "increase": _increase,
    "max_over_time": _largest,
}
