"""Bits of deterministic mode on a GPU: `python -m benchmarks.deterministic 0.8B`.

Random requests in random company, forked and resumed anywhere, against each prompt alone through
the same engine (`benchmarks.bits`); then fixed prompts through engines of other processes: what
replicas and a restart would answer. Writes benchmarks/results/deterministic.json. What the mode
costs is measured by `benchmarks.engine --modes default deterministic`.
"""

import argparse
import hashlib
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.bits import Bits, Sizes
from benchmarks.results_file import RESULTS, Row, stamp, write
from benchmarks.shapes import LABELS, SHAPES
from benchmarks.weights import weights_folder
from flide_engine import Engine, EngineConfig
from flide_engine.layout.stream import Job
from flide_engine.layout.tree import build_forest

SIZES = Sizes(document=1200, questions=16, question=110, company=3)
SAME = ("engine", "shape", "mode", "work")
VOCABULARY = 240_000


def harness(weights: Path, mode: str) -> tuple[Engine, Bits]:
    """An engine, and what compares on it."""
    engine = Engine(
        EngineConfig(
            model=str(weights),
            device="cuda",
            deterministic=mode == "deterministic",
            keep_checkpoints=False,
            pool_bytes=12 << 30,
        )
    )
    runner = engine._loop._runner
    model = getattr(runner.executor, "model", None)
    return engine, Bits(runner, LABELS, VOCABULARY, model, runner._pool)


def fingerprint(bits: Bits, count: int = 200) -> str:
    """Hash of the logits of fixed prompts."""
    rng, seen = np.random.default_rng(7), hashlib.sha256()
    for _ in range(count):
        prompt = rng.integers(0, VOCABULARY, rng.integers(1, 1500)).astype(np.int32)
        logits, _ = bits.run([Job(build_forest([prompt]))], 1)
        seen.update(logits[0].tobytes())
    return seen.hexdigest()


def compare(bits: Bits, count: int, seconds: float) -> float:
    """Rounds until so many comparisons are made, or the time is over: the seconds it took."""
    rng, began = np.random.default_rng(0), time.monotonic()
    while bits.compared < count and time.monotonic() - began < seconds:
        bits.check(rng, SIZES, rounds=8, documents=5)
        print(
            f"{bits.compared} compared, {bits.resumed} resumed, {len(bits.differing)} differ",
            bits.differing[:1],
            flush=True,
        )
    return time.monotonic() - began


def replicas(shape: str, mode: str, weights: Path, count: int) -> list[str]:
    """Fingerprints of engines in other processes, at once on the same card."""
    command = [sys.executable, "-m", "benchmarks.deterministic", shape, "--probe"]
    command += ["--modes", mode, "--weights", str(weights.parent)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    return [process.communicate()[0].split()[-1] for process in running]


def main() -> None:
    """Compares, and exits with 1 if a bit of deterministic mode differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--modes", nargs="*", default=["deterministic", "default"])
    parser.add_argument("--compare", type=int, default=20_000, help="comparisons a mode")
    parser.add_argument("--seconds", type=float, default=200, help="most of a mode")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--probe", action="store_true", help="only print a fingerprint")
    parser.add_argument("--weights", type=Path, help="folder for weights")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    weights = weights_folder(args.shape, args.weights)
    rows: list[Row] = []
    for mode in args.modes:
        engine, bits = harness(weights, mode)
        own = engine._loop.call(lambda bits=bits: fingerprint(bits))
        if args.probe:
            print(own)
            engine.close()
            return
        seconds = engine._loop.call(lambda bits=bits: compare(bits, args.compare, args.seconds))
        engine.close()
        others = replicas(args.shape, mode, weights, args.replicas)
        row: Row = {"engine": "ours", "shape": args.shape, "mode": mode, "work": "random rounds"}
        row |= {"compared": bits.compared, "resumed": bits.resumed, "seconds": round(seconds, 1)}
        row |= {"differing": len(bits.differing)}
        row |= {"largest": max((d.largest for d in bits.differing), default=0.0)}
        row |= {"replicas": len(others), "replicas_differing": sum(o != own for o in others)}
        print(row, flush=True)
        rows.append(row)
    print("written to", write("deterministic", stamp(rows), SAME, args.out))
    exact = [row for row in rows if row["mode"] == "deterministic"]
    sys.exit(any(row["differing"] or row["replicas_differing"] for row in exact))


if __name__ == "__main__":
    main()
