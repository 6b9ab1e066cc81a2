"""Routing policies compared: `python -m router.simulate [fleets|thousand|faults|sweep|time] ...`.

Simulates agents whose histories grow as in agent_trajectories, and documents of Zipf popularity,
over 8 to 1,000 replicas and several router processes with stats as old as Serve would have them.
Without a name every part runs. Writes benchmarks/results/simulation.json and simulation.png.

`computed_over_needed`: tokens computed over those that one unlimited cache would compute;
`computed_over_oracle`: that figure over the oracle's, who sees every replica's contents and queue.
Costs are those of 0.8B on an H200; `cost_scale` 6.8 is 4B by the ratio of the two floors for 6,200
tokens.
"""

import argparse
import dataclasses
import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from router.policy import Limits, Load, Policy
from router.receiver import Receiver
from router.routing_key import route_key
from router.sim_fleet import CostModel, Replica
from router.sim_loop import Fault, Result, Scenario, Simulation, per_window
from router.sim_policies import (
    Chooser,
    ConsistentHash,
    Oracle,
    Ours,
    PrefixAffinity,
    RoundRobin,
    TwoChoices,
)
from router.sim_workload import Shape, load_shapes

if TYPE_CHECKING:
    from benchmarks.results_file import Row

POLICIES = ("oracle", "ours", "consistent hash", "two choices", "round robin", "prefix affinity")
FLEETS = {
    "8 replicas, 30% busy": Scenario(8, 800, 2, think_s=1.0, documents_per_s=40),
    "8 replicas, 70% busy": Scenario(8, 800, 2, seconds=92, think_s=0.4, documents_per_s=60),
    "8 replicas, 90% busy": Scenario(8, 800, 2, seconds=92, think_s=0.3, documents_per_s=60),
    "64 replicas, 40% busy": Scenario(
        64, 6400, 4, think_s=5.0, documents_per_s=26, cost=CostModel(scale=6.8)
    ),
}
THOUSAND = {
    "1,000 replicas, 40% busy": Scenario(
        1000, 100_000, 16, seconds=92, think_s=5.0, documents_per_s=400, cost=CostModel(scale=6.8)
    )
}
SWEPT: dict[str, tuple[float, ...]] = {
    "margin_steps": (0.5, 1.0, 2.0, 4.0),
    "recompute_share": (0.02, 0.05, 0.1, 0.2, 1.0),
    "hot": (4.0, 8.0, 20.0, 60.0),
    "others": (1, 2, 4),
    "holders": (2, 8, 16),
}
FAULT_AT_S, FAULT_SPAN_S = 60.0, 30.0
TIMED = {
    "choice": "choice, 120 kB",
    "of hot states": "choice, 120 kB, 60 requests a minute",
    "waits": "choice, 120 kB, replicas wait 0 to 400 ms",
}


def make(name: str, limits: Limits | None, replicas: list[Replica], s: Scenario) -> Chooser:
    """A policy of `POLICIES` over a scenario's fleet."""
    if name == "ours":
        return Ours(replicas, s.routers, s.seed, limits)
    if name == "oracle":
        return Oracle(replicas, s.routers, s.seed, s.cost)
    others: dict[str, Callable[[list[Replica], int, int], Chooser]] = {
        "round robin": RoundRobin,
        "two choices": TwoChoices,
        "consistent hash": ConsistentHash,
        "prefix affinity": PrefixAffinity,
    }
    return others[name](replicas, s.routers, s.seed)


def run(
    work: str, scenario: Scenario, policy: str, shapes: list[Shape], limits: Limits | None = None
) -> "tuple[Row, Simulation]":
    """One simulation and its row, `computed_over_oracle` left out."""
    began = time.perf_counter()
    simulation = Simulation(scenario, partial(make, policy, limits), shapes)
    result = simulation.run()
    latencies = after(result, scenario.ramp_s, scenario.seconds)
    windows = per_window(result)[: int((scenario.seconds - scenario.ramp_s) // 60)]
    totals = result.totals
    busy = [sum(w) / len(w) / 60_000 for w in result.windows[: len(windows)]]
    row: Row = {
        "engine": {"ours": "ours", "oracle": "oracle"}.get(policy, "ray"),
        "work": work,
        "policy": policy,
        "replicas": scenario.replicas,
        "agents": scenario.agents,
        "routers": scenario.routers,
        "stats_period_s": scenario.stats_period_s,
        "cost_scale": scenario.cost.scale,
        "answered": result.answered,
        "failed": result.asked - result.answered - result.waiting,
        "retried": result.retried,
        "computed_over_needed": round(totals.computed / totals.needed, 4),
        "p50_ms": round(float(np.quantile(latencies, 0.5)), 2),
        "p99_ms": round(float(np.quantile(latencies, 0.99)), 2),
        "work_p99_over_mean": round(float(np.mean([w[0] for w in windows])), 4),
        "max_work_share": round(float(np.mean([w[1] for w in windows])), 4),
        "busy": round(float(np.mean(busy)), 4),
        "moved_share": round(result.moved / max(1, result.answered), 4),
        "simulated_in_s": round(time.perf_counter() - began, 1),
    }
    return row, simulation


def after(
    result: Result, begin: float, end: float
) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """Latencies in ms of what was answered between two times."""
    when = np.array(result.when)
    return np.array(result.latencies, np.float32)[(when >= begin) & (when < end)]


def compared(scenarios: dict[str, Scenario], shapes: list[Shape]) -> "list[Row]":
    """Every policy on every scenario."""
    rows: list[Row] = []
    for work, scenario in scenarios.items():
        best = 1.0
        for policy in POLICIES:
            row, _ = run(work, scenario, policy, shapes)
            over = float(row["computed_over_needed"] or 0)
            best = over if policy == "oracle" else best
            rows.append(shown({**row, "computed_over_oracle": round(over / best, 4)}))
    return rows


def faults(shapes: list[Shape]) -> "list[Row]":
    """One replica, a tenth and half of 40 die or join, 30 s before and after compared."""
    rows: list[Row] = []
    for joins in (False, True):
        for share in (0.0, 0.1, 0.5):
            fault = Fault(FAULT_AT_S, joins, share)
            scenario = Scenario(
                40, 4000, 4, seconds=92, think_s=1.0, documents_per_s=100, faults=(fault,)
            )
            what = f"{'one' if not share else f'{share:.0%}'} of 40 {'join' if joins else 'die'}"
            for policy in ("ours", "oracle", "consistent hash"):
                row, simulation = run(what, scenario, policy, shapes)
                rows.append(shown({**row, **around(simulation.result)}))
    return rows


def around(result: Result) -> "Row":
    """Tokens computed over needed, and p99, in the 30 s before and after a fault."""
    found: Row = {}
    marks = {round(when): (computed, needed) for when, computed, needed in result.marks}
    for name, begin in (("before", FAULT_AT_S - FAULT_SPAN_S), ("after", FAULT_AT_S)):
        (c0, n0), (c1, n1) = marks[round(begin)], marks[round(begin + FAULT_SPAN_S)]
        latencies = after(result, begin, begin + FAULT_SPAN_S)
        found[f"computed_over_needed_{name}"] = round((c1 - c0) / (n1 - n0), 4)
        found[f"p99_ms_{name}"] = round(float(np.quantile(latencies, 0.99)), 2)
        found[f"max_ms_{name}"] = round(float(latencies.max()), 2)
    return found


def sweep(shapes: list[Shape]) -> "list[Row]":
    """Each constant of `Limits` varied alone, on two fleets."""
    rows: list[Row] = []
    for work in ("8 replicas, 70% busy", "64 replicas, 40% busy"):
        for name, values in SWEPT.items():
            for value in values:
                change: dict[str, Any] = {name: value}
                limits = dataclasses.replace(Limits(), **change)
                row, _ = run(f"sweep, {work}", FLEETS[work], "ours", shapes, limits)
                rows.append(shown({**row, "constant": name, "value": value}))
    return rows


def timed() -> "list[Row]":
    """Microseconds of hashing 120 kB and of choosing among 1,000 replicas, on this machine."""
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefgh .,", k=120_000)) for _ in range(100)]
    policy, receiver = Policy(), Receiver()
    load = Load(5.0, 5.0, 3.0, 380.0)
    told = receiver.stats(load, 0.0).encode()
    policy.set_replicas({f"engine#{i}": told for i in range(1000)}, 0.0)
    spent: dict[str, list[float]] = {}
    now = 0.0
    for name, rounds, gap in (("choice", 30, 0.2), ("of hot states", 30, 0.01), ("waits", 30, 0.2)):
        if name == "waits":
            for i in range(1000):
                waits = load._replace(wait_ms=rng.random() * 400, mean_wait_ms=rng.random() * 400)
                policy.board.answered(f"engine#{i}", waits, now)
        for text in texts * rounds:
            now += gap
            begin = time.perf_counter()
            key = route_key({"state": text})
            hashed = time.perf_counter()
            policy.choose(key, now)
            spent.setdefault(TIMED[name], []).append(time.perf_counter() - hashed)
            spent.setdefault("hash of 120 kB", []).append(hashed - begin)
    rows: list[Row] = []
    for work, seconds in spent.items():
        p50, p99 = (round(1e6 * float(np.quantile(seconds, q)), 1) for q in (0.5, 0.99))
        rows.append(
            shown({"engine": "ours", "work": work, "replicas": 1000, "p50_us": p50, "p99_us": p99})
        )
    return rows


def shown(row: "Row") -> "Row":
    """The row, printed."""
    print(row, flush=True)
    return row


def plot(rows: "list[Row]", path: Path) -> None:
    """Tokens computed and p99 by fleet and policy."""
    import matplotlib.pyplot as plt

    fleets = list(dict.fromkeys(str(r["work"]) for r in rows if "computed_over_oracle" in r))
    figure, panels = plt.subplots(1, 3, figsize=(13, 4.2))
    width = 0.8 / len(POLICIES)
    shown_fields = (
        ("computed_over_needed", "tokens computed / needed"),
        ("p99_ms", "p99 latency, ms"),
        ("work_p99_over_mean", "work in 60 s, p99 replica / mean"),
    )
    for panel, (field, label) in zip(panels, shown_fields, strict=True):
        for i, policy in enumerate(POLICIES):
            mine = {r["work"]: r for r in rows if r.get("policy") == policy}
            heights = [float(mine[f][field] or 0) if f in mine else 0.0 for f in fleets]
            panel.bar([x + i * width for x in range(len(fleets))], heights, width, label=policy)
        panel.set_yscale("log")
        panel.set_title(label)
        names = [f.replace(", ", ",\n") for f in fleets]
        panel.set_xticks([x + 0.4 for x in range(len(fleets))], names, fontsize=7)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=len(POLICIES))
    figure.suptitle("Simulated: 100 agents a replica, behind one opening of 8 KiB, and documents")
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=110)


def main() -> None:
    """Runs what is named and writes its rows; the plot is of all rows there are."""
    parts: dict[str, Callable[[list[Shape]], list[Row]]] = {
        "fleets": partial(compared, FLEETS),
        "thousand": partial(compared, THOUSAND),
        "faults": faults,
        "sweep": sweep,
        "time": lambda _: timed(),
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "part", nargs="*", choices=[[], *parts], help="what to run; all if left out"
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/workloads"))
    args = parser.parse_args()
    shapes = load_shapes(args.data)
    for part in args.part or parts:
        _keep(parts[part](shapes))


def _keep(rows: "list[Row]") -> None:
    """Writes rows where results are kept; prints them where only the package is installed."""
    try:
        from benchmarks.results_file import RESULTS, stamp, write
    except ModuleNotFoundError:
        print("benchmarks/ is not here: nothing is written, rows are printed", file=sys.stderr)
        print(json.dumps(rows))
        return
    path = write("simulation", stamp(rows), ("work", "policy", "constant", "value"))
    plot(json.loads(path.read_text()), RESULTS / "simulation.png")


if __name__ == "__main__":
    main()
