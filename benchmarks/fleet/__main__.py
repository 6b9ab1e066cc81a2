"""`python -m benchmarks.fleet WORK ... [--size ci]`: runs works, writes each one's row to
results/fleet.json as it comes.

Works: replay, kill-replica, kill-node, scale. Sizes: ci, small for a quick look, full for all
there is, in which `kill-replica` kills one each time --kill-each requests are answered.
"""

import argparse
import json
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.fleet.callers import SIZES, callers, records_of
from benchmarks.fleet.cluster import Nodes, cluster_of
from benchmarks.fleet.oracle import ask_one_engine
from benchmarks.fleet.policies import POLICIES, placing, with_sessions
from benchmarks.fleet.works import NODES, Asked, kill, scale_1_3_1, trajectory_replay
from benchmarks.results_file import Row, stamp, write
from flide_engine.config import EngineConfig
from loadtest.workloads import DATA

WORKS = ("replay", "kill-replica", "kill-node", "scale")
ENGINE: dict[str, Any] = {"model": "nano", "device": "cpu"}
UNLIMITED = 4 << 30
LONGEST = 40_960
"""Tokens of a prompt, where histories are not cut: the longest one has 37,800."""

KILLS = {"small": (12, 30), "ci": (50, 120)}

WHOLE: dict[str, Any] = {
    "pool_bytes": 1 << 30,
    "max_prompt_tokens": LONGEST,
    "max_queue_ms": 300_000,
    "max_queued_tokens": 1 << 22,
}
"""Options of engines that are asked all there is: room for every state, so that only the routing
counts, and for all callers who begin at once.
"""

WHOLE_DEADLINE_S = 300.0
SAME = ("card", "shape", "mode", "work", "size", "replicas", "gpus", "killed", "policy", "records")


def kills(what: str, size: str, requests: int, each: int = 300) -> list[int]:
    """After how many answers something is killed: of `each` so many if all there is is asked; of
    nodes once.
    """
    at = [n for n in KILLS.get(size, range(each, requests, each)) if n < requests]
    return at[:1] if what == "node" else at


def run(work: str, asked: Asked, nodes: Nodes, args: argparse.Namespace) -> Row:
    """One work's row."""
    if work == "replay":
        return trajectory_replay(asked, nodes, args.replicas)
    if work == "scale":
        return scale_1_3_1(asked, nodes, max(1, len(asked.callers[0].requests) // 8))
    what = work.removeprefix("kill-")
    at = kills(what, args.size, asked.requests, args.kill_each)
    if what == "node":
        return kill(asked, nodes, 2, what, at, gpus_per_replica=1, cpus_per_replica=0)
    return kill(asked, nodes, args.replicas, what, at)


def ask_for(args: argparse.Namespace) -> Asked:
    """Callers of the wanted size, and what one engine says to them."""
    size, name = SIZES[args.size], args.size
    if args.agents or args.steps:
        agents, steps = args.agents or size.agents, args.steps or size.steps
        asks = min(size.document_asks, agents * steps // 4)
        size = replace(size, agents=agents, steps=steps, document_asks=asks)
        name = f"{name}, {agents} x {steps}"
    everyone = callers(size, args.data)
    began = time.monotonic()
    config = EngineConfig(**ENGINE, pool_bytes=UNLIMITED, max_prompt_tokens=LONGEST)
    (told,) = ask_one_engine(config, everyone)
    spent = time.monotonic() - began
    print(f"one engine computes {told.computed} tokens in {spent:.0f} s", flush=True)
    if args.size != "full":
        return Asked(name, everyone, told, ENGINE)
    return Asked(name, everyone, told, ENGINE | WHOLE, deadline_s=WHOLE_DEADLINE_S)


def keep(rows: list[Row], out: Path | None) -> None:
    """Writes what there is, so that a run cut short leaves it."""
    if out:
        out.write_text(json.dumps(stamp(rows)))
    else:
        write("fleet", stamp(rows), SAME)


def main() -> None:
    """Runs what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("works", nargs="+", choices=WORKS)
    parser.add_argument("--size", choices=SIZES, default="ci")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=["ours"])
    parser.add_argument("--agents", type=int, help="fewer than the size has")
    parser.add_argument("--steps", type=int, help="fewer than the size has")
    parser.add_argument("--kill-each", type=int, default=300, help="in the full size")
    parser.add_argument(
        "--data", type=Path, default=DATA, help="folder of workload files; synthetic if absent"
    )
    parser.add_argument("--out", type=Path, help="file for the rows, instead of results/fleet.json")
    args = parser.parse_args()
    kind = records_of(args.data)
    asked, rows = ask_for(args), list[Row]()
    with cluster_of(NODES) as nodes:
        for policy, work in product(args.policies, args.works):
            of_policy = replace(asked, callers=with_sessions(asked.callers, policy))
            began = time.monotonic()
            with placing(policy):
                row = run(work, of_policy, nodes, args)
            rows.append({**row, "policy": policy, "records": kind})
            keep(rows, args.out)
            print(f"{json.dumps(rows[-1])} in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
