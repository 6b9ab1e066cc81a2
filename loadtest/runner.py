"""Runs a plan over HTTP in this process, with progress while it runs."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any, TextIO

from loadtest.driver import Sample, Transport
from loadtest.plan import Level, Plan, run_level
from loadtest.schedule import Clock
from loadtest.stats import percentile

Replicas = Callable[[], int | None]
"""How many engine replicas run now; None if it cannot be told."""


class Progress:
    """One line a second of what has come back, on a terminal; one every ten seconds elsewhere."""

    def __init__(self, out: TextIO = sys.stderr) -> None:
        self._out, self._lines = out, 0
        self._recent: list[float] = []
        self.answered = self.errors = 0

    def seen(self, sample: Sample) -> None:
        """Counts a sample."""
        if sample.reply.error:
            self.errors += 1
        else:
            self.answered += 1
            self._recent.append(sample.latency_ms)

    def show(self, where: str, at_s: float, of_s: float) -> None:
        """Prints the line of this second. where: names the level."""
        recent, self._recent = sorted(self._recent[-1000:]), self._recent[-1000:]
        p50 = f"{percentile(recent, 0.5):.0f} ms" if recent else "-"
        line = (
            f"{at_s:5.0f} of {of_s:.0f} s  {where}  answered {self.answered}  "
            f"errors {self.errors}  p50 {p50}"
        )
        self._lines += 1
        if self._out.isatty():
            print(f"\r{line:<100}", end="", file=self._out, flush=True)
        elif self._lines % 10 == 1:
            print(line, file=self._out, flush=True)

    def close(self) -> None:
        """Ends the line."""
        if self._out.isatty():
            print(file=self._out)


def level_name(plan: Plan, level: int) -> str:
    """What a level is called where it is shown, such as "2 requests/s"."""
    unit = "requests/s" if plan.loop == "open" else "clients"
    return f"{plan.levels[level]:g} {unit}"


async def run_plan(
    plan: Plan,
    transport: Transport,
    clock: Clock,
    progress: Progress,
    replicas: Replicas = lambda: None,
) -> tuple[list[Level], list[tuple[float, int]]]:
    """(levels, replicas over time). A level begins when the last request of the one before is
    answered, so that a backlog is not charged to the next.
    """
    start = clock.now()
    levels: list[Level] = []
    counted: list[tuple[float, int]] = []

    async def watch() -> Any:
        while True:
            at = clock.now() - start
            progress.show(level_name(plan, len(levels) - 1), at, plan.seconds)
            # asks the cluster: off the loop, or it would delay what is due
            found = await asyncio.to_thread(replicas)
            if found is not None:
                counted.append((round(at, 1), found))
            await clock.sleep(1.0)

    watching: asyncio.Task[Any] | None = None
    try:
        for i, offered in enumerate(plan.levels):
            level = Level(offered, clock.now() - start)
            levels.append(level)
            watching = watching or asyncio.create_task(watch())

            def seen(sample: Sample, into: Level = level) -> None:
                into.samples.append(sample)
                progress.seen(sample)

            await run_level(plan, i, transport, clock, seen, (0, 1))
    finally:
        if watching:
            watching.cancel()
        progress.close()
    return levels, counted
