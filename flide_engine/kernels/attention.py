"""Gated fork attention in Triton: `attention_ref` in two launches.

1. norms and rotation of queries and keys, keys and values also into the pages of whole grains.
2. attention of tiles of queries, see `fork_attention.py`; or `attention_hopper.py`, where HOPPER.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flide_engine.kernels.attention_hopper import attend_hopper, supports
from flide_engine.kernels.attention_ref import AttentionShape
from flide_engine.kernels.fork_attention import LOG2_E, attention_kernel
from flide_engine.kernels.hopper.program import has_hopper
from flide_engine.kernels.stream import (
    PARTS,
    READ_PARTS,
    READ_TILES,
    TILES,
    WRITTEN_PAGES,
    StreamTensors,
)

ZEROS = 1024

HOPPER = True
"""Whether the second launch is CUDA C++ where the card and the model allow it: faster at every
length measured (`python -m benchmarks.tuning 0.8B --ops attention`). Bits differ from Triton's, so
it is one value for every round and replica.
"""


@triton.jit
def _norm_rope(
    source, out, weight, cos, sin, eps,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Heads of one row: (1 + w) rms norm over D, then half-split rotation of the first 2 HALF."""
    head = tl.arange(0, BLOCK)[:, None]
    d = tl.arange(0, D)[None, :]
    inside = (head < HEADS) & (d >= 0)
    partner = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
    x = tl.load(source + head * STEP + d, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(source + head * STEP + partner, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    x = x * scale * (1.0 + tl.load(weight + d).to(tl.float32))
    y = y * scale * (1.0 + tl.load(weight + partner).to(tl.float32))
    # rounded between norm and rotation, as the reference does
    x = x.to(out.dtype.element_ty).to(tl.float32)
    y = y.to(out.dtype.element_ty).to(tl.float32)
    angle = tl.where(d < HALF, d, d - HALF)
    turns = d < 2 * HALF
    c = tl.load(cos + angle, mask=turns, other=1.0)
    s = tl.load(sin + angle, mask=turns, other=0.0)
    value = x * c + tl.where(d < HALF, -y, y) * s
    tl.store(out + head * D + d, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _key_value(
    k_v, k_out, v_out, weight, cos, sin, eps,
    NKV: tl.constexpr, NKV_BLOCK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One row's keys, normed and rotated, and its values as they are."""
    _norm_rope(k_v, k_out, weight, cos, sin, eps, NKV, NKV_BLOCK, D, D, HALF)
    at = tl.arange(0, NKV_BLOCK)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(v_out + at, tl.load(k_v + NKV * D + at, mask=at < NKV * D), mask=at < NKV * D)


@triton.jit
def _project_kernel(
    q_gate, q_stride, k_v, k_stride, q_norm, k_norm, cos, sin, rows, q_out, k_out, v_out,
    keys, values, write_pages, write_rows, counts, progress, queries, tokens, eps,
    NH: tl.constexpr, NH_BLOCK: tl.constexpr, NKV: tl.constexpr, NKV_BLOCK: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, GATHER: tl.constexpr,
    PROGRESS: tl.constexpr, BLOCK: tl.constexpr, count_at: tl.constexpr,
):  # fmt: skip
    """Queries, then the stream's keys and values, then whole grains into their pages. progress
    [PROGRESS]: zeroed for the next launch.
    """
    i = tl.program_id(0).to(tl.int64)
    if i < queries:
        row = tl.load(rows + i).to(tl.int64) if GATHER else i
        _norm_rope(
            q_gate + i * q_stride, q_out + i * NH * D, q_norm, cos + row * HALF, sin + row * HALF,
            eps, NH, NH_BLOCK, 2 * D, D, HALF,
        )  # fmt: skip
    elif i < queries + tokens:
        row = i - queries
        _key_value(
            k_v + row * k_stride, k_out + row * NKV * D, v_out + row * NKV * D,
            k_norm, cos + row * HALF, sin + row * HALF, eps, NKV, NKV_BLOCK, D, HALF,
        )  # fmt: skip
    else:
        zero = (i - queries - tokens) * BLOCK + tl.arange(0, BLOCK)
        tl.store(progress + zero, 0, mask=zero < PROGRESS)
        steps = tl.load(counts + count_at) * 64
        for step in range(i - queries - tokens, steps, tl.num_programs(0) - queries - tokens):
            row = tl.load(write_rows + step).to(tl.int64)
            page = tl.load(write_pages + step // 64).to(tl.int64)
            at = page * PAGE + (step % 64) * NKV * D
            _key_value(
                k_v + row * k_stride, keys + at, values + at,
                k_norm, cos + row * HALF, sin + row * HALF, eps, NKV, NKV_BLOCK, D, HALF,
            )  # fmt: skip


def attention(
    q_gate: Tensor,
    k_v: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: Tensor | None,
    keys: Tensor,
    values: Tensor,
    shape: AttentionShape,
    stream: StreamTensors,
    programs: int = 132,
    warps: int | None = None,
    stages: int = 2,
    hopper: bool | None = None,
) -> Tensor:
    """`attention_ref` on a GPU. Needs `stream.tasks`; `rows`: None or `stream.read_rows`.

    hopper: as HOPPER, which is what None says.
    """
    tasks = stream.tasks
    assert tasks is not None, "the GPU kernels need the stream's work lists"
    nh, nkv, hd = shape.heads, shape.kv_heads, shape.head_dim
    group, queries, tokens = nh // nkv, len(q_gate), len(k_v)
    assert keys.stride() == values.stride(), "keys and values lie apart in different ways"
    assert keys[0].is_contiguous(), "a page's keys lie apart"
    page = keys.stride(0)  # the pages of other layers lie between those of this one
    q = q_gate.new_empty(queries, nh, hd)
    # open steps take whole grains and so may read, and ignore, rows past the end
    k, v = k_v.new_empty(2, tokens, nkv, hd)
    index = rows if rows is not None else stream.read_rows
    every, read = rows is None, "" if rows is None else "read_"
    queries_of, *lists, parts, part_sums = (
        getattr(tasks, f"{read}tile_{name}")
        for name in ("queries", "nodes", "ends", "pages", "parts", "sums")
    )
    tile, block = queries_of.shape[1], triton.next_power_of_2(group)
    progress = q_gate.new_empty(1 + tasks.sums * nkv if tasks.split else 0, dtype=torch.int32)
    sums = q_gate.new_empty(tasks.sums * nkv, tile * block * (hd + 2), dtype=torch.float32)
    writers = max(4 * programs, -(-len(progress) // ZEROS))
    _project_kernel[(queries + tokens + writers,)](
        q_gate, q_gate.stride(0), k_v, k_v.stride(0), q_norm, k_norm, cos, sin, index, q, k, v,
        keys, values, stream.write_pages, stream.write_rows, tasks.counts, progress, queries,
        tokens, shape.eps, NH=nh, NH_BLOCK=triton.next_power_of_2(nh), NKV=nkv,
        NKV_BLOCK=triton.next_power_of_2(nkv), D=hd, HALF=cos.shape[1], PAGE=page,
        GATHER=not every, PROGRESS=len(progress), BLOCK=ZEROS, count_at=WRITTEN_PAGES, num_warps=4,
    )  # fmt: skip
    out = torch.empty_like(q).flatten(1)
    wanted = (HOPPER if hopper is None else hopper) and has_hopper(q.device)
    if wanted and supports(q_gate, keys, shape, tasks.split):
        attend_hopper(q, q_gate, k, v, rows, keys, values, out, shape, stream)
        return out
    counted = (TILES if every else READ_TILES, PARTS if every else READ_PARTS)
    warps = warps or (8 if tile * block > 64 else 4)
    attention_kernel[(programs,)](
        q, q_gate, q_gate.stride(0), k, v, keys, values, out, index, queries_of, *lists,
        stream.pages, stream.chain_rows, stream.starts, stream.cu_seqlens, tasks.row_nodes,
        tasks.counts, hd**-0.5 * LOG2_E.value, parts, part_sums, sums, progress,
        NKV=nkv, GROUP=group, GROUP_BLOCK=block, TILE=tile, D=hd, PAGE=page,
        WINDOW=shape.window or 0, GATHER=not every, STAGES=stages, SPLIT=tasks.split,
        THREADS=32 * warps, count_at=counted[tasks.split > 0],
        product="ieee" if q.dtype == torch.float32 else "tf32", num_warps=warps,
    )  # fmt: skip
    return out
