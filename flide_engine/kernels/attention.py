"""Gated fork attention in Triton: `attention_ref` in three launches.

1. norms and rotation of queries and keys; 2. copies of whole grains into their pages; 3. attention:
a program takes a tile of queries that share their ancestors, all query heads of one key head at
once. It goes over the ancestors' pages, then the rows between the grain and the branches' first
tokens, then the branches' own rows, with one running maximum, sum and accumulator; the output gate
is its epilogue.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flide_engine.kernels.attention_ref import AttentionShape
from flide_engine.kernels.stream import READ_TILES, TILES, WRITTEN_PAGES, StreamTensors

LOG2_E = 1.4426950408889634


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
def _norm_rope_kernel(
    q_gate, q_stride, k_v, k_stride, q_norm, k_norm, cos, sin, rows, q_out, k_out, queries, eps,
    NH: tl.constexpr, NH_BLOCK: tl.constexpr, NKV: tl.constexpr, NKV_BLOCK: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    if i < queries:
        row = tl.load(rows + i).to(tl.int64) if GATHER else i
        _norm_rope(
            q_gate + i * q_stride, q_out + i * NH * D, q_norm, cos + row * HALF, sin + row * HALF,
            eps, NH, NH_BLOCK, 2 * D, D, HALF,
        )  # fmt: skip
    else:
        row = i - queries
        _norm_rope(
            k_v + row * k_stride, k_out + row * NKV * D, k_norm, cos + row * HALF, sin + row * HALF,
            eps, NKV, NKV_BLOCK, D, D, HALF,
        )  # fmt: skip


@triton.jit
def _write_pages_kernel(
    k, v, v_stride, keys, values, write_pages, write_rows, counts,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, count_at: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    for task in range(tl.program_id(0), tl.load(counts + count_at) * 64, tl.num_programs(0)):
        page = tl.load(write_pages + task // 64).to(tl.int64)
        row = tl.load(write_rows + task).to(tl.int64)
        target = (page * 64 + task % 64) * WIDTH + at
        tl.store(keys + target, tl.load(k + row * WIDTH + at, mask=inside), mask=inside)
        tl.store(values + target, tl.load(v + row * v_stride + at, mask=inside), mask=inside)


@triton.jit
def _queries(
    tile_queries, rows, row_nodes, starts, cu_seqlens, m, kv,
    GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Of each row of a product: whether it exists, query, head, stream row, node, position."""
    query = tl.load(tile_queries + m // GROUP_BLOCK)
    there = (query >= 0) & (m % GROUP_BLOCK < GROUP)
    query = tl.where(there, query, 0).to(tl.int64)
    head = kv * GROUP + m % GROUP_BLOCK
    row = tl.load(rows + query) if GATHER else query.to(tl.int32)
    node = tl.where(there, tl.load(row_nodes + row), -2)
    start = tl.load(starts + node, mask=there, other=0)
    time = start + row - tl.load(cu_seqlens + node, mask=there, other=0)
    return there, query, head, row, node, time


@triton.jit
def _one_tile(q, k, v, seen, top, total, acc, scale, precision: tl.constexpr):
    """One step of the running softmax over 64 keys; `seen` masks [M, 64]."""
    s = tl.dot(q, tl.trans(k), input_precision=precision) * scale
    s = tl.where(seen, s, float("-inf"))
    now = tl.maximum(top, tl.max(s, 1))
    safe = tl.where(now == float("-inf"), 0.0, now)
    p = tl.exp2(s - safe[:, None])
    shrink = tl.exp2(top - safe)
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=precision)
    return now, total, acc


@triton.jit
def _attention_kernel(
    q, q_gate, gate_stride, k, v, v_stride, keys, values, out, rows,
    tile_queries, tile_nodes, tile_keys, tile_pages, pages, chain_rows, starts, cu_seqlens,
    row_nodes, counts, scale,
    NKV: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, TILE: tl.constexpr,
    D: tl.constexpr, WINDOW: tl.constexpr, GATHER: tl.constexpr, count_at: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    NH: tl.constexpr = NKV * GROUP
    M: tl.constexpr = TILE * GROUP_BLOCK
    m = tl.arange(0, M)
    j = tl.arange(0, 64)
    d = tl.arange(0, D)
    for task in range(tl.program_id(0), tl.load(counts + count_at) * NKV, tl.num_programs(0)):
        tile = task // NKV
        kv = task % NKV
        there, query, head, row, node, time = _queries(
            tile_queries + tile * TILE, rows, row_nodes, starts, cu_seqlens, m, kv,
            GROUP, GROUP_BLOCK, GATHER,
        )  # fmt: skip
        at = (query * NH + head)[:, None] * D + d[None, :]
        b_q = tl.load(q + at, mask=there[:, None], other=0.0)
        top = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, D], tl.float32)
        first_page = tl.load(tile_pages + 2 * tile)
        count = tl.load(tile_pages + 2 * tile + 1)
        shared = tl.load(tile_nodes + tile)
        for i in range(count):
            page = tl.load(pages + first_page + i).to(tl.int64)
            place = (((page * 64 + j) * NKV + kv) * D)[:, None] + d[None, :]
            b_k = tl.load(keys + place)
            b_v = tl.load(values + place)
            seen = there[:, None] & (j >= 0)[None, :]
            if WINDOW > 0:
                seen = seen & (time[:, None] - (i * 64 + j)[None, :] < WINDOW)
            top, total, acc = _one_tile(b_q, b_k, b_v, seen, top, total, acc, scale, precision)
        begin = tl.load(starts + shared)
        tail = begin % 64
        if tail > 0:
            past = tl.load(chain_rows + shared * 66 + 3 + j, mask=j < tail, other=0).to(tl.int64)
            b_k = tl.load(k + ((past * NKV + kv) * D)[:, None] + d[None, :])
            b_v = tl.load(v + (past * v_stride + kv * D)[:, None] + d[None, :])
            seen = there[:, None] & (j < tail)[None, :]
            if WINDOW > 0:
                seen = seen & (time[:, None] - (begin - tail + j)[None, :] < WINDOW)
            top, total, acc = _one_tile(b_q, b_k, b_v, seen, top, total, acc, scale, precision)
        low = tl.load(tile_keys + 2 * tile)
        high = tl.load(tile_keys + 2 * tile + 1) + 1
        for base in range(low, high, 64):
            key = base + j
            real = key < high
            spot = tl.where(real, key, 0).to(tl.int64)
            b_k = tl.load(k + ((spot * NKV + kv) * D)[:, None] + d[None, :])
            b_v = tl.load(v + (spot * v_stride + kv * D)[:, None] + d[None, :])
            same = node[:, None] == tl.load(row_nodes + spot)[None, :]
            seen = same & real[None, :] & (key[None, :] <= row[:, None])
            if WINDOW > 0:
                seen = seen & (row[:, None] - key[None, :] < WINDOW)
            top, total, acc = _one_tile(b_q, b_k, b_v, seen, top, total, acc, scale, precision)
        gate = tl.load(
            q_gate + (query * gate_stride + head * 2 * D + D)[:, None] + d[None, :],
            mask=there[:, None], other=0.0,
        ).to(tl.float32)  # fmt: skip
        mixed = (acc / tl.where(total > 0, total, 1.0)[:, None]).to(out.dtype.element_ty)
        value = mixed.to(tl.float32) / (1.0 + tl.exp(-gate))
        tl.store(out + at, value.to(out.dtype.element_ty), mask=there[:, None])


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
) -> Tensor:
    """`attention_ref` in Triton. Needs `stream.tasks`; `rows`: None or `stream.read_rows`."""
    tasks = stream.tasks
    assert tasks is not None, "the GPU kernels need the stream's work lists"
    nh, nkv, hd = shape.heads, shape.kv_heads, shape.head_dim
    group = nh // nkv
    queries, half = len(q_gate), cos.shape[1]
    q = q_gate.new_empty(queries, nh, hd)
    k = k_v.new_empty(len(k_v), nkv, hd)
    v = k_v[:, nkv * hd :]
    gathered = rows is not None
    index = rows if rows is not None else stream.read_rows
    _norm_rope_kernel[(queries + len(k_v),)](
        q_gate, q_gate.stride(0), k_v, k_v.stride(0), q_norm, k_norm, cos, sin, index, q, k,
        queries, shape.eps, NH=nh, NH_BLOCK=triton.next_power_of_2(nh), NKV=nkv,
        NKV_BLOCK=triton.next_power_of_2(nkv), D=hd, HALF=half, GATHER=gathered, num_warps=4,
    )  # fmt: skip
    width = nkv * hd
    _write_pages_kernel[(programs,)](
        k, v, v.stride(0), keys, values, stream.write_pages, stream.write_rows, tasks.counts,
        WIDTH=width, BLOCK=triton.next_power_of_2(width), count_at=WRITTEN_PAGES, num_warps=4,
    )  # fmt: skip
    out = q_gate.new_zeros(queries, nh * hd)
    lists = (
        (
            tasks.read_tile_queries,
            tasks.read_tile_nodes,
            tasks.read_tile_keys,
            tasks.read_tile_pages,
        )
        if gathered
        else (tasks.tile_queries, tasks.tile_nodes, tasks.tile_keys, tasks.tile_pages)
    )
    _attention_kernel[(programs,)](
        q, q_gate, q_gate.stride(0), k, v, v.stride(0), keys, values, out, index, *lists,
        stream.pages, stream.chain_rows, stream.starts, stream.cu_seqlens, tasks.row_nodes,
        tasks.counts, hd**-0.5 * LOG2_E, NKV=nkv, GROUP=group,
        GROUP_BLOCK=triton.next_power_of_2(group), TILE=lists[0].shape[1], D=hd,
        WINDOW=shape.window or 0, GATHER=gathered, count_at=READ_TILES if gathered else TILES,
        precision="ieee" if q.dtype == torch.float32 else "tf32", num_warps=8, num_stages=2,
    )  # fmt: skip
    return out
