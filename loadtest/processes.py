"""A plan over HTTP from several processes: one alone sends some thousand small requests a second,
and what it cannot send in time would be charged to the server.
"""

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from loadtest.driver import Sample
from loadtest.http_transport import HttpTransport
from loadtest.plan import Level, Plan, run_level
from loadtest.runner import Progress, level_name
from loadtest.schedule import WallClock

TOLD_EACH_S = 0.5
"""Seconds between what a process tells of its answers."""

END_WITHIN_S = 5.0


class Target(NamedTuple):
    """Whom to ask: the arguments of `HttpTransport`."""

    host: str
    key: str
    timeout_s: float


def run_processes(
    plan: Plan,
    target: Target,
    processes: int,
    progress: Progress,
    replicas: Callable[[], int | None] = lambda: None,
) -> tuple[list[Level], list[tuple[float, int]]]:
    """(levels, replicas over time) of a plan whose clients, or whose rate, so many processes share.
    A closed loop sends what it would send from one.

    Raises RuntimeError if one of them ends.
    """
    context = multiprocessing.get_context("spawn")
    ends: list[Connection] = []
    made = []
    try:
        for number in range(processes):
            ours, theirs = context.Pipe()
            part = (number, processes)
            made.append(
                context.Process(target=_work, args=(theirs, plan, target, part), daemon=True)
            )
            made[-1].start()
            theirs.close()
            ends.append(ours)
        for end in ends:  # all before the first level: imports take longer than some levels
            _told(end)
        return _levels(plan, ends, progress, replicas)
    finally:
        for end in ends:
            with suppress(OSError):
                end.send(None)
        for process in made:
            process.join(END_WITHIN_S)
            process.kill()
        progress.close()


def _levels(
    plan: Plan, ends: list[Connection], progress: Progress, replicas: Callable[[], int | None]
) -> tuple[list[Level], list[tuple[float, int]]]:
    began = time.monotonic()
    levels: list[Level] = []
    counted: list[tuple[float, int]] = []
    shown = 0.0
    for i, offered in enumerate(plan.levels):
        levels.append(Level(offered, time.monotonic() - began))
        for end in ends:
            end.send(i)
        running = list(ends)
        while running:
            ready = wait(running, 0.2)
            for end in [end for end in running if end in ready]:
                samples = _told(end)
                if samples is None:
                    running.remove(end)
                    continue
                for sample in samples:
                    levels[-1].samples.append(sample)
                    progress.seen(sample)
            if (at := time.monotonic() - began) - shown < 1.0:
                continue
            shown = at
            progress.show(level_name(plan, i), at, plan.seconds)
            if (found := replicas()) is not None:
                counted.append((round(at, 1), found))
    return levels, counted


def _told(end: Connection) -> list[Sample] | None:
    """What a process tells: samples; None: its part of the level is over."""
    try:
        told: list[Sample] | None = end.recv()
    except (EOFError, ConnectionError):
        raise RuntimeError("a process of clients has ended; its message is above") from None
    return told


def _work(end: Connection, plan: Plan, target: Target, part: tuple[int, int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it
    with suppress(EOFError, BrokenPipeError):
        asyncio.run(_run(end, plan, target, part))


async def _run(end: Connection, plan: Plan, target: Target, part: tuple[int, int]) -> None:
    """Runs its part of each level that it is told."""
    unseen: list[Sample] = []

    def tell() -> None:
        taken, unseen[:] = list(unseen), []
        end.send(taken)

    async def telling() -> Any:
        while True:
            await asyncio.sleep(TOLD_EACH_S)
            tell()

    async with HttpTransport(*target) as transport:
        tell()
        while (level := await asyncio.to_thread(end.recv)) is not None:
            task = asyncio.create_task(telling())
            await run_level(plan, level, transport, WallClock(), unseen.append, part)
            task.cancel()
            tell()
            end.send(None)
