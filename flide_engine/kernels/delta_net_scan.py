"""The delta net's chain of states, and the outputs that follow from it.

The chain, a program a node, value head and slice of dv, chunk by chunk from a slot or from zeros:

    S = e^(G_63) S + kd^T (u - w S)

It keeps S in registers, transposed, as the left operand of both products. After each chunk it
leaves S, rounded, for the next chunk's output, and in float32 in a slot where a checkpoint is
marked. A node's last chunk is run only if its state is kept.

A chain that starts from a slot of this round waits until its ancestor has stored it. Chains are
claimed in stream order, ancestors first, so one that waits waits for a program that runs.

The outputs, a program a chunk and value head, all chunks at once:

    n = u - w S,  p = lower(q k^T * D),  o = e^G q S + p n,  y = norm(o) * weight * silu(z)
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def next_state(
    s, decay, at, dv, k_in, w_in, u_in, DK: tl.constexpr, DV: tl.constexpr, product: tl.constexpr
):  # fmt: skip
    """A state [BV, DK] after one more chunk; at: the chunk's and head's number."""
    kind = k_in.dtype.element_ty
    j = tl.arange(0, 64)
    key = (at * 64 + j[:, None]) * DK + tl.arange(0, DK)[None, :]
    w = tl.load(w_in + key)
    k = tl.load(k_in + key)
    u = tl.load(u_in + (at * DV + dv[:, None]) * 64 + j[None, :])
    n = u.to(tl.float32) - tl.dot(s.to(kind), tl.trans(w), input_precision=product)
    return tl.dot(n.to(kind), k, s * decay, input_precision=product)


@triton.jit
def state_kernel(
    k_in, w_in, u_in, decay_in, state, passed, scans, chunk_slots, counts, progress,
    HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
    SLOT: tl.constexpr, STAGES: tl.constexpr, THREADS: tl.constexpr, count_at: tl.constexpr,
    product: tl.constexpr,
):  # fmt: skip
    """States of all chains. passed [P, HV, DV, DK]: written.

    progress [1 + K * HV * DV / BV], zeros: how many tasks have been claimed, and how often the
    THREADS of each have stored a state.
    """
    kind = k_in.dtype.element_ty
    parts: tl.constexpr = DV // BV
    tasks = tl.load(counts + count_at) * HV * parts
    dk = tl.arange(0, DK)
    task = tl.atomic_add(progress, 1, sem="relaxed")
    while task < tasks:
        scan = scans + task // (HV * parts) * 6
        awaited = tl.load(scan + 4)
        if awaited >= 0:
            flag = progress + 1 + awaited * HV * parts + task % (HV * parts)
            needed = tl.load(scan + 5) * THREADS
            done = tl.atomic_add(flag, 0, sem="acquire")
            while done < needed:
                done = tl.atomic_add(flag, 0, sem="acquire")
        hv = task // parts % HV
        dv = (task % parts) * BV + tl.arange(0, BV)
        first = tl.load(scan)
        count = tl.load(scan + 1)
        slot = tl.load(scan + 2).to(tl.int64)
        out = tl.load(scan + 3)
        inner = dk[None, :] * DV + dv[:, None]
        s = tl.load(
            state + (slot * SLOT + hv * DK * DV) + inner,
            mask=(slot >= 0) & (inner >= 0), other=0.0,
        )  # fmt: skip
        decay = tl.load(decay_in + first * HV + hv)
        for i in tl.range(0, count, num_stages=STAGES):
            c = first + i
            at = tl.cast(c * HV + hv, tl.int64)
            kept = tl.load(chunk_slots + c).to(tl.int64)
            # the next one, so that nobody waits for it
            coming = tl.load(decay_in + at + HV, mask=i + 1 < count, other=0.0)
            s = next_state(s, decay, at, dv, k_in, w_in, u_in, DK, DV, product)
            number = ((out + i).to(tl.int64) * HV + hv) * DV * DK
            tl.store(passed + number + dv[:, None] * DK + dk[None, :], s.to(kind))
            if kept >= 0:
                tl.store(state + (kept * SLOT + hv * DK * DV) + inner, s)
                # each thread says so for itself: with a barrier, loads would not run ahead
                tl.atomic_add(progress + 1 + task + tl.zeros([THREADS], tl.int32), 1, sem="release")
            decay = coming
        task = tl.atomic_add(progress, 1, sem="relaxed")


@triton.jit
def output_chunk(
    c, hv, source, mixed, w_in, u_in, total_in, passed, z, stride, norm, out, eps,
    chunk_rows, chunk_skips,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, product: tl.constexpr,
):  # fmt: skip
    """One chunk and value head of `output_kernel`; source: number of the state before it, or -1."""
    channels: tl.constexpr = 2 * HK * DK + HV * DV
    kind = w_in.dtype.element_ty
    j = tl.arange(0, 64)
    dk = tl.arange(0, DK)
    dv = tl.arange(0, DV)
    at = tl.cast(c * HV + hv, tl.int64)
    key = (at * 64 + j[:, None]) * DK + dk[None, :]
    inner = dv[None, :] * DK + dk[:, None]
    s = tl.load(
        passed + (source * HV + hv) * DK * DV + inner,
        mask=(source >= 0) & (inner >= 0), other=0.0,
    )  # fmt: skip
    w = tl.load(w_in + key)
    u = tl.load(u_in + (at * DV + dv[None, :]) * 64 + j[:, None])
    row = tl.load(chunk_rows + c * 64 + j).to(tl.int64)
    own = (row >= 0) & (j >= tl.load(chunk_skips + c))
    place = mixed + (row * channels)[:, None] + (hv // (HV // HK) * DK + dk)[None, :]
    q = tl.load(place, mask=own[:, None], other=0.0)
    k = tl.load(place + HK * DK, mask=(row >= 0)[:, None], other=0.0)
    total = tl.load(total_in + at * 64 + j)
    lower = j[:, None] >= j[None, :]
    decay = tl.exp2(tl.where(lower, total[:, None] - total[None, :], float("-inf")))
    p = (tl.dot(q, tl.trans(k), input_precision=product) * decay).to(kind)
    n = u.to(tl.float32) - tl.dot(w, s, input_precision=product)
    o = tl.dot(q, s, input_precision=product) * tl.exp2(total)[:, None]
    o = tl.dot(p, n.to(kind), o, input_precision=product)
    gate = tl.load(
        z + (row * stride)[:, None] + (hv * DV + dv)[None, :], mask=own[:, None], other=0.0
    ).to(tl.float32)  # fmt: skip
    scale = tl.rsqrt(tl.sum(o * o, 1) / DV + eps)
    weight = tl.load(norm + dv).to(tl.float32)
    root = tl.rsqrt(1.0 + tl.exp2(gate * -LOG2_E))
    y = o * scale[:, None] * weight[None, :] * (gate * (root * root))
    tl.store(
        out + (row * HV * DV)[:, None] + (hv * DV + dv)[None, :],
        y.to(out.dtype.element_ty), mask=own[:, None],
    )  # fmt: skip


@triton.jit
def output_kernel(
    mixed, w_in, u_in, total_in, passed, z, stride, norm, out, eps,
    chunk_rows, chunk_skips, chunk_sources, counts,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    count_at: tl.constexpr, product: tl.constexpr,
):  # fmt: skip
    """Gated and normed outputs of all chunks. out [T, HV * DV]; z: first gate of row 0."""
    begin = tl.program_id(0)
    tasks = tl.load(counts + count_at) * HV
    source = tl.load(chunk_sources + begin // HV, mask=begin < tasks, other=-1).to(tl.int64)
    for task in range(begin, tasks, tl.num_programs(0)):
        # the next one, so that nobody waits for it
        follower = task + tl.num_programs(0)
        coming = tl.load(chunk_sources + follower // HV, mask=follower < tasks, other=-1)
        output_chunk(
            task // HV, task % HV, source, mixed, w_in, u_in, total_in, passed, z, stride, norm,
            out, eps, chunk_rows, chunk_skips, HK, HV, DK, DV, product,
        )  # fmt: skip
        source = coming.to(tl.int64)
