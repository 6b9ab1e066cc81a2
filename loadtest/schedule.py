"""When requests are due: arrivals of an open loop, and the clock a run is driven by."""

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Protocol

Rate = Callable[[float], float]
"""Requests/s at a time in seconds."""


class Clock(Protocol):
    """Time as a run sees it, in seconds."""

    def now(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Returns when so many seconds have passed."""
        ...


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds of `time.monotonic`."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """`asyncio.sleep`."""
        await asyncio.sleep(seconds)


def even(rate: float, seconds: float) -> Iterator[float]:
    """Due times at equal distances, starting at 0."""
    for i in range(math.ceil(rate * seconds)):
        yield i / rate


def poisson(rate: Rate, highest: float, seconds: float, seed: int) -> Iterator[float]:
    """Due times of a Poisson process whose rate varies in time, by thinning.

    highest: requests/s that `rate` never exceeds; independent callers arrive like this.
    """
    rng = random.Random(f"arrivals {seed}")
    at = 0.0
    while highest > 0:
        at += rng.expovariate(highest)
        if at >= seconds:
            return
        if rng.random() * highest < rate(at):
            yield at


def ramp(low: float, high: float, seconds: float) -> Rate:
    """From `low` to `high` requests/s over the run."""
    return lambda at: low + (high - low) * at / seconds


def bursts(mean: float, factor: float = 4.0, period_s: float = 10.0, share: float = 0.2) -> Rate:
    """`factor` times the mean during the first `share` of every period, less in the rest of it.

    The mean over a period is `mean`; factor x share must not exceed 1.
    """
    rest = mean * (1 - factor * share) / (1 - share)
    return lambda at: mean * factor if at % period_s < period_s * share else rest


SHAPES = ("poisson", "even", "ramp", "bursts")


def arrivals(shape: str, rate: float, seconds: float, seed: int) -> Iterator[float]:
    """Due times, seconds from 0, increasing.

    rate: requests/s: the mean of `poisson`, `even` and `bursts`, the end of a `ramp` that begins
    at a tenth of it. Raises ValueError for an unknown shape.
    """
    if shape == "even":
        return even(rate, seconds)
    if shape == "poisson":
        return poisson(lambda at: rate, rate, seconds, seed)
    if shape == "ramp":
        return poisson(ramp(rate / 10, rate, seconds), rate, seconds, seed)
    if shape == "bursts":
        return poisson(bursts(rate), 4 * rate, seconds, seed)
    raise ValueError(f"no arrivals {shape!r}; there are {', '.join(SHAPES)}")
