"""The works: what is run, what is counted, and the row that is left."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.fleet.callers import Caller
from benchmarks.fleet.cluster import Counters, running
from benchmarks.fleet.driver import Asking, Event, Seen
from benchmarks.fleet.oracle import Told
from benchmarks.results_file import Row
from deployments.config import AppArgs

TOLERANCE = 1e-4
"""Of probabilities on a CPU in float32, where the gate's 1e-5 of the largest logit is less."""

HEAD: dict[str, Any] = {"num_cpus": 4, "include_dashboard": False}


@dataclass(frozen=True)
class Asked:
    """What a work is about. size: its name. engine: options of each replica's engine."""

    size: str
    callers: Sequence[Caller]
    told: Told
    engine: dict[str, Any]
    tolerance: float = TOLERANCE


def trajectory_replay(asked: Asked, count: int, nodes: list[dict[str, Any]], **args: Any) -> Row:
    """Tokens computed by so many replicas over what one would, and the busiest one's share."""
    with running(nodes, app(asked, num_replicas=count, **args)) as fleet:
        before = fleet.counters()
        began = time.monotonic()
        asking = Asking(fleet.url)
        seen = asyncio.run(asking.run(asked.callers))
        spent = time.monotonic() - began
        work = gained(before, fleet.counters())
    row = row_of("trajectory_replay", asked, seen, count)
    row["computed_over_oracle"] = round(sum(work) / asked.told.computed, 4)
    row["max_work_share"] = round(max(work) / sum(work), 4)
    row["steps_per_s"] = round(len(seen.answers) / spent, 2)
    return row


def kill(
    asked: Asked, count: int, nodes: list[dict[str, Any]], what: str, at: Sequence[int], **args: Any
) -> Row:
    """The same while replicas or nodes are killed when so many steps have finished."""
    with running(nodes, app(asked, num_replicas=count, **args)) as fleet:

        def event() -> None:
            # a second death is another one only if the first has been made up for
            fleet.wait_for(count)
            {"replica": fleet.kill_replica, "node": fleet.kill_node}[what]()

        events: dict[int, Event] = dict.fromkeys(at, event)
        seen = asyncio.run(Asking(fleet.url, events).run(asked.callers))
        killed = len(events) - len([step for step in at if step > len(seen.answers)])
    row = row_of("kill", asked, seen, count)
    row |= {"killed": what, "kills": killed}
    row["computed_over_oracle"] = round(seen.computed / asked.told.computed, 4)
    return row


def scale_1_3_1(asked: Asked, nodes: list[dict[str, Any]], half: int, **args: Any) -> Row:
    """A burst grows the fleet to three, silence shrinks it; then every agent goes on.

    half: steps of the burst; the rest is asked when one replica is left. A state that was handed
    over costs at most its last grain more than where it was: the same request is asked before and
    after.
    """
    scaling = {
        "num_replicas": "auto",
        "min_replicas": 1,
        "max_replicas": 3,
        "agents_per_replica": max(1, len(asked.callers) // 3),
        "downscale_delay_s": 2,
        "handover": "always",
    }
    with running(nodes, app(asked, **{**scaling, **args})) as fleet:
        asking = Asking(fleet.url)
        asyncio.run(asking.run(asked.callers, 0, half))
        fleet.wait_for(3)
        asyncio.run(asking.run(asked.callers, half - 1, half))
        there = dict(asking.seen.reused)
        fleet.wait_for(1)
        asyncio.run(asking.run(asked.callers, half - 1, half))
        moved = [there[at] - n for at, n in asking.seen.reused.items() if at[1] == half - 1]
        seen = asyncio.run(asking.run(asked.callers, half))
    row = row_of("scale_1_3_1", asked, seen, 3)
    row["most_tokens_lost_by_handover"] = max(moved)
    return row


def app(asked: Asked, **args: Any) -> AppArgs:
    """Arguments of the app, with two Gateways."""
    common = {"gateway_replicas": 2, "cpus_per_replica": 0.1, **asked.engine}
    return AppArgs.model_validate({**common, **args})


def gained(before: Counters, after: Counters) -> list[int]:
    """Tokens that each replica has computed meanwhile."""
    key = "tokens_computed"
    return [int(c[key]) - int(before.get(r, {key: 0})[key]) for r, c in after.items()]


def row_of(work: str, asked: Asked, seen: Seen, count: int) -> Row:
    """What all rows have."""
    for line in seen.failed[:5]:
        print("failed:", line, flush=True)
    changed = seen.changed(asked.told, asked.tolerance)
    for line in changed[:5]:
        print("changed:", line, flush=True)
    requests = sum(len(c.requests) for c in asked.callers)
    assert len(seen.answers) + len(seen.failed) >= requests, "requests were lost by the driver"
    return {
        "engine": "ours",
        "shape": str(asked.engine.get("model")),
        "mode": "default",
        "work": work,
        "size": asked.size,
        "replicas": count,
        "gateways": 2,
        "callers": len(asked.callers),
        "requests": requests,
        "failed": len(seen.failed),
        "changed": len(changed),
        "p50_ms": round(float(np.quantile(seen.ms, 0.5)), 1),
        "p99_ms": round(float(np.quantile(seen.ms, 0.99)), 1),
    }
