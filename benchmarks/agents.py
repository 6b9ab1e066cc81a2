"""Agents on one GPU: `python -m benchmarks.agents 0.8B --peer FOLDER`.

A step adds 600 tokens to a history and asks a question of 60 about it. Ours and flide 0.1.4 with
its session cache, each in a process of its own, in turn: one agent, eight in one round, 32 that ask
again as soon as they are answered; one agent at several histories, for what history costs; and the
bytes that a step leaves. Histories are those after the step. Writes benchmarks/results/agents.json.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines.agents import ASKS, GROWS
from benchmarks.results_file import RESULTS, Row, stamp, write
from benchmarks.shapes import SHAPES
from benchmarks.weights import weights_folder
from benchmarks.worker import Worker, started
from flide_engine.config import GRAIN
from flide_engine.models.qwen3_5 import Qwen35Config

HISTORY = 8400
HISTORIES = (2400, 4800, HISTORY, 14400, 24000)
TOGETHER = 8
LOOP_STEPS = 8
SAME = ("engine", "shape", "mode", "work", "clients", "history")


def spread(spans: Sequence[float]) -> Row:
    """Percentiles of milliseconds."""
    ordered = sorted(spans)
    at = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99}
    return {name: round(ordered[int(q * len(ordered))], 3) for name, q in at.items()}


def head(worker: Worker, shape: str, work: str, clients: int, history: int) -> Row:
    """Beginning of a row."""
    return {
        "engine": worker.name, "shape": shape, "mode": worker.mode, "work": work,
        "clients": clients, "history": history, "grows": GROWS, "asks": ASKS,
    }  # fmt: skip


def answered(worker: Worker, what: str, **arguments: Any) -> dict[str, Any]:
    """A command's answer; empty, with a word, where the engine fails."""
    found = worker.do(what, **arguments)
    if "error" in found:
        print(worker.name, worker.mode, what, arguments, found["error"], flush=True)
        return {}
    return found


def steps(workers: list[Worker], shape: str, passes: int, times: int) -> list[Row]:
    """Agents that step together, engines in turn; and what 1,000 tokens of history cost."""
    cases = [(h, 1) for h in HISTORIES] + [(HISTORY, TOGETHER)]
    spans: dict[tuple[int, int, int], list[float]] = {}
    for history, agents in cases:
        for _ in range(passes):
            for i, worker in enumerate(workers):
                found = answered(worker, "step", history=history, agents=agents, times=times)
                spans.setdefault((i, history, agents), []).extend(found.get("ms", []))
    rows: list[Row] = []
    for i, worker in enumerate(workers):
        medians = []
        for history, agents in cases:
            if not spans[i, history, agents]:
                continue
            row = head(worker, shape, "agent_step", agents, history) | spread(
                spans[i, history, agents]
            )
            if agents == 1:
                medians.append((history, statistics.median(spans[i, history, agents])))
            print(json.dumps(row), flush=True)
            rows.append(row)
        if len(medians) > 1:
            lengths, times_ms = np.array(medians).T
            slope = 1000 * np.polyfit(lengths, times_ms, 1)[0]
            row = head(worker, shape, "agent_history", 1, medians[-1][0])
            row["ms_per_1000"] = round(float(slope), 4)
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def loops(workers: list[Worker], shape: str, passes: int, agents: int) -> list[Row]:
    """A closed loop of agents whose histories grow around HISTORY, engines in turn."""
    first = HISTORY - GROWS * (LOOP_STEPS + 1) // 2
    found: list[list[dict[str, Any]]] = [[] for _ in workers]
    for _ in range(passes):
        for i, worker in enumerate(workers):
            one = answered(worker, "loop", history=first, agents=agents, steps=LOOP_STEPS)
            found[i] += [one] if one else []
    rows: list[Row] = []
    for i, worker in enumerate(workers):
        if not found[i]:
            continue
        row = head(worker, shape, "agent_loop", agents, HISTORY)
        row |= spread([span for one in found[i] for span in one["ms"]])
        rates = [one["steps"] / one["seconds"] for one in found[i]]
        row["rps"] = round(statistics.median(rates), 1)
        row["rps_least"], row["rps_most"] = round(min(rates), 1), round(max(rates), 1)
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def bytes_kept(workers: list[Worker], shape: str, count: int) -> list[Row]:
    """What a step leaves, beside its distinct tokens and one recurrent state in bfloat16."""
    state = Qwen35Config.of(SHAPES[shape]).state_shape()
    needed = state.page_bytes(2) * GROWS // GRAIN + state.slot_units(2) * state.unit_bytes(2)
    rows: list[Row] = []
    for worker in workers:
        found = answered(worker, "kept", history=HISTORY, steps=count)
        if found:
            row = head(worker, shape, "agent_bytes", 1, HISTORY) | found
            row["distinct_bytes"] = needed
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def main() -> None:
    """Measures one shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--peer", type=Path, help="folder with flide 0.1.4 and fla 0.5.2")
    parser.add_argument("--modes", nargs="*", default=["default"], help="of ours and flide")
    parser.add_argument(
        "--parts",
        type=int,
        nargs="*",
        default=[],
        help="ours with attention's keys cut so (grains)",
    )
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--times", type=int, default=6, help="steps a pass")
    parser.add_argument("--agents", type=int, default=32, help="of the closed loop")
    parser.add_argument("--pool-gib", type=float, default=20, help="checkpoints of each engine")
    parser.add_argument("--weights", type=Path, help="folder for weights")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    weights = str(weights_folder(args.shape, args.weights))
    config = {"dtype": "bfloat16", "keep_checkpoints": True}
    ours = {"weights": weights, "pool_gib": args.pool_gib, "config": config}
    workers = [Worker("ours", args.shape, [], mode, **ours) for mode in args.modes]
    for part in args.parts:
        worker = Worker("ours", args.shape, [], **ours, part=part)
        worker.mode = f"parts of {part}"
        workers.append(worker)
    if args.peer:
        workers += [
            Worker(
                "flide", args.shape, [str(args.peer)], mode, weights=weights,
                sessions_gib=args.pool_gib,
            )
            for mode in args.modes
        ]  # fmt: skip
    workers = started(workers)
    rows = bytes_kept(workers, args.shape, 8)
    rows += steps(workers, args.shape, args.passes, args.times)
    rows += loops(workers, args.shape, args.passes, args.agents)
    print("written to", write("agents", stamp(rows), SAME, args.out))
    for worker in workers:
        worker.stop()


if __name__ == "__main__":
    main()
