"""Fork attention in Triton: tiles of queries over the keys of their chains.

A program takes a tile of queries that share their ancestors, all query heads of one key head at
once. It goes over the ancestors' pages, then over each branch's own keys from the grain on, with
one running maximum, sum and accumulator; the output gate is its epilogue. Steps are of 64 keys from
a multiple of 64 of the chain, so a query adds up in one order wherever its prompt forks.

With SPLIT, a chain is cut at every SPLIT grains, and each part summed up by a program of its own;
whoever has a part adds what the parts before it came to, in order, once they have. Where a chain is
cut depends on nothing but positions, so the bits are those of one program that does all parts.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


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
    # elsewhere a row that all of the node see: no weight makes nothing of what is not finite
    place = tl.where(real, row, low).to(tl.int64) * (NKV * D) + kv * D
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
def _attend(
    q, k, v, keys, values, rows, tile_queries, tile_nodes, tile_ends, tile_pages, pages,
    chain_rows, starts, cu_seqlens, row_nodes, scale, tile, kv, part,
    NKV: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, TILE: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, GATHER: tl.constexpr,
    STAGES: tl.constexpr, SPLIT: tl.constexpr, product: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and accumulator of a tile's queries over their keys, or over one part of them.

    Steps over 64 keys each, in order of position: pages; the tile of the grain that the branches
    begin in, whose first keys are their ancestors'; the branch's own. A node has its steps to
    itself, so that no neighbour moves a key to another place of a product.
    """
    M: tl.constexpr = TILE * GROUP_BLOCK
    m = tl.arange(0, M)
    j = tl.arange(0, 64)
    d = tl.arange(0, D)
    inner = j[:, None] * (NKV * D) + d[None, :]
    there, query, head, node, time = _queries(
        tile_queries + tile * TILE, rows, row_nodes, starts, cu_seqlens, m, kv,
        GROUP, GROUP_BLOCK, GATHER,
    )  # fmt: skip
    at = (query * (NKV * GROUP) + head)[:, None] * D + d[None, :]
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
    for half in range(first * 2, last * 2 + 2):
        own = half // 2
        low = tl.load(cu_seqlens + own)
        high = tl.minimum(tl.load(cu_seqlens + own + 1), end)
        open_from, open_to, held_from, held_to = _steps(
            half, first * 2, past, tail, (high - low + tail + 63) // 64, full
        )
        if SPLIT > 0:  # steps are counted from the grain that the node begins in
            least = part * SPLIT - past
            open_from, open_to = tl.maximum(open_from, least), tl.minimum(open_to, least + SPLIT)
            held_from, held_to = tl.maximum(held_from, least), tl.minimum(held_to, least + SPLIT)
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
            top, total, acc = _one_tile(b_q, b_k, b_v, seen, top, total, acc, scale, True, product)
    return top, total, acc


@triton.jit
def _joined(
    top, total, acc, sums, flag, part, last, scale,
    M: tl.constexpr, D: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """What a tile's parts come to with this one. Waits for those before it; leaves the sums for the
    one after it, if there is one.

    sums: [M, D] accumulators, [M] maxima, [M] totals of the tile; flag: times THREADS, how many
    parts they hold.
    """
    m = tl.arange(0, M)
    inner = m[:, None] * D + tl.arange(0, D)[None, :]
    if part > 0:
        done = tl.atomic_add(flag, 0, sem="acquire")
        while done < part * THREADS:
            done = tl.atomic_add(flag, 0, sem="acquire")
        # not from a cache of the processor's own: other processors have written them
        acc_before = tl.load(sums + inner, cache_modifier=".cg")
        top_before = tl.load(sums + M * D + m, cache_modifier=".cg")
        total_before = tl.load(sums + M * (D + 1) + m, cache_modifier=".cg")
        now = tl.maximum(top, top_before)
        here, before = tl.exp2((top - now) * scale), tl.exp2((top_before - now) * scale)
        # a query that has no key in this part keeps the bits it had
        any_key = top > float("-inf")
        acc = tl.fma(acc_before, tl.broadcast_to(before[:, None], (M, D)), acc * here[:, None])
        acc = tl.where(any_key[:, None], acc, acc_before)
        total = tl.where(any_key, tl.fma(total_before, before, total * here), total_before)
        top = tl.where(any_key, now, top_before)
    if last == 0:
        tl.store(sums + inner, acc)
        tl.store(sums + M * D + m, top)
        tl.store(sums + M * (D + 1) + m, total)
        # each thread says so for itself, of what it has stored
        tl.atomic_add(flag + tl.zeros([THREADS], tl.int32), 1, sem="release")
    return total, acc


@triton.jit
def attention_kernel(
    q, q_gate, gate_stride, k, v, keys, values, out, rows,
    tile_queries, tile_nodes, tile_ends, tile_pages, pages, chain_rows, starts, cu_seqlens,
    row_nodes, counts, scale, parts, part_sums, sums, progress,
    NKV: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, TILE: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, GATHER: tl.constexpr,
    STAGES: tl.constexpr, SPLIT: tl.constexpr, THREADS: tl.constexpr, count_at: tl.constexpr,
    product: tl.constexpr,
):  # fmt: skip
    """Gated outputs of all tiles. Without SPLIT, tiles are dealt out; with it, their parts are
    claimed in order, so one that waits waits for a program that runs.

    progress [1 + kept * NKV], zeros: how many have been claimed, and the flag of each sum.
    """
    NH: tl.constexpr = NKV * GROUP
    M: tl.constexpr = TILE * GROUP_BLOCK
    m = tl.arange(0, M)
    d = tl.arange(0, D)
    tasks = tl.load(counts + count_at) * NKV
    if SPLIT == 0:
        for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
            tile, kv = task // NKV, task % NKV
            top, total, acc = _attend(
                q, k, v, keys, values, rows, tile_queries, tile_nodes, tile_ends, tile_pages,
                pages, chain_rows, starts, cu_seqlens, row_nodes, scale, tile, kv, 0,
                NKV, GROUP, GROUP_BLOCK, TILE, D, PAGE, WINDOW, GATHER, STAGES, SPLIT, product,
            )  # fmt: skip
            _store_gated(
                acc, total, tile_queries + tile * TILE, m, d, kv, q_gate, gate_stride, out,
                NH, GROUP, GROUP_BLOCK, D,
            )  # fmt: skip
    else:
        task = tl.atomic_add(progress, 1, sem="relaxed")
        while task < tasks:
            item, kv = parts + task // NKV * 2, task % NKV
            tile, part = tl.load(item), tl.load(item + 1)
            top, total, acc = _attend(
                q, k, v, keys, values, rows, tile_queries, tile_nodes, tile_ends, tile_pages,
                pages, chain_rows, starts, cu_seqlens, row_nodes, scale, tile, kv, part,
                NKV, GROUP, GROUP_BLOCK, TILE, D, PAGE, WINDOW, GATHER, STAGES, SPLIT, product,
            )  # fmt: skip
            number = tl.load(part_sums + 2 * tile)
            kept = (tl.load(part_sums + 2 * tile + 1) * NKV + kv).to(tl.int64)
            if number > 1:
                total, acc = _joined(
                    top, total, acc, sums + kept * (M * (D + 2)), progress + 1 + kept, part,
                    part == number - 1, scale, M, D, THREADS,
                )  # fmt: skip
            if part == number - 1:
                _store_gated(
                    acc, total, tile_queries + tile * TILE, m, d, kv, q_gate, gate_stride, out,
                    NH, GROUP, GROUP_BLOCK, D,
                )  # fmt: skip
            task = tl.atomic_add(progress, 1, sem="relaxed")
