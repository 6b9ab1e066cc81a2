"""Engines side by side on one GPU: `python -m benchmarks.engine 0.8B --peer FOLDER`.

Each engine is a process of its own (`benchmarks.engines`); they take turns, workload by workload,
several times over, so that all see the same card at the same time of day. Random weights, random
token ids. Writes benchmarks/results/engine.json; `python -m benchmarks.tables` draws it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.engines.protocol import MARK
from benchmarks.results_file import Row, stamp, write
from benchmarks.shapes import SHAPES, WORKLOADS, tokens_of

CLOSED = ("race1", "race_all", "quality_all")
SAME = ("engine", "shape", "mode", "work", "loop", "clients")


class Worker:
    """One engine's process."""

    def __init__(self, name: str, shape: str, path: list[str]) -> None:
        """path: folders before everything else on the engine's path."""
        self.name = name
        paths = [*path, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.engines", name, shape],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        """The next answer; an error if the engine has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                found: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return found
        return {"error": "the engine has ended"}

    def do(self, what: str, **arguments: Any) -> dict[str, Any]:
        """One command's answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"error": "the engine has ended"}
        return self.answer()


def latencies(worker: Worker, work: str, times: int) -> tuple[list[float], dict[str, Any]]:
    """(milliseconds of single requests, what is known of the GPU's share)."""
    if worker.name == "floor":
        return [], worker.do("replay", work=work, times=times)
    return worker.do("one", work=work, times=times).get("ms", []), worker.do(
        "replay", work=work, times=times
    )


def measure(workers: list[Worker], shape: str, passes: int, times: int) -> list[Row]:
    """One request at a time, engines in turn."""
    rows: list[Row] = []
    for work in WORKLOADS:
        spans: dict[str, list[float]] = {w.name: [] for w in workers}
        replays: dict[str, list[float]] = {w.name: [] for w in workers}
        for _ in range(passes):
            for worker in workers:
                found, replay = latencies(worker, work, times)
                spans[worker.name] += found
                if replay.get("ms") is not None:
                    replays[worker.name].append(replay["ms"])
        for worker in workers:
            row: Row = {"engine": worker.name, "shape": shape, "mode": "default", "work": work}
            row |= {"loop": "single", "clients": 1, "tokens": tokens_of(work)}
            if replays[worker.name]:
                row["replay_ms"] = round(statistics.median(replays[worker.name]), 3)
            if ordered := sorted(spans[worker.name]):
                row["p50_ms"] = round(statistics.median(ordered), 3)
                row["p90_ms"] = round(ordered[int(0.9 * len(ordered))], 3)
                row["p99_ms"] = round(ordered[int(0.99 * len(ordered))], 3)
            if "replay_ms" in row or "p50_ms" in row:
                print(json.dumps(row), flush=True)
                rows.append(row)
    return rows


def measure_loops(
    workers: list[Worker], shape: str, clients: list[int], seconds: float
) -> list[Row]:
    """Closed loops, engines in turn."""
    rows: list[Row] = []
    for work in CLOSED:
        for count in clients:
            for worker in workers:
                if worker.name == "floor":
                    continue
                found = worker.do("closed", work=work, clients=count, seconds=seconds)
                row: Row = {"engine": worker.name, "shape": shape, "mode": "default", "work": work}
                row |= {"loop": "closed", "clients": count, **found}
                if "rps" in found:
                    row["tok_per_s"] = round(found["rps"] * tokens_of(work))
                    rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    """Measures one shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--peer", type=Path, help="folder with flide 0.1.4 and fla 0.5.2")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--times", type=int, default=15, help="single requests a pass")
    parser.add_argument("--clients", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--profile", nargs="*", default=[], metavar="WORK")
    parser.add_argument("--host", nargs="*", default=[], metavar="WORK")
    parser.add_argument("--check", nargs="*", default=[], metavar="WORK")
    args = parser.parse_args()
    workers = [Worker(name, args.shape, []) for name in ("floor", "ours")]
    if args.peer:
        workers.append(Worker("flide", args.shape, [str(args.peer)]))
    for worker in workers:
        print(worker.name, worker.answer(), flush=True)
    ours = workers[1]
    for what, works in (("check", args.check), ("host", args.host), ("profile", args.profile)):
        extra = {"check": {"most": 3}, "host": {"times": 30}, "profile": {}}[what]
        for work in works:
            print(what, work, json.dumps(ours.do(what, work=work, **extra)), flush=True)
    rows = measure(workers, args.shape, args.passes, args.times)
    rows += measure_loops(workers, args.shape, args.clients, args.seconds)
    print("written to", write("engine", stamp(rows), SAME))


if __name__ == "__main__":
    main()
