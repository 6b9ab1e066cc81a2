"""Gated delta net in Triton: `delta_net_ref` in two launches for rows and chunks, one for the
chains of states, and one for all outputs; or the last three in one.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from flide_engine.kernels.delta_net_marks import marks
from flide_engine.kernels.delta_net_merged import merged_kernel
from flide_engine.kernels.delta_net_prep import conv_kernel, prep_kernel
from flide_engine.kernels.delta_net_ref import DeltaNetShape, DeltaNetWeights
from flide_engine.kernels.delta_net_scan import output_kernel, state_kernel
from flide_engine.kernels.stream import CHUNKS, ORDERED, RESUMED, ROOTS, SCANS, StreamTensors

CHUNK = 64


@dataclass(frozen=True)
class DeltaNetTuning:
    """Shapes of the launches; SMALL, LARGE and MERGED give the same bits, which a test on the card
    holds.

    programs: of each launch. conv_rows: rows of a program of the convolution. prep_warps: warps of
    a program; prep_part: columns of a head that it holds at once. block_v: columns of a state that
    a program of the chain carries; stages: how far its loads run ahead. output_warps: as
    prep_warps. merged: chunks, chains and outputs in one launch, of four warps a program.
    """

    programs: int
    prep_warps: int
    conv_rows: int = 16
    prep_part: int = 64
    block_v: int = 64
    stages: int = 3
    output_warps: int = 4
    merged: bool = False


# On an H200 at the 0.8B shape, us of conv / prep / one level of the chain / outputs:
# 510 tokens 7.1 / 13.4 / 10.7 / 8.9 (with LARGE prep 16.3), 8,180 tokens 90 / 145 / 72 / 107
# (with SMALL prep 262). More registers than a program needs cost less than the spills of a cap.
SMALL = DeltaNetTuning(programs=132, prep_warps=8)
LARGE = DeltaNetTuning(programs=264, prep_warps=4)
SMALL_ROWS = 512
MERGED = DeltaNetTuning(programs=264, prep_warps=4, stages=2, merged=True)

MERGED_ROWS: int | None = None
"""Rows of a bucket from which on it runs MERGED; none: never. Not measured on a card: a model of
its programs has 107 us a layer for 134 on multirc, 268 for 384 on quality_all."""


def tuning_of(rows: int) -> DeltaNetTuning:
    """As measured for streams of so many rows."""
    if MERGED_ROWS is not None and rows >= MERGED_ROWS:
        return MERGED
    return SMALL if rows <= SMALL_ROWS else LARGE


def delta_net(
    projected: Tensor,
    weights: DeltaNetWeights,
    shape: DeltaNetShape,
    recurrent_state: Tensor,
    conv_state: Tensor,
    stream: StreamTensors,
    tuning: DeltaNetTuning | None = None,
) -> Tensor:
    """`delta_net_ref` in Triton. Needs `stream.tasks`; head widths are powers of two.

    tuning: None: as measured for streams of this length.
    """
    tasks = stream.tasks
    assert tasks is not None, "the GPU kernels need the stream's work lists"
    tuning = tuning or tuning_of(len(projected))
    assert recurrent_state[0].is_contiguous(), "a slot's state lies apart"
    assert conv_state[0].is_contiguous(), "a slot's convolution rows lie apart"
    # what else a slot holds lies between the states of this layer
    slot, conv_slot = recurrent_state.stride(0), conv_state.stride(0)
    hk, hv, dk, dv = shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim
    chunks, new, kind = len(tasks.chunk_rows), projected.new_empty, projected.dtype
    mixed = new(len(projected), shape.conv_channels)
    k, w = new(2, chunks, hv, CHUNK, dk)
    u, decay = new(chunks, hv, dv, CHUNK), new(chunks, hv, dtype=torch.float32)
    total = new(chunks, hv, CHUNK, dtype=torch.float32)
    passed = new(tasks.passed_states, hv, dv, dk)
    block, part = min(tuning.block_v, dv), min(tuning.prep_part, dk, dv)
    progress = new(
        marks(len(tasks.chunk_rows), len(tasks.scans), hv, dv // block), dtype=torch.int32
    )
    out = new(len(projected), hv * dv)
    z = projected[:, shape.conv_channels :]
    heads = {"HV": hv, "DK": dk, "DV": dv, "product": "ieee" if kind == torch.float32 else "tf32"}
    places = {"count_at": CHUNKS, "scans_at": SCANS}
    conv_kernel[(-(-len(projected) // tuning.conv_rows), 2 * hk + hv * dv // dk)](
        projected, projected.stride(0), conv_state, weights.conv, mixed,
        tasks.row_taps, len(projected),
        recurrent_state, tasks.resumed, tasks.counts, passed, progress,
        HK=hk, HV=hv, DK=dk, DV=dv, ROWS=tuning.conv_rows, CONV_SLOT=conv_slot, BV=block,
        SLOT=slot, MERGED=tuning.merged, resumed_at=RESUMED, **places, num_warps=4,
    )  # fmt: skip
    if tuning.merged:
        merged_kernel[(tuning.programs,)](
            mixed, projected, projected.stride(0), conv_state, weights.A_log, weights.dt_bias,
            recurrent_state, weights.norm, z, out, shape.eps,
            tasks.chunk_rows, tasks.chunk_slots, tasks.chunk_skips, tasks.chunk_sources,
            tasks.chunk_waits, tasks.scans, tasks.order, tasks.counts,
            k, w, u, total, decay, passed, progress,
            HK=hk, **heads, BD=part, BV=block, SLOT=slot, CONV_SLOT=conv_slot,
            STAGES=tuning.stages, THREADS=128, WIDTH=triton.next_power_of_2(1 + dv // block),
            roots_at=ROOTS, ordered_at=ORDERED, **places, num_warps=4, num_stages=1,
        )  # fmt: skip
        return out
    prep_kernel[(tuning.programs,)](
        mixed, projected, projected.stride(0), conv_state, weights.A_log, weights.dt_bias,
        tasks.chunk_rows, tasks.chunk_slots, recurrent_state, tasks.resumed, tasks.counts,
        k, w, u, total, decay, passed, progress, HK=hk, **heads, BD=part, BV=block, SLOT=slot,
        CONV_SLOT=conv_slot, resumed_at=RESUMED, **places,
        num_warps=tuning.prep_warps, num_stages=1,
    )  # fmt: skip
    state_kernel[(tuning.programs,)](
        k, w, u, decay, recurrent_state, passed,
        tasks.scans, tasks.chunk_slots, tasks.counts, progress,
        **heads, BV=block, SLOT=slot, STAGES=tuning.stages, THREADS=128, count_at=SCANS,
        num_warps=4,
    )  # fmt: skip
    output_kernel[(tuning.programs,)](
        mixed, w, u, total, passed, z, projected.stride(0), weights.norm, out, shape.eps,
        tasks.chunk_rows, tasks.chunk_skips, tasks.chunk_sources, tasks.counts,
        HK=hk, **heads, count_at=CHUNKS, num_warps=tuning.output_warps, num_stages=1,
    )  # fmt: skip
    return out
