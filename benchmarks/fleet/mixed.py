"""The mixed workload in closed loops, by handle or over HTTP, from processes of their own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from benchmarks.fleet.cards import Cards
from benchmarks.fleet.cluster import Counters, Fleet
from benchmarks.fleet.works import gained
from benchmarks.results_file import Row
from loadtest.driver import Sample
from loadtest.handles import HandleTransport
from loadtest.http_transport import HttpTransport
from loadtest.plan import Plan, run_level
from loadtest.schedule import WallClock
from loadtest.stats import percentile
from loadtest.workloads import Options

WARM_UP = 0.2
"""Part of a level before what is counted."""

WAYS = ("handle", "http")


def plan_of(clients: Sequence[int], seconds: float, data: Path) -> Plan:
    """Closed loops of so many clients, one after the other, of so many seconds each. Agents do not
    think: each client always waits for an answer.
    """
    return Plan(
        workload="mixed",
        loop="closed",
        levels=tuple(map(float, clients)),
        seconds=seconds * len(clients),
        warmup_s=WARM_UP * seconds,
        data=data,
        options=Options(think_s=0.0),
    )


class Clients:
    """Some of the clients of every level; an actor of Ray."""

    def __init__(self, plan: Plan, url: str, part: tuple[int, int]) -> None:
        """url: of the server; "": by handle. part: (this process, number of processes)."""
        self._plan, self._url, self._part = plan, url, part

    async def run(self, level: int) -> list[Sample]:
        """One level; returns when the last of its requests is answered."""
        found: list[Sample] = []
        how = (self._plan, level)
        if not self._url:
            by_handle = HandleTransport("default", 60.0)
            await run_level(*how, by_handle, WallClock(), found.append, self._part)
            return found
        async with HttpTransport(self._url) as over_http:
            await run_level(*how, over_http, WallClock(), found.append, self._part)
        return found


def loops(fleet: Fleet, plan: Plan, way: str, processes: int, gpus: int) -> list[Row]:
    """A row for each level. way: one of `WAYS`. gpus: that the fleet has."""
    actor: Any = ray.remote(num_cpus=0)(Clients)
    url = "" if way == "handle" else fleet.url
    clients = [actor.remote(plan, url, (i, processes)) for i in range(processes)]
    rows = []
    try:
        for level, offered in enumerate(plan.levels):
            before = fleet.live()
            with Cards() as cards:
                parts = ray.get([one.run.remote(level) for one in clients])
            samples = [sample for part in parts for sample in part]
            found = row_of(samples, plan.warmup_s, plan.level_s)
            head: Row = {"work": "mixed", "way": way, "clients": int(offered)}
            found |= busy(before, fleet.live(), samples) | cards.row(gpus)
            rows.append(head | found)
    finally:
        for one in clients:
            ray.kill(one)
    return rows


def row_of(samples: Sequence[Sample], warm_up_s: float, seconds: float) -> Row:
    """Counts of what was answered between the warm-up and the end of a level; latencies of all
    (`timed`) that was due between them, whenever it was answered; failures of the whole level.
    """
    counted = [s for s in samples if warm_up_s <= s.done < seconds and not s.reply.error]
    failed = [s.reply.error for s in samples if s.reply.error]
    for line in failed[:5]:
        print("failed:", line, flush=True)
    timed = [s for s in samples if s.due >= warm_up_s and not s.reply.error]
    ms = sorted(s.latency_ms for s in timed)
    asked = sum(s.reply.usage["input_tokens"] for s in counted)
    reused = sum(s.reply.usage["x_reused_tokens"] for s in counted)
    return {
        "requests": len(counted),
        "failed": len(failed),
        "requests_per_s": round(len(counted) / (seconds - warm_up_s), 1),
        "timed": len(timed),
        "p50_ms": round(percentile(ms, 0.5), 1) if ms else None,
        "p99_ms": round(percentile(ms, 0.99), 1) if ms else None,
        "reuse_share": round(reused / asked, 4) if asked else None,
    }


def busy(before: Counters, after: Counters, samples: Sequence[Sample]) -> Row:
    """Shares of a level in which a replica had a round under way: the least and the most."""
    spent = max((s.done for s in samples), default=0.0)
    shares = [seconds / spent for seconds in gained(before, after, "busy_seconds")] if spent else []
    if not shares:
        return {}
    return {"busy_least": round(min(shares), 3), "busy_most": round(max(shares), 3)}


def at_objective(rows: Sequence[Row], way: str, objective_ms: float) -> Row | None:
    """The level of most requests a second whose p99 is within the objective and in which nothing
    failed; None if there is none.
    """
    within = [
        row
        for row in rows
        if row["way"] == way and not row["failed"] and row["p99_ms"] is not None
        if float(row["p99_ms"]) <= objective_ms
    ]
    return max(within, key=lambda row: float(row["requests_per_s"] or 0), default=None)
