"""Gated fork attention in Triton: `attention_ref` in two launches.

1. norms and rotation of queries and keys, keys and values also into the pages of whole grains.
2. attention: a program takes a tile of queries that share their ancestors, all query heads of one
key head at once. It goes over the ancestors' pages, then over each branch's own keys from the grain
on, with one running maximum, sum and accumulator; the output gate is its epilogue. Steps are of 64
keys from a multiple of 64 of the chain, so a query adds up in one order wherever its prompt forks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flide_engine.kernels.attention_ref import AttentionShape
from flide_engine.kernels.stream import READ_TILES, TILES, WRITTEN_PAGES, StreamTensors

LOG2_E = tl.constexpr(1.4426950408889634)


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
    keys, values, write_pages, write_rows, counts, queries, tokens, eps,
    NH: tl.constexpr, NH_BLOCK: tl.constexpr, NKV: tl.constexpr, NKV_BLOCK: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, GATHER: tl.constexpr,
    count_at: tl.constexpr,
):  # fmt: skip
    """Queries, then the stream's keys and values, then whole grains into their pages."""
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
        steps = tl.load(counts + count_at) * 64
        for step in range(i - queries - tokens, steps, tl.num_programs(0) - queries - tokens):
            row = tl.load(write_rows + step).to(tl.int64)
            page = tl.load(write_pages + step // 64).to(tl.int64)
            at = page * PAGE + (step % 64) * NKV * D
            _key_value(
                k_v + row * k_stride, keys + at, values + at,
                k_norm, cos + row * HALF, sin + row * HALF, eps, NKV, NKV_BLOCK, D, HALF,
            )  # fmt: skip


@triton.jit
def _queries(
    tile_queries, rows, row_nodes, starts, cu_seqlens, m, kv,
    GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Of each row of a product: whether it exists, query, head, node, chain position."""
    query = tl.load(tile_queries + m // GROUP_BLOCK)
    there = (query >= 0) & (m % GROUP_BLOCK < GROUP)
    query = tl.where(there, query, 0).to(tl.int64)
    head = kv * GROUP + m % GROUP_BLOCK
    row = tl.load(rows + query) if GATHER else query.to(tl.int32)
    node = tl.where(there, tl.load(row_nodes + row), -2)
    start = tl.load(starts + node, mask=there, other=0)
    time = start + row - tl.load(cu_seqlens + node, mask=there, other=0)
    return there, query, head, node, time


@triton.jit
def _one_tile(q, k, v, s_mask, top, total, acc, scale, MASK: tl.constexpr, product: tl.constexpr):
    """One step of the running softmax over 64 keys; with MASK, `s_mask` [M, 64] says which."""
    s = tl.dot(q, tl.trans(k), input_precision=product)
    if MASK:
        s = tl.where(s_mask, s, float("-inf"))
    now = tl.maximum(top, tl.max(s, 1))
    # a row that has seen nothing yet stays at -inf without turning into NaN
    safe = tl.where(now == float("-inf"), 0.0, now) if MASK else now
    # fused by hand, so that both kinds of step round alike
    p = tl.exp2(tl.fma(s, scale, -(safe * scale)[:, None]))
    shrink = tl.exp2((top - safe) * scale)
    total = tl.fma(total, shrink, tl.sum(p, 1))
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=product)
    return now, total, acc


@triton.jit
def _steps(half, first, past, tail, steps, full):
    """Steps of half a node, counted from the grain it begins in: (open from, to, held from, to).

    Open ones are seen whole by every query: pages (negative), and `full` of the node's own. The
    first half ends with the straddling tile, if there is one; else it is all there is.
    """
    after = half % 2
    if tail == 0:
        open_from = tl.where(half == first, -past, 0)
        open_to = tl.where(after == 0, full, open_from)
        held_to = tl.where(after == 0, steps, 0)
    elif after == 0:
        open_from = tl.where(half == first, -past, 0)
        open_to = 0
        held_to = 1
    else:
        open_from = 1
        open_to = full
        held_to = steps
    return open_from, open_to, tl.maximum(open_to, after), held_to


@triton.jit
def _in_window(seen, time, position, WINDOW: tl.constexpr):
    """Of what is seen, what is not too far back; without a window all of it."""
    if WINDOW > 0:
        seen = seen & (time[:, None] - position[None, :] < WINDOW)
    return seen


@triton.jit
def _open_keys(
    keys, values, pages, k, v, first, t, kv, inner,
    NKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """64 keys and values of an open step: a page, or rows of the node's own, all side by side."""
    page = tl.load(pages + t, mask=t < 0, other=0).to(tl.int64) * PAGE + kv * D
    own = (first + 64 * t).to(tl.int64) * (NKV * D) + kv * D
    b_k = tl.load(tl.where(t < 0, keys + page, k + own) + inner)
    b_v = tl.load(tl.where(t < 0, values + page, v + own) + inner)
    return b_k, b_v


@triton.jit
def _held_keys(
    k, v, tail_rows, low, high, index, kv, d, NKV: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Keys and values at places `index` of a node's own, negative ones its ancestors'; and which
    there are.
    """
    row = tl.load(tail_rows + index, mask=index < 0, other=0)
    row = tl.where(index < 0, row, low + index)
    real = low + index < high
    place = tl.where(real, row, 0).to(tl.int64) * (NKV * D) + kv * D
    at = place[:, None] + d[None, :]
    return tl.load(k + at), tl.load(v + at), real


@triton.jit
def _store_gated(
    acc, total, tile_queries, m, d, kv, q_gate, gate_stride, out,
    NH: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The tile's outputs: sums over their totals, times sigmoid(gate)."""
    # read again, by another policy lest it be merged: kept, it would spill in the loop
    query = tl.load(tile_queries + m // GROUP_BLOCK, eviction_policy="evict_last")
    there = (query >= 0) & (m % GROUP_BLOCK < GROUP)
    query = tl.where(there, query, 0).to(tl.int64)
    head = kv * GROUP + m % GROUP_BLOCK
    gate = tl.load(
        q_gate + (query * gate_stride + head * 2 * D + D)[:, None] + d[None, :],
        mask=there[:, None], other=0.0,
    ).to(tl.float32)  # fmt: skip
    value = (acc * (1.0 / tl.where(total > 0, total, 1.0))[:, None]).to(out.dtype.element_ty)
    root = tl.rsqrt(1.0 + tl.exp2(gate * -LOG2_E))  # squared, the sigmoid without a division
    value = (value.to(tl.float32) * (root * root)).to(out.dtype.element_ty)
    tl.store(out + (query * NH + head)[:, None] * D + d[None, :], value, mask=there[:, None])


@triton.jit
def _attention_kernel(
    q, q_gate, gate_stride, k, v, keys, values, out, rows,
    tile_queries, tile_nodes, tile_ends, tile_pages, pages, chain_rows, starts, cu_seqlens,
    row_nodes, counts, scale,
    NKV: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, TILE: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, GATHER: tl.constexpr,
    STAGES: tl.constexpr, count_at: tl.constexpr, product: tl.constexpr,
):  # fmt: skip
    NH: tl.constexpr = NKV * GROUP
    M: tl.constexpr = TILE * GROUP_BLOCK
    m = tl.arange(0, M)
    j = tl.arange(0, 64)
    d = tl.arange(0, D)
    inner = j[:, None] * (NKV * D) + d[None, :]
    for task in range(tl.program_id(0), tl.load(counts + count_at) * NKV, tl.num_programs(0)):
        tile = task // NKV
        kv = task % NKV
        there, query, head, node, time = _queries(
            tile_queries + tile * TILE, rows, row_nodes, starts, cu_seqlens, m, kv,
            GROUP, GROUP_BLOCK, GATHER,
        )  # fmt: skip
        at = (query * NH + head)[:, None] * D + d[None, :]
        b_q = tl.load(q + at, mask=there[:, None], other=0.0)
        top = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, D], tl.float32)
        first_page = tl.load(tile_pages + 2 * tile)
        past = tl.load(tile_pages + 2 * tile + 1)
        first = tl.load(tile_nodes + 2 * tile)
        last = tl.load(tile_nodes + 2 * tile + 1)
        end = tl.load(tile_ends + 2 * tile) + 1
        full = tl.load(tile_ends + 2 * tile + 1)
        tail = tl.load(starts + first) % 64
        # Steps over 64 keys each, in order of position: pages; the tile of the grain that the
        # branches begin in, whose first keys are their ancestors'; the branch's own. A node has its
        # steps to itself, so that no neighbour moves a key to another place of a product.
        for half in range(first * 2, last * 2 + 2):
            own = half // 2
            low = tl.load(cu_seqlens + own)
            high = tl.minimum(tl.load(cu_seqlens + own + 1), end)
            open_from, open_to, held_from, held_to = _steps(
                half, first * 2, past, tail, (high - low + tail + 63) // 64, full
            )
            for t in tl.range(open_from, open_to, num_stages=STAGES):
                b_k, b_v = _open_keys(
                    keys, values, pages + first_page + past, k, v, low - tail, t, kv, inner,
                    NKV, D, PAGE,
                )  # fmt: skip
                seen = _in_window(there[:, None], time, (past + t) * 64 + j, WINDOW)
                top, total, acc = _one_tile(
                    b_q, b_k, b_v, seen, top, total, acc, scale, WINDOW > 0, product
                )
            for t in tl.range(held_from, held_to, num_stages=1):
                tail_rows, index = chain_rows + own * 66 + 3 + tail, 64 * t - tail + j
                b_k, b_v, real = _held_keys(k, v, tail_rows, low, high, index, kv, d, NKV, D)
                position = (past + t) * 64 + j
                seen = (node == own)[:, None] & real[None, :]
                seen = seen & (position[None, :] <= time[:, None])
                seen = _in_window(seen, time, position, WINDOW)
                top, total, acc = _one_tile(
                    b_q, b_k, b_v, seen, top, total, acc, scale, True, product
                )
        _store_gated(
            acc, total, tile_queries + tile * TILE, m, d, kv, q_gate, gate_stride, out,
            NH, GROUP, GROUP_BLOCK, D,
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
) -> Tensor:
    """`attention_ref` in Triton. Needs `stream.tasks`; `rows`: None or `stream.read_rows`."""
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
    _project_kernel[(queries + tokens + 4 * programs,)](
        q_gate, q_gate.stride(0), k_v, k_v.stride(0), q_norm, k_norm, cos, sin, index, q, k, v,
        keys, values, stream.write_pages, stream.write_rows, tasks.counts, queries, tokens,
        shape.eps, NH=nh, NH_BLOCK=triton.next_power_of_2(nh), NKV=nkv,
        NKV_BLOCK=triton.next_power_of_2(nkv), D=hd, HALF=cos.shape[1], PAGE=page,
        GATHER=rows is not None, count_at=WRITTEN_PAGES, num_warps=4,
    )  # fmt: skip
    out = torch.empty_like(q).flatten(1)
    lists = (
        (tasks.tile_queries, tasks.tile_nodes, tasks.tile_ends, tasks.tile_pages)
        if rows is None
        else (
            tasks.read_tile_queries,
            tasks.read_tile_nodes,
            tasks.read_tile_ends,
            tasks.read_tile_pages,
        )
    )
    block = triton.next_power_of_2(group)
    _attention_kernel[(programs,)](
        q, q_gate, q_gate.stride(0), k, v, keys, values, out, index, *lists,
        stream.pages, stream.chain_rows, stream.starts, stream.cu_seqlens, tasks.row_nodes,
        tasks.counts, hd**-0.5 * LOG2_E.value, NKV=nkv, GROUP=group, GROUP_BLOCK=block,
        TILE=lists[0].shape[1], D=hd, PAGE=page, WINDOW=shape.window or 0, GATHER=rows is not None,
        STAGES=stages,
        count_at=TILES if rows is None else READ_TILES,
        product="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=warps or (8 if lists[0].shape[1] * block > 64 else 4),
    )  # fmt: skip
    return out
