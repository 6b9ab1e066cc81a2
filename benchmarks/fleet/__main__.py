"""`python -m benchmarks.fleet WORK ... [--size ci]`: runs works, writes results/fleet.json.

Works: replay, kill-replica, kill-node, scale. With --out rows go to that file instead.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.fleet.callers import SIZES, callers
from benchmarks.fleet.oracle import ask_one_engine
from benchmarks.fleet.works import HEAD, Asked, kill, scale_1_3_1, trajectory_replay
from benchmarks.results_file import Row, stamp, write
from flide_engine.config import EngineConfig
from loadtest.workloads import DATA

ENGINE: dict[str, Any] = {"model": "nano", "device": "cpu"}
UNLIMITED = 4 << 30
KILLS = {"small": (12, 30), "ci": (50, 120), "full": tuple(range(300, 3300, 300))}


def run(work: str, asked: Asked, count: int) -> Row:
    """One work's row."""
    if work == "replay":
        return trajectory_replay(asked, count, [HEAD])
    if work == "scale":
        return scale_1_3_1(asked, [HEAD], max(2, len(asked.callers[0].requests) // 2))
    what = work.removeprefix("kill-")
    nodes = [HEAD]
    if what == "node":
        # an engine takes a whole (pretended) GPU, so there is one a node; Gateways have the head
        nodes = [{**HEAD, "num_gpus": 1}, {"num_cpus": 0, "num_gpus": 1}]
        more = {"gpus_per_replica": 1, "cpus_per_replica": 0}
        return kill(asked, 2, nodes, what, KILLS[asked.size], **more)
    return kill(asked, count, nodes, what, KILLS[asked.size])


def main() -> None:
    """Runs what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    works = ("replay", "kill-replica", "kill-node", "scale")
    parser.add_argument("works", nargs="+", choices=works)
    parser.add_argument("--size", choices=SIZES, default="ci")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of workload files")
    parser.add_argument("--out", type=Path, help="file for the rows, instead of results/fleet.json")
    args = parser.parse_args()
    everyone = callers(SIZES[args.size], args.data)
    told = ask_one_engine(everyone, EngineConfig(**ENGINE, pool_bytes=UNLIMITED))
    print(f"one engine computes {told.computed} tokens", flush=True)
    asked = Asked(args.size, everyone, told, ENGINE)
    rows = []
    for work in args.works:
        rows.append(run(work, asked, args.replicas))
        print(json.dumps(rows[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(stamp(rows)))
    else:
        same = ("card", "shape", "mode", "work", "size", "replicas", "killed", "policy")
        print("written to", write("fleet", stamp(rows), same))


if __name__ == "__main__":
    main()
