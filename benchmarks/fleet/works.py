"""The works: what is run, what is counted, and the row that is left."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.fleet.callers import Caller
from benchmarks.fleet.cluster import READY_WITHIN_S, Counters, Fleet, Nodes, app_on
from benchmarks.fleet.driver import ALL, Asking, Seen
from benchmarks.fleet.oracle import Told
from benchmarks.results_file import Row
from deployments.config import AppArgs

GATEWAYS = 2

TOLERANCE = 1e-5
"""Of probabilities on a CPU in float32."""

NODES: list[dict[str, Any]] = [
    {
        "num_cpus": 4,
        "num_gpus": 1,
        "include_dashboard": False,
        # a node that is gone is gone after 3 s, not 15
        "_system_config": {"health_check_period_ms": 1000, "health_check_failure_threshold": 3},
    },
    # the replicas of `kill_nodes` take a whole (pretended) GPU, so that there is one a node;
    # everything else has the head
    {"num_cpus": 0, "num_gpus": 1},
]

BURST: dict[str, Any] = {
    "num_replicas": "auto",
    "min_replicas": 1,
    "max_replicas": 3,
    # a replica that is busy for a third of the time is worth three; agents who are quiet keep none
    "busy_target": 0.1,
    "agents_per_replica": 1 << 20,
    "downscale_delay_s": 2,
    "handover": "always",
}


@dataclass(frozen=True)
class Asked:
    """What a work is about.

    size: its name. engine: options of each replica's engine, app: other arguments of the app.
    shape: the model's name in rows, if `engine` has a folder. tolerance: of probabilities, 0 where
    bits are promised. processes: of callers. deadline_s: of each request. ramp_s:
    seconds over which callers begin.
    """

    size: str
    callers: Sequence[Caller]
    told: Told
    engine: dict[str, Any]
    app: dict[str, Any] = field(default_factory=dict)
    shape: str = ""
    tolerance: float = TOLERANCE
    processes: int = 1
    deadline_s: float = 60.0
    ramp_s: float = 0.0

    @property
    def requests(self) -> int:
        """Of all callers."""
        return sum(len(caller.requests) for caller in self.callers)

    def asking(self, fleet: Fleet) -> Asking:
        """The callers, ready to ask."""
        return Asking(fleet.url, self.callers, self.processes, self.deadline_s, self.ramp_s)


def trajectory_replay(asked: Asked, nodes: Nodes, count: int, **args: Any) -> Row:
    """Tokens computed by so many replicas over what one would, and the busiest one's share."""
    with app_on(nodes, app(asked, num_replicas=count, **args)) as fleet:
        return replayed(fleet, asked, count)


def replayed(fleet: Fleet, asked: Asked, count: int) -> Row:
    """The same of an app that runs."""
    with asked.asking(fleet) as asking:
        before, began = fleet.counters(), time.monotonic()
        seen = asking.run()
        spent, after = time.monotonic() - began, fleet.counters()
    row = row_of("trajectory_replay", asked, seen, count)
    row |= work_of(before, after, asked.told) | overhead_of(seen)
    return row | {
        "reuse_share": round(seen.reused / seen.asked, 4),
        "steps_per_s": round(len(seen.ms) / spent, 2),
    }


def kill(asked: Asked, nodes: Nodes, count: int, what: str, at: Sequence[int], **args: Any) -> Row:
    """The same while replicas or nodes are killed when so many requests have been answered.

    what: "replica" or "node"; one node and one replica a node are needed for the second.
    """
    with app_on(nodes, app(asked, num_replicas=count, **args)) as fleet:
        return killed(fleet, asked, count, what, at)


def killed(
    fleet: Fleet, asked: Asked, count: int, what: str, at: Sequence[int], pause: int = ALL
) -> Row:
    """The same of an app that runs. pause: the step before which all wait until there are as many
    replicas as before again.
    """
    with asked.asking(fleet) as asking:
        before, kills = fleet.counters(), 0
        asking.start(0, pause)
        for number in at:
            while asking.answered() < number and not asking.done():
                time.sleep(0.05)
            # a second death is another one only if the first has been made up for
            fleet.wait_for(count)
            if asking.done():
                break
            kills += 1
            {"replica": fleet.kill_replica, "node": fleet.kill_node}[what]()
        seen = asking.seen()
        fleet.wait_for(count)
        seen = asking.run(pause) if pause < ALL else seen
        after = fleet.counters()
    row = row_of("kill", asked, seen, count)
    row |= work_of(before, after, asked.told)
    new = sum(int(told["answered"]) for replica, told in after.items() if replica not in before)
    return row | {"killed": what, "kills": kills, "answered_by_new": new}


def scale_1_3_1(asked: Asked, nodes: Nodes, burst: int, **args: Any) -> Row:
    """A burst grows the fleet to three, silence shrinks it; then every agent goes on.

    burst: steps asked again and again until there are three. The step after them is asked of three
    replicas, which leaves each state at its home, and again when there is one: a state that was
    handed over costs at most its last grain more than where it was.
    """
    with app_on(nodes, app(asked, **BURST, **args)) as fleet, asked.asking(fleet) as asking:
        bursts, until = 0, time.monotonic() + READY_WITHIN_S
        while not bursts or fleet.states().get("RUNNING", 0) < BURST["max_replicas"]:
            if time.monotonic() > until:
                raise TimeoutError(f"{bursts} bursts left the fleet at {fleet.states()}")
            asking.run(0, burst)
            bursts += 1
        asking.run(burst, burst + 1)
        there, three = asking.run(burst, burst + 1).last_reused, fleet.live()
        fleet.wait_for(1)
        again = asking.run(burst, burst + 1).last_reused
        seen = asking.run(burst + 1)
        ends = handed_over(three, fleet.live())
    row = row_of("scale_1_3_1", asked, seen, len(three))
    lost = [tokens - again[at] for at, tokens in there.items() if at[1] == burst]
    return row | {"bursts": bursts, "handed_over": ends, "most_tokens_lost": max(lost)}


def handed_over(before: Counters, after: Counters) -> int:
    """Checkpoints that those of `after` have taken over since `before`."""
    key = "checkpoints_taken_over"
    return sum(
        int(told[key].get("adopted", 0)) - int(before.get(r, {key: {}})[key].get("adopted", 0))
        for r, told in after.items()
    )


def app(asked: Asked, **args: Any) -> AppArgs:
    """Arguments of the app, with two Gateways."""
    common = {"gateway_replicas": GATEWAYS, "cpus_per_replica": 0.1, "gpus_per_replica": 0}
    return AppArgs.model_validate({**common, **asked.engine, **asked.app, **args})


def work_of(before: Counters, after: Counters, told: Told) -> Row:
    """Tokens computed meanwhile over the oracle's, and the largest part of one replica."""
    work = gained(before, after)
    return {
        "computed_over_oracle": round(sum(work) / told.computed, 4),
        "max_work_share": round(max(work) / sum(work), 4),
    }


def gained(before: Counters, after: Counters, key: str = "tokens_computed") -> list[int]:
    """What each replica has counted meanwhile: tokens that it computed, if nothing else is said."""
    return [int(c[key]) - int(before.get(r, {key: 0})[key]) for r, c in after.items()]


def overhead_of(seen: Seen) -> Row:
    """Medians of what placing a request took in the processes that asked by handle, ms, and their
    sum.
    """
    spent = {"hash_p50_ms": seen.hash_ms, "choose_p50_ms": seen.choose_ms}
    found = {name: round(float(np.median(ms)), 4) for name, ms in spent.items() if ms}
    return {**found, "router_p50_ms": round(sum(found.values()), 4)} if found else {}


def row_of(work: str, asked: Asked, seen: Seen, count: int) -> Row:
    """What all rows have. Prints some of what failed and of what was answered otherwise."""
    for line in seen.failed[:5]:
        print("failed:", line, flush=True)
    differences = seen.differences(asked.told)
    changed = [at for at, d in differences.items() if d > asked.tolerance]
    for at in changed[:5]:
        print(f"changed: {at} by {differences[at]:.2g}", flush=True)
    if len(seen.answers) + len(seen.failed) < asked.requests:
        raise RuntimeError(f"{asked.requests} requests were to be asked, fewer were")
    return {
        "engine": "ours",
        "shape": asked.shape or str(asked.engine.get("model")),
        "mode": "default",
        "work": work,
        "size": asked.size,
        "replicas": count,
        "gateways": app(asked).gateway_replicas,
        "callers": len(asked.callers),
        "requests": asked.requests,
        "ramp_s": asked.ramp_s,
        "failed": len(seen.failed),
        "changed": len(changed),
        "largest_difference": float(f"{max(differences.values(), default=0.0):.2g}"),
        "p50_ms": round(float(np.quantile(seen.ms, 0.5)), 1),
        "p99_ms": round(float(np.quantile(seen.ms, 0.99)), 1),
    }
