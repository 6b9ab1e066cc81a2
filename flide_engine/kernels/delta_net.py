"""Gated delta net in Triton: `delta_net_ref` in one launch of `prep`, one per level, one norm.

prep, a program a chunk and value head: convolution, SiLU, l2 norms, gates, and everything of the
chunk that does not need the state it starts from:

    A = strict_lower(beta k k^T * D),  X = (I + A)^-1,  u = X beta v,  w = X beta k e^G,
    p = lower(q k^T * D),  with G the cumulative log decay and D_ij = e^(G_i - G_j)

scan, a program a node, value head and slice of dv, chunk by chunk from a slot or from zeros:

    n = u - w S,  o = e^G (q S) + p n,  S = e^G_C S + k^T (e^(G_C - G) n)

A branch's program recomputes convolution and norms of its tail rows: another program's output would
be a race. Both walk task lists with a fixed number of programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flide_engine.kernels.delta_net_ref import DeltaNetShape, DeltaNetWeights
from flide_engine.kernels.pointwise import gated_rms_norm
from flide_engine.kernels.stream import CHUNKS, StreamTensors

CHUNK = 64
COLUMNS = CHUNK + 3


@triton.jit
def _conv(
    stream,
    stride,
    slots,
    weight,
    codes,
    j,
    there,
    channel,
    channels,
):
    """silu(convolution) of 64 positions: [64, D] float32; zeros where there is no position."""
    total = tl.zeros([64, channel.shape[0]], tl.float32)
    for tap in tl.static_range(4):
        code = tl.load(codes + j + tap, mask=there, other=-1).to(tl.int64)[:, None]
        own = tl.load(stream + code * stride + channel[None, :], mask=code >= 0, other=0.0)
        past = tl.load(slots + (-2 - code) * channels + channel[None, :], mask=code < -1, other=0.0)
        w = tl.load(weight + channel * 4 + tap).to(tl.float32)
        total += (own.to(tl.float32) + past.to(tl.float32)) * w[None, :]
    return tl.where(there[:, None], total / (1.0 + tl.exp(-total)), 0.0)


@triton.jit
def _store_conv_rows(stream, stride, slots, codes, slot, channel, channels):
    """Raw rows of the chunk's last three positions into a slot."""
    for row in tl.static_range(3):
        code = tl.load(codes + 64 + row).to(tl.int64)
        value = tl.load(stream + code * stride + channel)
        tl.store(slots + (slot * 3 + row) * channels + channel, value)


@triton.jit
def _block_mask(i, j, size: tl.constexpr):
    return (i[:, None] // size) == (j[None, :] // size)


@triton.jit
def _inverse(a, i, precision: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular [64, 64], by blocks of 8, 16 and 64.

    Inside blocks of 8 the power series ends at a^7 and its terms stay small; larger blocks are
    joined by their inverses, so nothing outgrows the result, also where tokens repeat.
    """
    eye = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    small = tl.where(_block_mask(i, i, 8), a, 0.0)
    square = tl.dot(small, small, input_precision=precision)
    x = (eye - small) + tl.dot(eye - small, square, input_precision=precision)
    fourth = tl.dot(square, square, input_precision=precision)
    x = x + tl.dot(x, fourth, input_precision=precision)
    middle = tl.where(_block_mask(i, i, 16) & ~_block_mask(i, i, 8), a, 0.0)
    x = x - tl.dot(tl.dot(x, middle, input_precision=precision), x, input_precision=precision)
    rest = tl.where(_block_mask(i, i, 16), 0.0, a)
    n = tl.dot(x, rest, input_precision=precision)  # block-nilpotent: n^4 = 0
    y = (eye - n) + tl.dot(
        eye - n, tl.dot(n, n, input_precision=precision), input_precision=precision
    )
    return tl.dot(y, x, input_precision=precision)


@triton.jit
def _prep_kernel(
    stream, stride, slots, conv, a_log, dt_bias,
    chunk_rows, chunk_lengths, chunk_slots, counts,
    q_out, k_out, w_out, u_out, p_out, g_out,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    count_at: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    channels: tl.constexpr = 2 * HK * DK + HV * DV
    ratio: tl.constexpr = HV // HK
    kind = q_out.dtype.element_ty
    j = tl.arange(0, 64)
    for task in range(tl.program_id(0), tl.load(counts + count_at) * HV, tl.num_programs(0)):
        c = task // HV
        hv = task % HV
        hk = hv // ratio
        codes = chunk_rows + c * 67
        there = j < tl.load(chunk_lengths + c)
        dk = tl.arange(0, DK)
        dv = tl.arange(0, DV)
        q_channel = hk * DK + dk
        k_channel = HK * DK + q_channel
        v_channel = 2 * HK * DK + hv * DV + dv
        q = _conv(stream, stride, slots, conv, codes, j, there, q_channel, channels)
        k = _conv(stream, stride, slots, conv, codes, j, there, k_channel, channels)
        v = _conv(stream, stride, slots, conv, codes, j, there, v_channel, channels)
        q = q / tl.sqrt(tl.sum(q * q, 1)[:, None] + 1e-6) * (DK**-0.5)
        k = k / tl.sqrt(tl.sum(k * k, 1)[:, None] + 1e-6)
        row = tl.load(codes + 3 + j, mask=there, other=0).to(tl.int64)
        gates = stream + row * stride + channels + HV * DV + hv
        b = tl.load(gates, mask=there, other=0.0).to(tl.float32)
        x = tl.load(gates + HV, mask=there, other=0.0).to(tl.float32)
        x += tl.load(dt_bias + hv).to(tl.float32)
        softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
        g = tl.where(there, -tl.exp(tl.load(a_log + hv).to(tl.float32)) * softplus, 0.0)
        beta = tl.where(there, 1.0 / (1.0 + tl.exp(-b)), 0.0)
        total = tl.cumsum(g, 0)
        lower = j[:, None] >= j[None, :]
        decay = tl.exp(tl.where(lower, total[:, None] - total[None, :], float("-inf")))
        qb, kb = q.to(kind), k.to(kind)
        kk = tl.dot(kb, tl.trans(kb), input_precision=precision) * decay * beta[:, None]
        inverse = _inverse(tl.where(j[:, None] > j[None, :], kk, 0.0), j, precision).to(kind)
        u = tl.dot(inverse, (v * beta[:, None]).to(kind), input_precision=precision)
        w = tl.dot(
            inverse, (k * (beta * tl.exp(total))[:, None]).to(kind), input_precision=precision
        )
        p = tl.dot(qb, tl.trans(kb), input_precision=precision) * decay
        at = (c * HV + hv).to(tl.int64)
        key = ((c * HK + hk).to(tl.int64) * 64 + j[:, None]) * DK + dk[None, :]
        if hv % ratio == 0:
            tl.store(q_out + key, qb)
            tl.store(k_out + key, kb)
        tl.store(w_out + (at * 64 + j[:, None]) * DK + dk[None, :], w.to(kind))
        tl.store(u_out + (at * 64 + j[:, None]) * DV + dv[None, :], u.to(kind))
        tl.store(p_out + (at * 64 + j[:, None]) * 64 + j[None, :], p.to(kind))
        tl.store(g_out + at * 64 + j, total)
        slot = tl.load(chunk_slots + c).to(tl.int64)
        if slot >= 0:
            if hv % ratio == 0:
                _store_conv_rows(stream, stride, slots, codes, slot, q_channel, channels)
                _store_conv_rows(stream, stride, slots, codes, slot, k_channel, channels)
            _store_conv_rows(stream, stride, slots, codes, slot, v_channel, channels)


@triton.jit
def _scan_kernel(
    q_in, k_in, w_in, u_in, p_in, g_in, out, state,
    level_nodes, level, node_chunks, initial_slots,
    chunk_rows, chunk_lengths, chunk_skips, chunk_slots,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    kind = q_in.dtype.element_ty
    parts: tl.constexpr = DV // BV
    low = tl.load(level_nodes + level)
    tasks = (tl.load(level_nodes + level + 1) - low) * HV * parts
    j = tl.arange(0, 64)
    dk = tl.arange(0, DK)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        node = low + task // (HV * parts)
        hv = task // parts % HV
        hk = hv // (HV // HK)
        dv = (task % parts) * BV + tl.arange(0, BV)
        inner = dk[:, None] * DV + dv[None, :]
        slot = tl.load(initial_slots + node).to(tl.int64)
        s = tl.load(
            state + (slot * HV + hv) * DK * DV + inner, mask=(slot >= 0) & (inner >= 0), other=0.0
        )
        last = tl.load(node_chunks + node + 1)
        for c in range(tl.load(node_chunks + node), last):
            at = (c * HV + hv).to(tl.int64)
            key = ((c * HK + hk).to(tl.int64) * 64 + j[:, None]) * DK + dk[None, :]
            w = tl.load(w_in + (at * 64 + j[:, None]) * DK + dk[None, :])
            u = tl.load(u_in + (at * 64 + j[:, None]) * DV + dv[None, :]).to(tl.float32)
            total = tl.load(g_in + at * 64 + j)
            end = tl.load(g_in + at * 64 + 63)
            sb = s.to(kind)
            n = u - tl.dot(w, sb, input_precision=precision)
            q = tl.load(q_in + key)
            p = tl.load(p_in + (at * 64 + j[:, None]) * 64 + j[None, :])
            o = tl.dot(q, sb, input_precision=precision) * tl.exp(total)[:, None]
            o += tl.dot(p, n.to(kind), input_precision=precision)
            own = (j < tl.load(chunk_lengths + c)) & (j >= tl.load(chunk_skips + c))
            row = tl.load(chunk_rows + c * 67 + 3 + j, mask=own, other=0).to(tl.int64)
            tl.store(out + (row[:, None] * HV + hv) * DV + dv[None, :], o, mask=own[:, None])
            kept = tl.load(chunk_slots + c).to(tl.int64)
            if (c + 1 < last) | (kept >= 0):
                k = tl.load(k_in + key)
                carried = (n * tl.exp(end - total)[:, None]).to(kind)
                s = s * tl.exp(end) + tl.dot(tl.trans(k), carried, input_precision=precision)
                if kept >= 0:
                    tl.store(state + (kept * HV + hv) * DK * DV + inner, s)


def delta_net(
    projected: Tensor,
    weights: DeltaNetWeights,
    shape: DeltaNetShape,
    recurrent_state: Tensor,
    conv_state: Tensor,
    stream: StreamTensors,
    programs: int = 264,
    block_v: int = 32,
) -> Tensor:
    """`delta_net_ref` in Triton. Needs `stream.tasks`; head widths are powers of two.

    programs: of every launch, a multiple of the multiprocessors. block_v: columns of a state that
    one program carries.
    """
    tasks = stream.tasks
    assert tasks is not None, "the GPU kernels need the stream's work lists"
    hk, hv, dk, dv = shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim
    chunks = len(tasks.chunk_lengths)
    new, kind = projected.new_empty, projected.dtype
    q, k = new(chunks, hk, CHUNK, dk), new(chunks, hk, CHUNK, dk)
    w, u = new(chunks, hv, CHUNK, dk), new(chunks, hv, CHUNK, dv)
    p, g = new(chunks, hv, CHUNK, CHUNK), new(chunks, hv, CHUNK, dtype=torch.float32)
    out = new(len(projected), hv, dv, dtype=torch.float32)
    precision = "ieee" if kind == torch.float32 else "tf32x3"
    heads = {"HK": hk, "HV": hv, "DK": dk, "DV": dv}
    _prep_kernel[(programs,)](
        projected, projected.stride(0), conv_state, weights.conv, weights.A_log, weights.dt_bias,
        tasks.chunk_rows, tasks.chunk_lengths, tasks.chunk_slots, tasks.counts,
        q, k, w, u, p, g, **heads, count_at=CHUNKS, precision=precision, num_warps=8, num_stages=1,
    )  # fmt: skip
    for level in range(len(tasks.level_nodes) - 1):
        _scan_kernel[(programs,)](
            q, k, w, u, p, g, out, recurrent_state,
            tasks.level_nodes, level, tasks.node_chunks, stream.initial_slots,
            tasks.chunk_rows, tasks.chunk_lengths, tasks.chunk_skips, tasks.chunk_slots,
            **heads, BV=min(block_v, dv), precision=precision, num_warps=4,
        )  # fmt: skip
    gate = projected[:, shape.conv_channels : shape.conv_channels + hv * dv]
    return gated_rms_norm(out, gate, weights.norm, shape.eps)
