"""Which launch shapes are fastest on a GPU: `python -m benchmarks.tuning 4B --works race1`.

The calls of one forward pass are recorded (`benchmarks.kernels`), so weights and activations are
those of every layer in turn. Each distinct product is run by cuBLAS and by `invariant_matmul` in
tiles of several shapes, the delta net for Hopper and in Triton's tunings, attention in Triton and
for Hopper; each way of running them is one graph, and the graphs take turns. `bits` says whether
all results were those of the first way. What wins is written into the kernels' modules by hand, and
the rows into benchmarks/results/tuning.json, so that it can be told later why.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.engines.ours import start
from benchmarks.kernels import Calls, recorded, timed
from benchmarks.results_file import RESULTS, Row, stamp, write
from benchmarks.shapes import SHAPES, WORKLOADS
from benchmarks.weights import weights_folder
from flide_engine.kernels.attention import attention
from flide_engine.kernels.delta_net import LARGE, SMALL, delta_net
from flide_engine.kernels.delta_net_hopper import delta_net_hopper
from flide_engine.kernels.invariant_matmul import MatmulTuning, invariant_matmul

Ways = Mapping[str, Callable[..., Tensor]]

SAME = ("shape", "work", "op", "variant", "way")
SHARED_BYTES = 227 * 1024
"""Of a processor of an H200."""

TILES = (
    MatmulTuning(64, 64, 64, 4, 4), MatmulTuning(64, 64, 64, 4, 6), MatmulTuning(64, 64, 128, 4, 4),
    MatmulTuning(64, 128, 64, 4, 4), MatmulTuning(64, 128, 128, 4, 3),
    MatmulTuning(128, 64, 64, 4, 4), MatmulTuning(128, 64, 128, 8, 3),
    MatmulTuning(128, 128, 64, 8, 4), MatmulTuning(128, 256, 64, 8, 3),
)  # fmt: skip


def shared_bytes(tile: MatmulTuning) -> int:
    """Bytes of bfloat16 operands that a program has at hand."""
    return 2 * tile.stages * (tile.rows + tile.columns) * tile.width


def products(processors: int) -> dict[str, Callable[..., Tensor]]:
    """cuBLAS, then every tile with as many programs as have room at once."""
    found: dict[str, Callable[..., Tensor]] = {"cuBLAS": F.linear}
    for tile in TILES:
        for each in range(1, min(3, SHARED_BYTES // shared_bytes(tile)) + 1):
            shape = f"{tile.rows}x{tile.columns}x{tile.width}"
            name = f"{shape}, {tile.warps} warps, {tile.stages} stages, {each} a processor"
            found[name] = partial(invariant_matmul, tuning=tile, programs=each * processors)
    return found


DELTA_NETS: Ways = {
    "hopper": delta_net_hopper,
    "small": partial(delta_net, tuning=SMALL),
    "large": partial(delta_net, tuning=LARGE),
}
"""CUDA C++ for Hopper, and the tunings of the Triton kernels."""

ATTENTIONS: Ways = {
    "triton": partial(attention, hopper=False),
    "hopper": partial(attention, hopper=True),
}
"""The second launch in Triton, and in CUDA C++; where that does not run, the same twice."""


def compared(calls: Calls, ways: Ways, passes: int) -> list[Row]:
    """Microseconds a call of each way of running the same calls, medians, in turn; the engine's
    own choice plays no part.
    """
    every = {
        name: replace(
            calls, runs=[partial(run, *c.args, **c.keywords) for c in calls.runs], spans=[]
        )
        for name, run in ways.items()
    }
    wanted: list[Tensor] = []
    bits: dict[str, bool] = {}
    for name, way in every.items():
        results = [run() for run in way.runs]
        wanted = wanted or results
        bits[name] = all(map(torch.equal, results, wanted))
    timed(list(every.values()), passes)
    rows: list[Row] = []
    for name, way in every.items():
        row: Row = {"op": calls.op, "variant": calls.variant, "calls": len(calls.runs)}
        row |= {"way": name, "us": round(statistics.median(way.spans), 2), "bits": bits[name]}
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


@torch.inference_mode()
def main() -> None:
    """Measures one shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--works", nargs="*", default=["race1"], choices=WORKLOADS)
    parser.add_argument("--ops", nargs="*", default=["linear", "delta_net", "attention"])
    parser.add_argument("--passes", type=int, default=9)
    parser.add_argument("--pool-gib", type=float, default=8)
    parser.add_argument("--weights", type=Path, help="folder for weights")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    folder = str(weights_folder(args.shape, args.weights))
    ours = start(args.shape, "default", folder, {"dtype": "bfloat16"}, args.pool_gib)
    processors = torch.cuda.get_device_properties(ours.device).multi_processor_count
    ways = {"linear": products(processors), "delta_net": DELTA_NETS, "attention": ATTENTIONS}
    rows: list[Row] = []
    for work in args.works:
        every, _ = recorded(ours, work, ours.device)
        for calls in every:
            if calls.op in args.ops:
                head: Row = {"shape": args.shape, "work": work}
                rows += [{**head, **row} for row in compared(calls, ways[calls.op], args.passes)]
        write("tuning", stamp(rows), SAME, args.out)  # so that a run cut short leaves what it has
    ours.engine.close()


if __name__ == "__main__":
    main()
