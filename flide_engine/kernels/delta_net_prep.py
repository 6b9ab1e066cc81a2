"""First launches of the delta net: what does not need the state that a chunk starts from.

`conv_kernel`, a program some rows of one head: convolution, SiLU, l2 norms. `prep_kernel`, a
program a chunk of 64 positions and a value head; the tail rows before a branch's own are its
ancestors'.
With G the cumulative log decay within the chunk and D_ij = e^(G_i - G_j):

    A = strict_lower(beta k k^T * D),  X = (I + A)^-1,  u = X beta v,  w = X beta k e^G,
    kd = k e^(G_63 - G),  decay = e^(G_63)
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def clear(marks, count):
    """Zeros, a program some of them."""
    for low in range(tl.program_id(0) * 256, count, tl.num_programs(0) * 256):
        mark = low + tl.arange(0, 256)
        tl.store(marks + mark, tl.zeros([256], tl.int32), mask=mark < count)


@triton.jit
def round_resumed(
    state, resumed, count, passed,
    HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """States that the round resumes from, rounded and transposed, to those passed on."""
    dk = tl.arange(0, DK)
    parts: tl.constexpr = DV // BD
    for task in range(tl.program_id(0), count * (HV * parts), tl.num_programs(0)):
        n = task // (HV * parts)
        hv = task // parts % HV
        dv = (task % parts) * BD + tl.arange(0, BD)
        kept = state + tl.load(resumed + n * 2).to(tl.int64) * SLOT + hv * DK * DV
        number = tl.load(resumed + n * 2 + 1).to(tl.int64) * HV + hv
        s = tl.load(kept + dk[None, :] * DV + dv[:, None])
        place = passed + number * DK * DV + dv[:, None] * DK + dk[None, :]
        tl.store(place, s.to(passed.dtype.element_ty))


@triton.jit
def conv_kernel(
    stream, stride, slots, weight, out, row_taps, rows,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr,
    CONV_SLOT: tl.constexpr,
):  # fmt: skip
    """silu(convolution) of the stream, queries and keys of norm dk^-0.5 and 1: out [T, C]."""
    channels: tl.constexpr = 2 * HK * DK + HV * DV
    head = tl.program_id(1)
    channel = head * DK + tl.arange(0, DK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    total = tl.zeros([ROWS, DK], tl.float32)
    for tap in tl.static_range(4):
        code = row if tap == 3 else tl.load(row_taps + row * 3 + tap, mask=real, other=-1)
        there = real & (code != -1)
        past = -2 - code
        kept = slots + (past // 3).to(tl.int64) * CONV_SLOT + (past % 3) * channels
        place = tl.where(code >= 0, stream + code.to(tl.int64) * stride, kept)
        x = tl.load(place[:, None] + channel[None, :], mask=there[:, None], other=0.0)
        w = tl.load(weight + channel * 4 + tap).to(tl.float32)
        total += x.to(tl.float32) * w[None, :]
    root = tl.rsqrt(1.0 + tl.exp2(total * -LOG2_E))  # squared, the sigmoid without a division
    y = total * (root * root)
    if head < 2 * HK:
        y *= tl.rsqrt(tl.sum(y * y, 1) + 1e-6)[:, None]
        if head < HK:
            y *= DK**-0.5
    place = out + (row.to(tl.int64) * channels)[:, None] + channel[None, :]
    tl.store(place, y.to(out.dtype.element_ty), mask=real[:, None])


@triton.jit
def _store_conv_rows(stream, stride, slot, rows, channel, channels: tl.constexpr):
    """Raw rows of the chunk's last three positions into a slot."""
    for i in tl.static_range(3):
        row = tl.load(rows + 61 + i).to(tl.int64)
        value = tl.load(stream + row * stride + channel)
        tl.store(slot + i * channels + channel, value)


@triton.jit
def _gates(b, x, there, a_log, dt_bias):
    """Cumulative log2 decay, its end, and beta of 64 positions; neutral where there is none."""
    x = x.to(tl.float32) + tl.load(dt_bias).to(tl.float32)
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    g = tl.where(there, -tl.exp(tl.load(a_log).to(tl.float32)) * softplus, 0.0) * LOG2_E
    beta = tl.where(there, 1.0 / (1.0 + tl.exp(-b.to(tl.float32))), 0.0)
    return tl.cumsum(g, 0), tl.sum(g, 0), beta


@triton.jit
def _inverse(a, i, precision: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular [64, 64], blocks of 2, 4 .. 64 from each other.

    With P and Q the inverses of a block's halves and M below them, the inverse has -Q M P there. So
    nothing ever outgrows the result, as a power series does where tokens repeat. Up to 16, the four
    blocks on the diagonal are a batch of small products, a warp each.
    """
    r = tl.arange(0, 16)
    four = tl.arange(0, 4)
    apart = (r[:, None] ^ r[None, :])[None, :, :]
    on = (four[:, None] == four[None, :])[:, None, :, None]
    small = tl.sum(tl.where(on, tl.reshape(a, [4, 16, 4, 16]), 0.0), 2)
    y = tl.where(apart == 0, 1.0, tl.where(apart == 1, -small, 0.0))
    for level in range(1, 4):
        middle = tl.where((apart >> level) == 1, small, 0.0)
        y -= tl.dot(tl.dot(y, middle, input_precision=precision), y, input_precision=precision)
    x = tl.reshape(tl.where(on, y[:, :, None, :], 0.0), [64, 64])
    for level in range(4, 6):
        middle = tl.where(((i >> level)[:, None] ^ (i >> level)[None, :]) == 1, a, 0.0)
        x -= tl.dot(tl.dot(x, middle, input_precision=precision), x, input_precision=precision)
    return x


@triton.jit
def prepare_chunk(
    c, hv, row, mixed, stream, stride, slots, a_log, dt_bias, chunk_rows, chunk_slots,
    k_out, w_out, u_out, total_out, decay_out,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
    CONV_SLOT: tl.constexpr, product: tl.constexpr,
):  # fmt: skip
    """One chunk and value head of `prep_kernel`; row [64]: the chunk's stream rows."""
    channels: tl.constexpr = 2 * HK * DK + HV * DV
    ratio: tl.constexpr = HV // HK
    kind = k_out.dtype.element_ty
    j = tl.arange(0, 64)
    d = tl.arange(0, BD)  # a part of a head at a time: fewer registers, more programs at once
    at = tl.cast(c * HV + hv, tl.int64)
    there = row >= 0
    gates = stream + row * stride + channels + HV * DV + hv
    b = tl.load(gates, mask=there, other=0.0)
    x = tl.load(gates + HV, mask=there, other=0.0)
    keys = mixed + (row * channels)[:, None] + ((HK + hv // ratio) * DK + d)[None, :]
    key = (at * 64 + j[:, None]) * DK + d[None, :]
    kk = tl.zeros([64, 64], tl.float32)
    for part in range(0, DK, BD):
        k = tl.load(keys + part, mask=there[:, None], other=0.0)
        kk = tl.dot(k, tl.trans(k), kk, input_precision=product)
    total, end, beta = _gates(b, x, there, a_log + hv, dt_bias + hv)
    tl.store(total_out + at * 64 + j, total)
    tl.store(decay_out + at, tl.exp2(end))
    below = j[:, None] > j[None, :]
    decay = tl.exp2(tl.where(below, total[:, None] - total[None, :], float("-inf")))
    x = _inverse(kk * decay * beta[:, None], j, product).to(kind)
    for part in range(0, DK, BD):
        k = tl.load(keys + part, mask=there[:, None], other=0.0).to(tl.float32)
        tl.store(k_out + key + part, (k * tl.exp2(end - total)[:, None]).to(kind))
        scaled = (k * (beta * tl.exp2(total))[:, None]).to(kind)
        tl.store(w_out + key + part, tl.dot(x, scaled, input_precision=product).to(kind))
    values = mixed + (row * channels)[:, None] + (2 * HK * DK + hv * DV + d)[None, :]
    for part in range(0, DV, BD):
        v = tl.load(values + part, mask=there[:, None], other=0.0).to(tl.float32)
        u = tl.dot(x, (v * beta[:, None]).to(kind), input_precision=product).to(kind)
        tl.store(u_out + (at * DV + part + d[None, :]) * 64 + j[:, None], u)
    slot = tl.load(chunk_slots + c).to(tl.int64)
    if slot >= 0:
        rows = chunk_rows + c * 64
        kept = slots + slot * CONV_SLOT
        for part in range(0, DK, BD):
            q_channel = hv // ratio * DK + part + d
            if hv % ratio == 0:
                _store_conv_rows(stream, stride, kept, rows, q_channel, channels)
                q_channel += HK * DK
                _store_conv_rows(stream, stride, kept, rows, q_channel, channels)
        for part in range(0, DV, BD):
            v_channel = 2 * HK * DK + hv * DV + part + d
            _store_conv_rows(stream, stride, kept, rows, v_channel, channels)


@triton.jit
def prep_kernel(
    mixed, stream, stride, slots, a_log, dt_bias,
    chunk_rows, chunk_slots, state, resumed, counts,
    k_out, w_out, u_out, total_out, decay_out, passed, progress,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
    BV: tl.constexpr, SLOT: tl.constexpr, CONV_SLOT: tl.constexpr, count_at: tl.constexpr,
    resumed_at: tl.constexpr, scans_at: tl.constexpr, product: tl.constexpr,
):  # fmt: skip
    """See above. Outputs [C, HV, 64, DK] kd, w; [C, HV, DV, 64] u transposed; float32 [C, HV, 64]
    G in base 2 and [C, HV] decay. Of `passed` the states that the round resumes from, rounded.
    progress: zeros for `state_kernel`, whose slices of dv are BV wide.
    """
    clear(progress, 1 + tl.load(counts + scans_at) * (HV * DV // BV))
    j = tl.arange(0, 64)
    tasks = tl.load(counts + count_at) * HV
    begin = tl.program_id(0)
    row = tl.load(chunk_rows + begin // HV * 64 + j, mask=begin < tasks, other=-1).to(tl.int64)
    for task in range(begin, tasks, tl.num_programs(0)):
        # the next one's, so that nobody waits for them
        follower = task + tl.num_programs(0)
        coming = tl.load(chunk_rows + follower // HV * 64 + j, mask=follower < tasks, other=-1)
        prepare_chunk(
            task // HV, task % HV, row, mixed, stream, stride, slots, a_log, dt_bias,
            chunk_rows, chunk_slots, k_out, w_out, u_out, total_out, decay_out,
            HK, HV, DK, DV, BD, CONV_SLOT, product,
        )  # fmt: skip
        row = coming.to(tl.int64)
    round_resumed(state, resumed, tl.load(counts + resumed_at), passed, HV, DK, DV, BD, SLOT)
