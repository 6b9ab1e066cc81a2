"""Gated delta net in Triton: `delta_net_ref` in two launches for all rows and chunks, one a level for
the chain of states, and one for all outputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flide_engine.kernels.delta_net_prep import conv_kernel, prep_kernel
from flide_engine.kernels.delta_net_ref import DeltaNetShape, DeltaNetWeights
from flide_engine.kernels.delta_net_scan import output_kernel, state_kernel
from flide_engine.kernels.stream import CHUNKS, RESUMED, StreamTensors

CHUNK = 64


@dataclass(frozen=True)
class DeltaNetTuning:
    """How the launches are shaped; no choice changes a bit.

    conv_rows: rows of a program of the convolution. prep_warps, output_warps: warps of a program. output_stages: how far loads of outputs run ahead. block_v: columns of a state that one program of
    the chain carries; stages: how far its loads run ahead.
    """

    conv_rows: int = 32
    prep_warps: int = 4
    prep_part: int = 64
    maxnreg: int | None = None
    output_warps: int = 4
    output_stages: int = 1
    block_v: int = 64
    stages: int = 3


def delta_net(
    projected: Tensor,
    weights: DeltaNetWeights,
    shape: DeltaNetShape,
    recurrent_state: Tensor,
    conv_state: Tensor,
    stream: StreamTensors,
    programs: int = 264,
    tuning: DeltaNetTuning = DeltaNetTuning(),
) -> Tensor:
    """`delta_net_ref` in Triton. Needs `stream.tasks`; head widths are powers of two.

    programs: of every launch, a multiple of the multiprocessors.
    """
    tasks = stream.tasks
    assert tasks is not None, "the GPU kernels need the stream's work lists"
    hk, hv, dk, dv = shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim
    chunks, new, kind = len(tasks.chunk_rows), projected.new_empty, projected.dtype
    k, w = new(2, chunks, hv, CHUNK, dk)
    u, decay = new(chunks, hv, dv, CHUNK), new(chunks, hv, dtype=torch.float32)
    total = new(chunks, hv, CHUNK, dtype=torch.float32)
    passed = new(tasks.passed_states, hv, dv, dk)
    product = "ieee" if kind == torch.float32 else "tf32"
    mixed = new(len(projected), shape.conv_channels)
    conv_kernel[(-(-len(projected) // tuning.conv_rows), 2 * hk + hv * dv // dk)](
        projected, projected.stride(0), conv_state, weights.conv, mixed, tasks.row_nodes,
        stream.starts, stream.cu_seqlens, stream.chain_rows, len(projected),
        HK=hk, HV=hv, DK=dk, DV=dv, ROWS=tuning.conv_rows, num_warps=4,
    )  # fmt: skip
    prep_kernel[(programs,)](
        mixed, projected, projected.stride(0), conv_state, weights.A_log, weights.dt_bias,
        tasks.chunk_rows, tasks.chunk_slots,
        recurrent_state, tasks.resumed, tasks.counts, k, w, u, total, decay, passed,
        HK=hk, HV=hv, DK=dk, DV=dv, BD=min(tuning.prep_part, dk, dv),
        count_at=CHUNKS, resumed_at=RESUMED,
        product=product, num_warps=tuning.prep_warps, num_stages=1,
        maxnreg=tuning.maxnreg,
    )  # fmt: skip
    for level in range(len(tasks.level_scans) - 1):
        state_kernel[(programs,)](
            k, w, u, decay, recurrent_state, passed,
            tasks.scans, tasks.level_scans, level, tasks.chunk_slots,
            HV=hv, DK=dk, DV=dv, BV=min(tuning.block_v, dv), STAGES=tuning.stages,
            product=product, num_warps=4,
        )  # fmt: skip
    out = new(len(projected), hv * dv)
    output_kernel[(programs,)](
        mixed, w, u, total, passed,
        projected[:, shape.conv_channels :], projected.stride(0), weights.norm, out, shape.eps,
        tasks.chunk_rows, tasks.chunk_skips, tasks.chunk_sources,
        tasks.counts, HK=hk, HV=hv, DK=dk, DV=dv, STAGES=tuning.output_stages, count_at=CHUNKS,
        product=product, num_warps=tuning.output_warps,
    )  # fmt: skip
    return out
