"""Probabilities held to float32: `python -m benchmarks.fidelity 0.8B --peer FOLDER --texts FOLDER`.

transformers in float32 answers some hundred questions, each as an isolated, uncached prompt. Our
own float32 path (the reference kernels, forked, in rounds) is held to those, and answers thousands.
Then our engine and flide 0.1.4 answer all of them in bfloat16, in the company of others, and are
held to both. Every engine reads the same random weights, every question some of the same label
rows, which are scaled so that the top probability covers 0.3 to 0.99 (`benchmarks.weights`).
Writes benchmarks/results/fidelity.json.
"""

import argparse
import json
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.requests import text_works
from benchmarks.results_file import RESULTS, Row, stamp, write
from benchmarks.shapes import LABELS, SHAPES
from benchmarks.weights import weights_folder
from benchmarks.worker import Worker, started
from flide_engine.config import EngineConfig

Floats = NDArray[np.float64]
Logits = dict[tuple[str, int], Floats]
"""By workload and seed, [questions, LABELS]."""

OPTIONS = (2, 3, 4, 5, 8, 16, len(LABELS))
"""Options of a question, in turn."""

THRESHOLDS = {"05": 0.5, "08": 0.8, "095": 0.95}

FLOAT32_TV = 1e-3
"""Largest total variation from transformers that our float32 path may have: rounding of 24 or more
layers, with room; an equation that is off by a term gives a hundred times as much."""

LOW, HIGH = 0.35, 0.98
"""The top probability's first and last percentile must lie outside: else no flip could happen."""

ENOUGH = 100
"""Questions whose percentiles mean something."""

LEAST = {"transformers": 300, "float32": 2000}
"""Questions of a whole run."""

SAME = ("engine", "shape", "mode", "against", "work")


@dataclass(frozen=True)
class Amount:
    """Requests of a workload; of how many of them transformers gets how many questions."""

    requests: int
    held: int
    questions: int


AMOUNTS = {
    "race1": Amount(120, 40, 1),
    "race_all": Amount(60, 10, 4),
    "multirc": Amount(16, 4, 10),
    "di47": Amount(8, 4, 10),
    "quality1": Amount(12, 10, 1),
    "quality_all": Amount(8, 2, 10),
    "short36x9": Amount(10, 4, 10),
    "short100x4": Amount(4, 4, 10),
    "jev2x255": Amount(1, 1, 40),
    "long24k": Amount(1, 1, 4),
}
TEXTS = Amount(4, 2, 3)


@dataclass(frozen=True)
class Difference:
    """One question: total variation, whether the top option is the same, which thresholds see
    other options above them, which have an option within 0.02, and the top probability wanted.
    """

    work: str
    tv: float
    agrees: bool
    flips: tuple[bool, ...]
    near: tuple[bool, ...]
    top: float


def options_of(work: str, seed: int, question: int) -> NDArray[np.int64]:
    """Which of LABELS are a question's options."""
    rng = np.random.default_rng([zlib.crc32(work.encode()), seed, question])
    count = OPTIONS[(seed + question) % len(OPTIONS)]
    return rng.choice(len(LABELS), count, replace=False)


def probabilities(logits: Floats) -> Floats:
    """Softmax in float64."""
    e = np.exp(logits - logits.max())
    found: Floats = e / e.sum()
    return found


def difference(work: str, wanted: Floats, got: Floats) -> Difference:
    """Of two distributions over a question's options."""
    limits = THRESHOLDS.values()
    return Difference(
        work,
        float(np.abs(wanted - got).sum() / 2),
        int(wanted.argmax()) == int(got.argmax()),
        tuple(bool(((wanted >= t) != (got >= t)).any()) for t in limits),
        tuple(bool((np.abs(wanted - t) < 0.02).any()) for t in limits),
        float(wanted.max()),
    )


def differences(wanted: Logits, got: Logits) -> list[Difference]:
    """Of all questions that both answered. Raises ValueError for a value that is not finite."""
    found = []
    for (work, seed), rows in wanted.items():
        mine = got.get((work, seed))
        if mine is None:
            continue
        if not np.isfinite(mine[: len(rows)]).all():
            raise ValueError(f"{work}, request {seed}: a logit is not finite")
        for question, (a, b) in enumerate(zip(rows, mine, strict=False)):
            at = options_of(work, seed, question)
            found.append(difference(work, probabilities(a[at]), probabilities(b[at])))
    return found


def row_of(found: list[Difference], work: str) -> Row:
    """Figures of some questions."""
    tv, top = np.array([d.tv for d in found]), np.array([d.top for d in found])
    row: Row = {"work": work, "compared": len(found)}
    row["top1_agreement"] = round(float(np.mean([d.agrees for d in found])), 5)
    for name, value in (("tv_median", np.median(tv)), ("tv_p99", np.quantile(tv, 0.99))):
        row[name] = float(f"{value:.3g}")
    row["tv_max"] = float(f"{tv.max():.3g}")
    for i, name in enumerate(THRESHOLDS):
        row[f"flips_{name}"] = sum(d.flips[i] for d in found)
        row[f"near_{name}"] = sum(d.near[i] for d in found)
    row["top_p01"], row["top_p99"] = (round(float(np.quantile(top, q)), 3) for q in (0.01, 0.99))
    return row


def rows_of(head: Row, wanted: Logits, got: Logits) -> list[Row]:
    """All questions together, then by workload."""
    found = differences(wanted, got)
    works = list(dict.fromkeys(d.work for d in found))
    rows = [row_of(found, "all")] if found else []
    rows += [row_of([d for d in found if d.work == w], w) for w in works]
    return [{**head, **row} for row in rows]


def ask(worker: Worker, work: str, seeds: list[int], most: int | None = None) -> Logits:
    """Logits of some requests of one workload; none, with a word, where the engine fails."""
    began = time.monotonic()
    answer = worker.do("logits", work=work, seeds=seeds, most=most)
    spent = time.monotonic() - began
    if "error" in answer:
        print(f"{worker.name} {worker.mode} {work}: {answer['error']}", flush=True)
        return {}
    found = {(work, s): np.array(x) for s, x in zip(seeds, answer["logits"], strict=True)}
    count = sum(len(x) for x in found.values())
    print(f"{worker.name} {worker.mode} {work}: {count} questions, {spent:.1f} s", flush=True)
    return found


def held_logits(worker: Worker, amounts: Mapping[str, Amount], seconds: float) -> Logits:
    """What transformers says, one request of each workload after the other until time is up."""
    found: Logits = {}
    stop = time.monotonic() + seconds
    for seed in range(max(a.held for a in amounts.values())):
        for work, amount in amounts.items():
            if seed < amount.held and time.monotonic() < stop:
                found |= ask(worker, work, [seed], amount.questions)
    return found


def engine_logits(worker: Worker, amounts: Mapping[str, Amount]) -> Logits:
    """What an engine says of everything."""
    found: Logits = {}
    for work, amount in amounts.items():
        found |= ask(worker, work, list(range(amount.requests)))
    return found


def scaled(amounts: Mapping[str, Amount], scale: float) -> dict[str, Amount]:
    """Fewer requests: at least one of each workload."""
    return {
        work: Amount(
            max(1, round(a.requests * scale)), max(1, round(a.held * scale)), a.questions
        )
        for work, a in amounts.items()
    }  # fmt: skip


def faults(rows: list[Row], whole: bool) -> list[str]:
    """What makes a run worthless. whole: whether it was to ask as many questions as it takes."""
    found = set()
    for row in (r for r in rows if r["work"] == "all"):
        compared, against = int(row["compared"] or 0), str(row["against"])
        if row["mode"] == "float32" and not float(row["tv_max"] or 0) < FLOAT32_TV:
            found.add(f"our float32 path is {row['tv_max']} from transformers")
        if whole and compared < LEAST[against]:
            found.add(f"{row['engine']}: {compared} questions against {against} are too few")
        low, high = float(row["top_p01"] or 0), float(row["top_p99"] or 0)
        if compared >= ENOUGH and (low > LOW or high < HIGH):
            found.add(f"the top probability covers {low} to {high} only")
    return sorted(found)


def parsed() -> argparse.Namespace:
    """Arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--peer", type=Path, help="folder with flide 0.1.4 and fla 0.5.2")
    parser.add_argument("--texts", type=Path, help="folder of workload files")
    parser.add_argument("--works", nargs="*", help="workloads; none: all")
    parser.add_argument("--modes", nargs="*", default=["default", "deterministic"])
    parser.add_argument("--seconds", type=float, default=120, help="of transformers")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the requests")
    parser.add_argument("--pool-gib", type=float, default=8)
    parser.add_argument("--weights", type=Path, help="folder for weights")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def workers_of(args: argparse.Namespace) -> list[Worker]:
    """transformers, our float32 path, and what is held to them; all begin to start."""
    common = {
        "weights": str(weights_folder(args.shape, args.weights)),
        "texts": str(args.texts) if args.texts else None,
    }
    ours = {**common, "pool_gib": args.pool_gib}
    modes = [m for m in args.modes if m == "default" or m in EngineConfig.model_fields]
    print("our modes:", modes, flush=True)
    plain = {"dtype": "float32", "kernels": "reference"}
    workers = [
        Worker("transformers", args.shape, [], "float32", **common),
        Worker("ours", args.shape, [], "float32", config=plain, **ours),
    ]
    bf16 = {"dtype": "bfloat16"}
    workers += [Worker("ours", args.shape, [], mode, config=bf16, **ours) for mode in modes]
    if args.peer:
        peer = [str(args.peer)]
        workers += [Worker("flide", args.shape, peer, mode, **common) for mode in args.modes]
    return workers


def measured(
    workers: list[Worker], amounts: Mapping[str, Amount], args: argparse.Namespace
) -> list[Row]:
    """Rows of every engine against both references."""
    first, plain, *rest = workers
    if not started([first]):
        sys.exit("transformers did not start")
    truth = held_logits(first, amounts, args.seconds)
    first.stop()
    rows: list[Row] = []
    own: Logits = {}
    for worker in (plain, *rest):
        if not started([worker]):
            continue
        got = engine_logits(worker, amounts)
        worker.stop()
        head: Row = {"engine": worker.name, "shape": args.shape, "mode": worker.mode}
        found = rows_of({**head, "against": "transformers"}, truth, got)
        if worker is plain:
            own = got
        else:
            found += rows_of({**head, "against": "float32"}, own, got)
        for row in found:
            if row["work"] == "all":
                print(json.dumps(row), flush=True)
        rows += found
    return rows


def main() -> None:
    """Measures one shape; exits with an error if what it found cannot mean anything."""
    args = parsed()
    amounts = AMOUNTS | dict.fromkeys(text_works(args.texts), TEXTS)
    if args.works:
        amounts = {work: amounts[work] for work in args.works}
    rows = measured(workers_of(args), scaled(amounts, args.scale), args)
    print("written to", write("fidelity", stamp(rows), SAME, args.out))
    if bad := faults(rows, args.scale >= 1 and not args.works):
        sys.exit("; ".join(bad))


if __name__ == "__main__":
    main()
