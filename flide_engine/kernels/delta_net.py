"""Gated delta net in Triton: `delta_net_ref` in two launches for rows and chunks, one for the
chains of states, and one for all outputs. On a Hopper GPU `delta_net_hopper` does what it can.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flide_engine.kernels.delta_net_hopper import delta_net_hopper, supports
from flide_engine.kernels.delta_net_prep import conv_kernel, prep_kernel
from flide_engine.kernels.delta_net_ref import DeltaNetShape, DeltaNetWeights
from flide_engine.kernels.delta_net_scan import output_kernel, state_kernel
from flide_engine.kernels.hopper.program import has_hopper
from flide_engine.kernels.stream import CHUNKS, RESUMED, SCANS, StreamTensors

CHUNK = 64


@dataclass(frozen=True)
class DeltaNetTuning:
    """Shapes of the launches; SMALL and LARGE give the same bits, which a test on the card holds.

    programs: of each launch. conv_rows: rows of a program of the convolution. prep_warps: warps of
    a program; prep_part: columns of a head that it holds at once. block_v: columns of a state that
    a program of the chain carries; stages: how far its loads run ahead. output_warps: as
    prep_warps.
    """

    programs: int
    prep_warps: int
    conv_rows: int = 16
    prep_part: int = 64
    block_v: int = 64
    stages: int = 3
    output_warps: int = 4


# On an H200 at the 0.8B shape, us of conv / prep / one level of the chain / outputs:
# 510 tokens 7.1 / 13.4 / 10.7 / 8.9 (with LARGE prep 16.3), 8,180 tokens 90 / 145 / 72 / 107
# (with SMALL prep 262). More registers than a program needs cost less than the spills of a cap.
SMALL = DeltaNetTuning(programs=132, prep_warps=8)
LARGE = DeltaNetTuning(programs=264, prep_warps=4)
SMALL_ROWS = 512


def tuning_of(rows: int) -> DeltaNetTuning:
    """As measured for streams of so many rows."""
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
    """`delta_net_ref` on a GPU. Needs `stream.tasks`; head widths are powers of two.

    tuning: None: `delta_net_hopper` where it can, else in Triton as measured for streams of this
    length. Which of the two depends on the model and the card, never on a round: bits differ.
    """
    hopper = tuning is None and has_hopper(projected.device)
    if hopper and supports(projected, weights, shape):
        return delta_net_hopper(projected, weights, shape, recurrent_state, conv_state, stream)
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
    progress = new(1 + len(tasks.scans) * hv * (dv // block), dtype=torch.int32)
    out = new(len(projected), hv * dv)
    z = projected[:, shape.conv_channels :]
    heads = {"HV": hv, "DK": dk, "DV": dv, "product": "ieee" if kind == torch.float32 else "tf32"}
    conv_kernel[(-(-len(projected) // tuning.conv_rows), 2 * hk + hv * dv // dk)](
        projected, projected.stride(0), conv_state, weights.conv, mixed,
        tasks.row_taps, len(projected),
        HK=hk, HV=hv, DK=dk, DV=dv, ROWS=tuning.conv_rows, CONV_SLOT=conv_slot, num_warps=4,
    )  # fmt: skip
    prep_kernel[(tuning.programs,)](
        mixed, projected, projected.stride(0), conv_state, weights.A_log, weights.dt_bias,
        tasks.chunk_rows, tasks.chunk_slots, recurrent_state, tasks.resumed, tasks.counts,
        k, w, u, total, decay, passed, progress, HK=hk, **heads, BD=part, BV=block, SLOT=slot,
        CONV_SLOT=conv_slot, count_at=CHUNKS, resumed_at=RESUMED, scans_at=SCANS,
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
