"""Operations of a forward pass on one GPU and their floors: `python -m benchmarks.kernels 0.8B`.

One forward pass of a workload's round is recorded, operation by operation, with its arguments. All
calls of one kind are then captured as one graph and the graphs replayed in turn, so every layer's
own weights and activations are used. A profiler says what each launch takes of it. The floor is the
longer of bytes over the copy rate and flops over the rate of a large product, both measured first
(`benchmarks.kernel_costs`). Writes benchmarks/results/kernels.json.
"""

import argparse
import inspect
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.engines.clock import captured, event_ms
from benchmarks.engines.ours import Ours, start
from benchmarks.kernel_costs import KERNELS, OPERATIONS, Cost, Round
from benchmarks.results_file import RESULTS, Row, stamp, write
from benchmarks.shapes import SHAPES, WORKLOADS
from benchmarks.weights import weights_folder
from flide_engine.executor import to_device
from flide_engine.kernels import REFERENCE, Kernels
from flide_engine.models.registry import load_model
from flide_engine.resolve import resolve_kernels

WORKS = ("race1", "multirc", "quality_all")
SAME = ("engine", "shape", "mode", "work", "op", "variant", "kernel")


@dataclass
class Calls:
    """Calls of one operation with arguments of the same shapes, and what they took."""

    op: str
    variant: str
    arguments: dict[str, Any]
    runs: list[partial[Any]] = field(default_factory=list)
    spans: list[float] = field(default_factory=list)
    replay: Callable[[], Any] | None = None

    def again(self) -> None:
        """All calls, one after the other."""
        for run in self.runs:
            run()


def shapes_of(arguments: dict[str, Any]) -> str:
    """Shapes of the tensors that set a call's size, for its name: `512x1024 8224x1024`."""
    tensors = [a for a in arguments.values() if isinstance(a, Tensor)]
    return " ".join("x".join(map(str, t.shape)) for t in tensors[:2])


def recording(kernels: Kernels, found: dict[tuple[str, str], Calls]) -> Kernels:
    """The kernels, noting every call in `found`."""

    def noted(name: str) -> Callable[..., Any]:
        run, signature = getattr(kernels, name), inspect.signature(getattr(REFERENCE, name))

        def call(*args: Any, **more: Any) -> Any:
            arguments = dict(signature.bind_partial(*args, **more).arguments)
            variant = shapes_of(arguments)
            calls = found.setdefault((name, variant), Calls(name, variant, arguments))
            calls.runs.append(partial(run, *args, **more))
            return run(*args, **more)

        return call

    return replace(kernels, **{f.name: noted(f.name) for f in fields(kernels)})


def recorded(ours: Ours, work: str, device: torch.device) -> tuple[list[Calls], Round]:
    """Calls of one forward pass, grouped; and the round."""
    plan, asked = ours.plan(work)
    bucket = ours.bucket(plan, asked)
    if bucket is not None:
        bucket.replay(plan, asked).wait()
        stream = bucket.tables.stream
        reads, rows = bucket.tables.label_reads, bucket.tables.label_rows
    elif device.type == "cpu":
        stream = to_device(plan, device)
        reads, rows = torch.from_numpy(asked.reads), torch.from_numpy(asked.rows)
    else:
        raise SystemExit(f"{work} takes several rounds")
    kernels = resolve_kernels("auto", device, ours.engine.config.deterministic)
    model = load_model(ours.weights, torch.bfloat16, device, kernels)
    found: dict[tuple[str, str], Calls] = {}
    model.ops = recording(model.ops, found)  # type: ignore[attr-defined]
    hidden = model.forward(stream, ours.pool.tensors)
    model.label_logits(hidden, reads, rows)
    return list(found.values()), Round.of(plan, stream)


def rates(device: torch.device) -> tuple[float, float]:
    """(bytes/s of a copy, read and written; flops/s of a product in bfloat16)."""
    gpu = device.type == "cuda"
    source = torch.ones(2**30 if gpu else 2**24, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    side = 8192 if gpu else 256
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    both: list[Callable[[], Any]] = [partial(target.copy_, source), partial(torch.mm, a, b)]
    seconds = []
    for run in both:
        run()
        seconds.append(statistics.median(event_ms(run) for _ in range(9)) / 1000)
    copied = 2 * source.numel() * source.itemsize
    return copied / seconds[0], 2 * side**3 / seconds[1]


def timed(every: Sequence[Calls], passes: int) -> None:
    """Replays each group in turn, several times over."""
    for calls in every:
        calls.replay = captured(calls.again)
    for _ in range(passes):
        for calls in every:
            assert calls.replay is not None
            calls.spans.append(1000 * event_ms(calls.replay) / len(calls.runs))


def launches(calls: Calls) -> dict[str, tuple[float, float]]:
    """Microseconds and launches of each kernel a call; none on a CPU."""
    if not torch.cuda.is_available() or calls.replay is None:
        return {}
    times = 3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(times):
            calls.replay()
        torch.cuda.synchronize()
    count = times * len(calls.runs)
    return {
        event.key: (event.device_time_total / count, event.count / count)
        for event in seen.key_averages()
        if event.device_time_total
    }


def figures(us: float, cost: Cost | None, byte_rate: float, flop_rate: float) -> Row:
    """A time beside its floor."""
    row: Row = {"us": round(us, 2)}
    if cost is not None:
        floor = cost.floor_us(byte_rate, flop_rate)
        found = {
            "floor_us": floor,
            "share": floor / us,
            "tb_per_s": cost.bytes / us / 1e6,
            "tflop_per_s": cost.flops / us / 1e6,
        }
        row |= {name: float(f"{value:.3g}") for name, value in found.items()}
    return row


def rows_of(every: Sequence[Calls], at: Round, head: Row, card: tuple[float, float]) -> list[Row]:
    """A row for each group of calls, and one for each kernel that it launches."""
    rows: list[Row] = []
    for calls in every:
        operation = OPERATIONS.get(calls.op)
        cost = operation(calls.arguments, at) if operation else None
        row: Row = {**head, "op": calls.op, "variant": calls.variant, "kernel": "all"}
        row |= {"calls": len(calls.runs), **figures(statistics.median(calls.spans), cost, *card)}
        rows.append(row)
        for kernel, (us, count) in launches(calls).items():
            of = KERNELS.get(kernel)
            part = of(calls.arguments, at) if of else None
            row = {**head, "op": calls.op, "variant": calls.variant, "kernel": kernel[:80]}
            row |= {"calls": round(count * len(calls.runs)), **figures(us, part, *card)}
            rows.append(row)
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


@torch.inference_mode()
def main() -> None:
    """Measures one shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--works", nargs="*", default=WORKS, choices=WORKLOADS)
    parser.add_argument("--modes", nargs="*", default=["default"])
    parser.add_argument("--passes", type=int, default=9)
    parser.add_argument("--pool-gib", type=float, default=8)
    parser.add_argument("--weights", type=Path, help="folder for weights")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    folder = str(weights_folder(args.shape, args.weights))
    rows: list[Row] = []
    for mode in args.modes:
        ours = start(args.shape, mode, folder, {"dtype": "bfloat16"}, args.pool_gib)
        card = rates(ours.device)
        head: Row = {"engine": "ours", "shape": args.shape, "mode": mode}
        row: Row = {**head, "work": "", "op": "card", "variant": "", "kernel": "all"}
        row |= {"tb_per_s": round(card[0] / 1e12, 3), "tflop_per_s": round(card[1] / 1e12, 1)}
        print(json.dumps(row), flush=True)
        rows.append(row)
        for work in args.works:
            every, at = recorded(ours, work, ours.device)
            timed(every, args.passes)
            rows += rows_of(every, at, {**head, "work": work}, card)
        ours.engine.close()
    print("written to", write("kernels", stamp(rows), SAME, args.out))


if __name__ == "__main__":
    main()
