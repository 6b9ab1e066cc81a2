"""Engine time on a GPU: `python -m benchmarks.engine 0.8B` (random weights, random token ids).

For each workload: milliseconds of a graph replay, and of a whole round as the engine's thread sees
it (layout, tables, copy, replay, hidden vectors back on the host). `--profile WORK` lists the
kernels of a replay; `--check` compares hidden vectors with the float32 references on isolated
prompts.
"""

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks.results_file import Row, stamp, write
from benchmarks.shapes import SHAPES, WORKLOADS, prompts
from flide_engine.cache.pool import Pool
from flide_engine.device_plan import Capacity
from flide_engine.graphs import Bucket, Graphs
from flide_engine.kernels import REFERENCE
from flide_engine.kernels.triton_kernels import TILE, TRITON
from flide_engine.layout.plan import RoundPlan
from flide_engine.layout.stream import Job, lay_out
from flide_engine.layout.tree import build_forest
from flide_engine.models.qwen3_5 import Qwen35, Qwen35Config
from flide_engine.runner import to_device

BUCKETS = (128, 384, 512, 640, 832, 1024, 1536, 2048, 3072, 4864, 6400, 8192)
CUDA = torch.device("cuda")


def random_weights(config: Qwen35Config, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights whose activations keep their size; A_log and the gated norm are float32."""
    generator = torch.Generator(CUDA).manual_seed(0)
    weights = {}
    for name, shape in config.tensor_shapes().items():
        kind = torch.float32 if name.endswith(("A_log", "linear_attn.norm.weight")) else dtype
        scale = 0.02 if len(shape) == 1 else shape[-1] ** -0.5
        value = torch.randn(shape, generator=generator, device=CUDA) * scale
        if name.endswith("linear_attn.norm.weight"):
            value += 1.0
        elif name.endswith("A_log"):
            value = torch.rand(shape, generator=generator, device=CUDA) * 3 - 2
        elif name.endswith("conv1d.weight"):
            value = torch.randn(shape, generator=generator, device=CUDA) * 0.5
        elif name == "embed_tokens.weight":
            value *= shape[-1] ** 0.5
        weights[name] = value.to(kind)
    return weights


class Bench:
    """One shape with its graphs."""

    def __init__(self, shape: str) -> None:
        self.config = Qwen35Config.of(SHAPES[shape])
        self.model = Qwen35(self.config, random_weights(self.config, torch.bfloat16), TRITON)
        self.pool = Pool(self.model.state_shape, 512, 64, torch.bfloat16, CUDA)
        began = time.monotonic()
        self.graphs = Graphs(
            self.model,
            self.pool.tensors,
            [
                Capacity.of(
                    rows,
                    16 if rows <= 1024 else TILE,
                    1024,
                    132 // self.config.num_key_value_heads,
                    levels,
                )
                for rows in BUCKETS
                for levels in (1, 2)
            ],
            self.plan([[prompts("race1")[0][:100]]]),
        )
        torch.cuda.synchronize()
        print(f"captured {len(BUCKETS)} buckets in {time.monotonic() - began:.1f} s", flush=True)

    def plan(self, requests: list[list[np.ndarray]]) -> RoundPlan:
        """A round of whole requests; pages and slots are taken from 0 up, nothing is held."""
        layout = lay_out([Job(build_forest(request)) for request in requests])
        pages = np.arange(layout.num_pages, dtype=np.int32)
        return layout.bind(pages, np.arange(layout.num_slots, dtype=np.int32))[0]

    def bucket(self, work: str) -> Bucket:
        """The bucket of a workload, filled."""
        bucket = self.graphs.fill(self.plan([prompts(work)]))
        assert bucket is not None, f"{work} fits no bucket"
        return bucket

    def replay_ms(self, work: str, times: int = 30) -> float:
        """Median milliseconds of a replay on the device."""
        bucket = self.bucket(work)
        bucket.replay()
        spans = []
        for _ in range(times):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            bucket.graph.replay()
            end.record()
            torch.cuda.synchronize()
            spans.append(float(begin.elapsed_time(end)))
        return statistics.median(spans)

    def round_ms(self, work: str, times: int = 30) -> list[float]:
        """Milliseconds of whole rounds, ascending."""
        spans = []
        texts = prompts(work)
        for i in range(times + 3):
            began = time.perf_counter()
            bucket = self.graphs.fill(self.plan([texts]))
            assert bucket is not None
            bucket.replay()[: len(texts)].cpu()
            if i >= 3:
                spans.append(1000 * (time.perf_counter() - began))
        return sorted(spans)

    def profile(self, work: str) -> None:
        """Kernels of a replay by total time."""
        bucket = self.bucket(work)
        bucket.replay()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            for _ in range(5):
                bucket.graph.replay()
            torch.cuda.synchronize()
        print(f"--- {work}, a replay ({len(bucket.tables.host['tokens'])} rows)")
        for event in sorted(seen.key_averages(), key=lambda e: -e.device_time_total)[:14]:
            total, count = event.device_time_total / 5, event.count / 5
            print(f"{total:9.1f} us {count:6.0f} x {total / max(count, 1):8.2f}  {event.key[:90]}")

    def check(self, work: str, most: int = 4) -> Row:
        """Relative error of hidden vectors against the float32 references on isolated prompts."""
        texts = prompts(work)
        got = self.bucket(work).replay()[: len(texts)].float().clone()
        plain = {name: t.float() for name, t in random_weights(self.config, torch.bfloat16).items()}
        model = Qwen35(self.config, plain, REFERENCE)
        errors = []
        for text, row in list(zip(texts, got, strict=True))[:most]:
            stream = to_device(self.plan([[text]]), CUDA)
            want = model.forward(stream, self._empty_pool().tensors)[0]
            errors.append(float((row - want).norm() / want.norm()))
        return {"engine": "ours", "work": work, "hidden_relative_error": round(max(errors), 5)}

    def _empty_pool(self) -> Pool:
        return Pool(self.model.state_shape, 2, 2, torch.float32, CUDA)


def main() -> None:
    """Measures one shape and writes benchmarks/results/engine.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--profile", nargs="*", default=[], metavar="WORK")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    bench = Bench(args.shape)
    rows: list[Row] = []
    if args.check:
        for work in ("race_all", "short36x9", "multirc"):
            print(bench.check(work), flush=True)
    for work in WORKLOADS:
        replay, spans = bench.replay_ms(work), bench.round_ms(work)
        row: dict[str, Any] = {
            "engine": "ours",
            "shape": args.shape,
            "mode": "default",
            "work": work,
            "clients": 1,
            "replay_ms": round(replay, 3),
            "p50_ms": round(statistics.median(spans), 3),
            "p90_ms": round(spans[int(0.9 * len(spans))], 3),
        }
        print(row, flush=True)
        rows.append(row)
    for work in args.profile:
        bench.profile(work)
    print(
        "written to", write("engine", stamp(rows), ("engine", "shape", "mode", "work", "clients"))
    )


if __name__ == "__main__":
    main()
