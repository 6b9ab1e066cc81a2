"""Bits of deterministic mode on a GPU: `python -m benchmarks.deterministic 0.8B`.

Random requests in random company, forked, cut, resumed from every tier, handed over and asked again
after faults, against each prompt alone through the same engine (`benchmarks.bits`); then the same
prompts in other processes: replicas, and one that restarts from the files of a first. `--peer` asks
the same kinds of requests of flide 0.1.4 in its batch-invariant mode. Writes
benchmarks/results/deterministic.json. What the mode costs is measured by
`benchmarks.engine --modes default deterministic`.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.bits.company import Tally
from benchmarks.bits.elsewhere import ANOTHER, RESTARTED, Elsewhere, answer, read, write
from benchmarks.bits.histories import Ask, Histories
from benchmarks.bits.questions import questions
from benchmarks.bits.random_turns import NAMES, RandomTurns, Sizes
from benchmarks.bits.watch import Watched
from benchmarks.results_file import RESULTS, Row, stamp
from benchmarks.results_file import write as write_rows
from benchmarks.shapes import LABELS, SHAPES
from benchmarks.weights import weights_folder
from benchmarks.worker import Worker, started
from flide_engine import Engine, EngineConfig

SIZES = Sizes(grow=600, long=10_000, questions=8, pieces=(128, 4096))
SMALL_SIZES = Sizes(grow=150, long=1500, questions=3, pieces=(128, 512))
SAME = ("engine", "shape", "mode", "work")
VOCABULARY, QUESTION = 240_000, 110
COUNTS = {"0.8B": 20_000, "2B": 5_000, "4B": 2_000, "9B": 1_000, "test": 300}
WITH_FILES = 0.05
"""Part of the comparisons that are made with files: each checkpoint that is kept is written."""

CHUNK = 10


def engine_config(
    args: argparse.Namespace, weights: Path, mode: str, files: Path | None
) -> EngineConfig:
    """What is measured. files: folder of checkpoints on disk."""
    on_gpu = args.shape != "test"
    unit = 1 << 30 if on_gpu else 1 << 21
    common: dict[str, Any] = {
        "model": str(weights), "pool_bytes": (4 if args.asked else 12) * unit,
        "host_bytes": 4 * unit, "disk_folder": files, "disk_bytes": 16 * unit,
        "max_queued_tokens": 10**9, "max_queue_ms": 10**9,
    }  # fmt: skip
    if on_gpu:
        return EngineConfig(device="cuda", deterministic=mode == "deterministic", **common)
    return EngineConfig(device="cpu", max_round_tokens=1024, max_prompt_tokens=4096, **common)


def measure(args: argparse.Namespace, mode: str, weights: Path) -> Row:
    """One mode: comparisons without files, then with files, then in other processes."""
    count = args.count if mode == "deterministic" else args.others
    sizes = SMALL_SIZES if args.shape == "test" else SIZES
    with tempfile.TemporaryDirectory() as folder:
        places: list[Path | None] = [None]
        made = lambda: Engine(engine_config(args, weights, mode, places[0]))  # noqa: E731
        histories = Histories(made, LABELS, VOCABULARY, QUESTION)
        turns = RandomTurns(histories, sizes, seed=0, marks=True)
        spent = turns.run(round(count * (1 - WITH_FILES)), left(args) / 2)
        places[0] = Path(folder) / "files"
        histories.restart()
        turns = RandomTurns(histories, sizes, seed=1, marks=False)
        spent += turns.run(count, left(args) / 5)
        watched = histories.watched
        row: Row = {"engine": "ours", "shape": args.shape, "mode": mode, "work": "random rounds"}
        row |= {"compared": watched.compared, "resumed": watched.resumed}
        row |= {"seconds": round(spent, 1), "differing": len(watched.differing)}
        row |= {"largest": max((d.largest for d in watched.differing), default=0.0)}
        row |= elsewhere(args, mode, histories, Path(folder))
    row |= {"by_path": dict(watched.by_path), "wrong": dict(watched.wrong)}
    return row


def elsewhere(args: argparse.Namespace, mode: str, histories: Histories, folder: Path) -> Row:
    """The states as they are, asked about in other processes; closes the engine."""
    asked = []
    for seed, name in enumerate(NAMES):
        histories.ask([Ask(name, "some", 2, seed)])  # leaves a checkpoint
        histories.grow(name, 50, seed)
        asked += [
            questions(histories.texts[name], kind, 8, seed, VOCABULARY, QUESTION)
            for kind in ("some", "tree")
        ]
    watched = histories.watched
    want = watched.alone([p for request in asked for p in request.prompts])
    histories.to_disk()
    histories.close()
    write(folder / "asked.npz", asked)
    options = [args.shape, "--modes", mode, "--weights", str(args.weights)]
    files = ["--files", str(folder / "files")]
    others = [(ANOTHER, options)] * args.replicas + [(RESTARTED, options + files)]
    begun = [
        Elsewhere.begun(name, told, folder / "asked.npz", number)
        for number, (name, told) in enumerate(others)
    ]
    found = [(other.name, other.differing(want)) for other in begun]
    for name, differing in found:
        print(f"{name}: {len(want)} compared, {differing} differ", flush=True)
        watched.by_path[name] += len(want)
        watched.wrong.update({name: differing} if differing else {})
    differ = sum(bool(differing) for _, differing in found)
    return {"replicas": len(found), "replicas_differing": differ}


def of_peer(args: argparse.Namespace, worker: Worker) -> Row:
    """flide's batch-invariant mode: against the prompt alone, and against the request alone, which
    is what it promises.
    """
    tally, began, seed = Tally(), time.monotonic(), 0
    while tally.compared < args.others and left(args) > 0:
        found = worker.do("company", rounds=CHUNK, seed=seed, seconds=left(args))
        if "error" in found:
            print("flide:", found["error"], flush=True)
            break
        tally.add(found)
        seed += 1
        spent = time.monotonic() - began
        print(
            f"flide, {spent:.0f} s: {tally.compared:,} of {args.others:,} compared,"
            f" {tally.differing:,} differ from the prompt alone, {tally.in_company:,} from the"
            " same request alone",
            flush=True,
        )
    row: Row = {"engine": "flide", "shape": args.shape, "mode": "deterministic"}
    row |= {"work": "random rounds", "resumed": 0, "seconds": round(time.monotonic() - began, 1)}
    return row | tally.told()


def in_another_process(args: argparse.Namespace, weights: Path) -> None:
    """What `Elsewhere` begins."""
    engine = Engine(engine_config(args, weights, args.modes[0], args.files))
    try:
        answer(Watched(engine, LABELS), read(args.asked), args.files is not None, args.answers)
    finally:
        engine.close()


def parsed() -> argparse.Namespace:
    """Arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--modes", nargs="*", default=["deterministic", "default"])
    parser.add_argument("--peer", type=Path, help="folder with flide 0.1.4 and fla 0.5.2")
    parser.add_argument("--count", type=int, help="comparisons in deterministic mode")
    parser.add_argument("--others", type=int, default=2_000, help="of the default mode, of flide")
    parser.add_argument("--seconds", type=float, default=480, help="when no more is begun")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--weights", type=Path, help="folder for weights")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--asked", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--answers", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--files", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.count = args.count or COUNTS[args.shape]
    args.until = time.monotonic() + args.seconds
    return args


def left(args: argparse.Namespace) -> float:
    """Seconds until no more is to be begun."""
    return max(0.0, float(args.until) - time.monotonic())


def main() -> None:
    """Compares, and exits with 1 if a bit of our deterministic mode differs."""
    args = parsed()
    weights = weights_folder(args.shape, args.weights)
    args.weights = weights.parent
    if args.asked:
        in_another_process(args, weights)
        return
    workers = []
    if args.peer:  # it starts beside ours
        path, mode = [str(args.peer)], "deterministic"
        workers = [Worker("flide", args.shape, path, mode, weights=str(weights))]
    rows = []
    for mode in args.modes:
        rows.append(measure(args, mode, weights))
        print(rows[-1], flush=True)
    for worker in started(workers):
        rows.append(of_peer(args, worker))
        print(rows[-1], flush=True)
        worker.stop()
    print("written to", write_rows("deterministic", stamp(rows), SAME, args.out))
    ours = [r for r in rows if (r["engine"], r["mode"]) == ("ours", "deterministic")]
    sys.exit(any(row["differing"] or row["replicas_differing"] for row in ours))


if __name__ == "__main__":
    main()
