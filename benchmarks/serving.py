"""What serving adds to the engine: `python -m benchmarks.serving 0.8B`, or `nano` without a GPU.

The same requests, as JSON, in closed loops of 1, 16 and 64 clients: to an engine alone, by handle,
over HTTP through HAProxy, and through Ray's Python proxy. Random weights, nothing is kept between
requests. Each way is a process of its own, as Ray reads its settings when it is imported.
Writes benchmarks/results/serving.json.
"""

import argparse
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.processes import cpu_seconds, processes, running_now
from benchmarks.results_file import RESULTS, Row, stamp, write
from benchmarks.shapes import SHAPES, WORKLOADS
from loadtest.synthetic import WORDS

SAME = ("engine", "shape", "mode", "work", "clients", "gateways", "card")
MODES = ("engine", "handle", "haproxy", "proxy")
CLIENTS = (1, 16, 64)
WORKS = ("race1", "race_all", "quality_all")
DISTINCT = 64
"""Different requests of a workload."""

MARK = "ROW "
ENVIRONMENT = {
    "haproxy": {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }
}
WARM_UP = 0.1
STAGES = ("decode", "render", "tokenize", "queue", "pack", "device", "finish")

Spans = list[tuple[float, float, dict[str, Any]]]
"""(seconds from the start, milliseconds, stages and tokens) of each answer."""

Loop = AbstractContextManager[Callable[[float], Spans]]
"""A closed loop that is warm once it is entered: from its seconds to spans."""


def bodies(work: str, folder: Path) -> list[bytes]:
    """Requests of a workload as JSON, of about as many tokens as it says."""
    from flide_engine.families.registry import load_family
    from flide_engine.wire import from_plain

    family, _ = load_family(folder, work, "", 0)

    def tokens_of(state: int, questions: int, words: int) -> int:
        asked = _request(random.Random(0), state, questions, words)
        return family.render(from_plain(asked)).input_tokens

    state, questions, tokens = WORKLOADS[work]
    per_word = (tokens_of(500, 1, 10) - tokens_of(100, 1, 10)) / 400
    # what a question has beside its words
    around = tokens_of(100, 2, 50) - tokens_of(100, 1, 50) - 50 * per_word
    words = max(1, round((tokens - around) / per_word))
    return [
        json.dumps(
            _request(random.Random(f"{work} {seed}"), round(state / per_word), questions, words)
        ).encode()
        for seed in range(DISTINCT)
    ]


def _request(rng: random.Random, state: int, questions: int, words: int) -> dict[str, Any]:
    """A state and yes/no questions of so many words each."""
    asked = {
        f"q{i}": {"type": "noul", "instructions": " ".join(rng.choices(WORDS, k=words))}
        for i in range(questions)
    }
    return {"state": " ".join(rng.choices(WORDS, k=state)), "questions": asked}


def in_process(engine: Any, asked: Sequence[bytes], clients: int, seconds: float) -> Spans:
    """A closed loop on an engine of this process, driven by the threads that finish answers."""
    found: Spans = []
    began = time.perf_counter()
    ends: list[Future[None]] = [Future() for _ in range(clients)]

    def ask(number: int, turn: int) -> None:
        sent = time.perf_counter()
        if sent - began >= seconds:
            ends[number].set_result(None)
            return
        future = engine.submit(asked[turn % len(asked)])

        def answered(done: "Future[Any]") -> None:
            now, response = time.perf_counter(), done.result()
            told = {**response.x_timing, "tokens": response.usage.input_tokens}
            found.append((now - began, 1000 * (now - sent), told))
            ask(number, turn + clients)

        future.add_done_callback(answered)

    for number in range(clients):
        ask(number, number)
    wait(ends)
    return found


def row_of(spans: Spans, seconds: float, head: Row, cpu: dict[str, float]) -> Row:
    """A row of the results. cpu: seconds that each part used for all spans.

    The rate counts what is answered between warm-up and end. Latencies and stages are of all
    (`timed`) that is asked between them, whenever it is answered: the longest ends last.
    """
    first = WARM_UP * seconds
    timed = [s for s in spans if s[0] - s[1] / 1000 >= first]
    found: Row = dict(head)
    found |= _percentiles("", sorted(ms for _, ms, _ in timed))
    found["timed"] = len(timed)
    found["rps"] = round(sum(first <= end < seconds for end, _, _ in spans) / (seconds - first), 1)
    found["input_tokens"] = round(statistics.mean(told["tokens"] for _, _, told in spans))
    for stage in STAGES:
        times = sorted(told[stage] for _, _, told in timed if stage in told)
        found |= _percentiles(f"{stage}_", times)
    for part, used in cpu.items():
        found[f"{part}_cpu_ms"] = round(1000 * used / max(1, len(spans)), 3)
    return found


def _percentiles(prefix: str, ordered: Sequence[float]) -> Row:
    if not ordered:
        return {}
    middle, high = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
    return {f"{prefix}p50_ms": round(middle, 3), f"{prefix}p99_ms": round(high, 3)}


def measure(args: argparse.Namespace, folder: Path) -> None:
    """One way's rows, printed for the parent process."""
    mode = args.modes[0]
    engine = {"model": str(folder), "keep_checkpoints": False}
    engine |= {"max_queue_ms": 10**9, "max_queued_tokens": 10**9}  # 64 clients wait, whatever for
    engine |= dict(pair.split("=", 1) for pair in args.option)
    gateways = args.gateways if mode in ("haproxy", "proxy") else 0
    head: Row = {"engine": "ours", "shape": args.shape, "mode": mode, "gateways": gateways}

    others = None if mode == "engine" else running_now()

    def measured(loop: Loop, work: str, clients: int) -> None:
        spans, used = with_cpu(loop, args.seconds, lambda: _cpu(others))
        row = row_of(spans, args.seconds, {**head, "work": work, "clients": clients}, used)
        print(MARK + json.dumps(row), flush=True)

    plan = [(work, clients) for work in args.works for clients in args.clients]
    if mode == "engine":
        from flide_engine.config import EngineConfig
        from flide_engine.engine import Engine

        made = Engine(EngineConfig.model_validate(engine))
        for work, clients in plan:
            how = (made, bodies(work, folder), clients)
            measured(nullcontext(partial(in_process, *how)), work, clients)
        made.close()
        return
    from benchmarks.callers import a_node, warm_callers
    from benchmarks.fleet.cluster import running
    from deployments.config import AppArgs

    options = AppArgs.model_validate({"engine": engine, "gateway_replicas": args.gateways})
    with running([a_node()], options) as fleet:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        url = "" if mode == "handle" else fleet.url
        for work, clients in plan:
            asked, shared_by = bodies(work, folder), min(clients, args.callers)
            measured(warm_callers(asked, url, clients, shared_by), work, clients)


def with_cpu(
    loop: Loop, seconds: float, used: Callable[[], dict[str, float]]
) -> tuple[Spans, dict[str, float]]:
    """What a loop gives in so many seconds, and processor seconds by part until its last answer:
    those of requests that warm it up, which are no spans, come before. used: until now.
    """
    with loop as run:
        before = used()
        spans = run(seconds)
        return spans, {part: until - before.get(part, 0.0) for part, until in used().items()}


def _cpu(others: frozenset[int] | None) -> dict[str, float]:
    """Processor seconds by part of the app, which has started since those others; None: this
    process is the engine.
    """
    if others is None:
        return {"engine": time.process_time()}
    return {part: sum(map(cpu_seconds, ids)) for part, ids in processes(others).items() if ids}


def main() -> None:
    """Measures each way in a process of its own, and writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", help="nano, embedded, or a shape of benchmarks.shapes")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument("--works", nargs="*", default=list(WORKS), choices=list(WORKLOADS))
    parser.add_argument("--clients", nargs="*", type=int, default=list(CLIENTS))
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--callers", type=int, default=4, help="processes of clients")
    parser.add_argument("--option", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--dry", action="store_true", help="writes no results")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of serving.json")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is not None:
        measure(args, args.folder)
        return
    if args.shape in SHAPES:
        from benchmarks.weights import weights_folder

        folder = weights_folder(args.shape)
    else:
        from flide_engine.resolve import locate

        folder = locate(None if args.shape == "embedded" else args.shape)[0]
    rows: list[Row] = []
    for mode in args.modes:
        rows += rows_of_mode(mode, args, folder)
        if not args.dry and rows:  # after each, so that a run cut short leaves what it has
            print("written to", write("serving", stamp(rows), SAME, args.out), flush=True)


def rows_of_mode(mode: str, args: argparse.Namespace, folder: Path) -> list[Row]:
    """What a process of its own measures; its rows are printed as they come."""
    rows: list[Row] = []
    command = [sys.executable, "-m", "benchmarks.serving", args.shape, "--modes", mode]
    for name in ("works", "clients", "option"):
        command += [f"--{name}", *map(str, getattr(args, name))]
    for name in ("seconds", "gateways", "callers"):
        command += [f"--{name}", str(getattr(args, name))]
    env = os.environ | ENVIRONMENT.get(mode, {})
    process = subprocess.Popen(
        [*command, "--folder", str(folder)], env=env, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(MARK):
            print(line.removeprefix(MARK), end="", flush=True)
            rows.append(json.loads(line.removeprefix(MARK)))
    if process.wait():
        print(f"{mode} ended with {process.returncode}", flush=True)
    return rows


if __name__ == "__main__":
    main()
