"""Engines side by side on one GPU: `python -m benchmarks.engine 0.8B --peer FOLDER`.

Each engine is a process of its own (`benchmarks.engines`); they take turns, workload by workload,
several times over, so that all see the same card at the same time of day. The same random weights
for all, random token ids. `--ablations` adds our engine without one of its parts at a time,
`--late-rounds` ours with `late_rounds` on (mode `late`). Writes benchmarks/results/engine.json;
`python -m benchmarks.tables` draws it.
"""

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results_file import RESULTS, Row, stamp, write
from benchmarks.shapes import SHAPES, WORKLOADS, tokens_of
from benchmarks.weights import weights_folder
from benchmarks.worker import Worker, started

CLOSED = ("race1", "race_all", "quality_all")
ABLATIONS = ("no_fork", "no_graphs", "padded")
ABLATED = ("race1", "race_all", "multirc", "quality_all", "short36x9")
ABLATED_TIMES = 5
SAME = ("engine", "shape", "mode", "work", "loop", "clients")


@dataclass(frozen=True)
class Side:
    """One column of the comparison. mode: of the row; asked: what each command says besides.

    works: what it is measured on. times: single requests a pass, at most.
    """

    worker: Worker
    engine: str
    mode: str
    asked: dict[str, Any]
    works: Sequence[str]
    times: int

    def do(self, what: str, **arguments: Any) -> dict[str, Any]:
        """One command's answer."""
        return self.worker.do(what, **arguments, **self.asked)

    @property
    def head(self) -> Row:
        """Beginning of its rows."""
        return {"engine": self.engine, "mode": self.mode}


def sides_of(workers: Sequence[Worker], works: Sequence[str], times: int) -> list[Side]:
    """What is compared: every worker, and every ablation of the one that has them."""
    found = []
    for worker in workers:
        if worker.name != "ablations":
            found.append(Side(worker, worker.name, worker.mode, {}, works, times))
            continue
        some = [work for work in works if work in ABLATED]
        for mode in ABLATIONS:
            most = min(times, ABLATED_TIMES)
            found.append(Side(worker, "ours", mode, {"mode": mode}, some, most))
    return found


def latencies(side: Side, work: str, times: int) -> tuple[list[float], dict[str, Any]]:
    """(milliseconds of single requests, what is known of the GPU's share)."""
    if side.engine == "floor":
        return [], side.do("replay", work=work, times=times)
    spans = side.do("one", work=work, times=min(times, side.times)).get("ms", [])
    return spans, {} if side.asked else side.do("replay", work=work, times=times)


def measure(
    sides: Sequence[Side], works: Sequence[str], shape: str, passes: int, times: int
) -> list[Row]:
    """One request at a time, engines in turn."""
    rows: list[Row] = []
    for work in works:
        here = [side for side in sides if work in side.works]
        spans: list[list[float]] = [[] for _ in here]
        replays: list[list[float]] = [[] for _ in here]
        for _ in range(passes):
            for i, side in enumerate(here):
                found, replay = latencies(side, work, times)
                spans[i] += found
                if replay.get("ms") is not None:
                    replays[i].append(replay["ms"])
        for i, side in enumerate(here):
            row: Row = {**side.head, "shape": shape, "work": work}
            row |= {"loop": "single", "clients": 1, "tokens": tokens_of(work)}
            if replays[i]:
                row["replay_ms"] = round(statistics.median(replays[i]), 3)
            if ordered := sorted(spans[i]):
                row["p50_ms"] = round(statistics.median(ordered), 3)
                row["p90_ms"] = round(ordered[int(0.9 * len(ordered))], 3)
                row["p99_ms"] = round(ordered[int(0.99 * len(ordered))], 3)
            if "replay_ms" in row or "p50_ms" in row:
                print(json.dumps(row), flush=True)
                rows.append(row)
    return rows


def measure_loops(
    sides: Sequence[Side], works: Sequence[str], shape: str, clients: list[int], seconds: float
) -> list[Row]:
    """Closed loops, engines in turn."""
    rows: list[Row] = []
    for work in (work for work in works if work in CLOSED):
        for count in clients:
            for side in sides:
                if side.engine == "floor" or work not in side.works:
                    continue
                found = side.do("closed", work=work, clients=count, seconds=seconds)
                row: Row = {**side.head, "shape": shape, "work": work}
                row |= {"loop": "closed", "clients": count, **found}
                if "rps" in found:
                    row["tok_per_s"] = round(found["rps"] * tokens_of(work))
                    rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def cached_kernels() -> int:
    """Kernels that Triton has compiled on this machine so far."""
    folder = os.environ.get("TRITON_CACHE_DIR")
    where = Path(folder) if folder else Path.home() / ".triton" / "cache"
    return len(list(where.glob("*"))) if where.is_dir() else 0


def starts(workers: Sequence[Worker], shape: str, cached: int) -> list[Row]:
    """Seconds from importing an engine to its first request, all starting beside each other."""
    rows: list[Row] = [
        {
            "engine": w.name, "mode": w.mode, "shape": shape, "work": "start", "loop": "start",
            "start_s": w.start_s, "cached_kernels": cached,
        }
        for w in workers
        if w.name in {"ours", "flide"}
    ]  # fmt: skip
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def parsed() -> argparse.Namespace:
    """Arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--peer", type=Path, help="folder with flide 0.1.4 and fla 0.5.2")
    parser.add_argument("--works", nargs="*", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--modes", nargs="*", default=["default"], help="of ours and flide")
    parser.add_argument("--ablations", action="store_true")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--times", type=int, default=15, help="single requests a pass")
    parser.add_argument("--clients", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--pool-gib", type=float, default=24)
    parser.add_argument("--round-tokens", type=int, default=8192, help="of ours, at most")
    parser.add_argument("--late-rounds", action="store_true", help="ours with late rounds, too")
    parser.add_argument("--profile", nargs="*", default=[], metavar="WORK")
    parser.add_argument("--host", nargs="*", default=[], metavar="WORK")
    parser.add_argument("--check", nargs="*", default=[], metavar="WORK")
    parser.add_argument("--weights", type=Path, help="folder for weights")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    """Measures one shape."""
    args = parsed()
    weights, cached = str(weights_folder(args.shape, args.weights)), cached_kernels()
    config = {"dtype": "bfloat16", "max_round_tokens": args.round_tokens}
    ours = {"weights": weights, "pool_gib": args.pool_gib, "config": config}
    workers = [Worker("floor", args.shape, [])]
    workers += [Worker("ours", args.shape, [], mode, **ours) for mode in args.modes]
    if args.late_rounds:
        late = {**ours, "config": {**config, "late_rounds": True}}
        workers.append(Worker("ours", args.shape, [], "late", **late))
    if args.ablations:
        pool = min(8, args.pool_gib)
        workers.append(Worker("ablations", args.shape, [], weights=weights, pool_gib=pool))
    if args.peer:
        peer = [str(args.peer)]
        workers += [Worker("flide", args.shape, peer, m, weights=weights) for m in args.modes]
    workers = started(workers)
    for worker in (w for w in workers if w.name == "ours"):
        for what, works in (("check", args.check), ("host", args.host), ("profile", args.profile)):
            extra = {"check": {"most": 3}, "host": {"times": 30}, "profile": {}}[what]
            for work in works:
                found = worker.do(what, work=work, **extra)
                print(what, worker.mode, work, json.dumps(found), flush=True)
    sides = sides_of(workers, args.works, args.times)
    rows = starts(workers, args.shape, cached)
    rows += measure(sides, args.works, args.shape, args.passes, args.times)
    write("engine", stamp(rows), SAME, args.out)  # so that a run cut short leaves what it has
    rows += measure_loops(sides, args.works, args.shape, args.clients, args.seconds)
    print("written to", write("engine", stamp(rows), SAME, args.out))
    for worker in workers:
        worker.stop()


if __name__ == "__main__":
    main()
