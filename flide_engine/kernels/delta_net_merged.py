"""The delta net's chunks, chains and outputs in one launch of programs that stay.

Three launches wait for each other: a long chain runs on as many programs as there are heads and
slices, while all else is done or cannot begin. Here programs claim what is next: chunks first, in
stream order, then the list that `layout.order` made, of outputs and of the chains that start from a
state of this round. Chains that start from a slot or from zeros have a counter of their own. Where
chunks are more than programs, some programs take those chains at once, and others only after the
last chunk is claimed. The arithmetic is that of the three kernels, and so are the bits.

What waits: a chain for its chunks and for the chain that it starts from, an output for its chunk
and for the state before it. Whatever the number of programs that run at once, one of them can go
on: the first to arrive takes no chain before all chunks are claimed, chunks wait for nothing, and
a list is claimed in its order, in which nothing waits for what comes later.
"""

import triton
import triton.language as tl

from flide_engine.kernels.delta_net_marks import ARRIVED, CHAINS, GROUP, LISTED, MARKS
from flide_engine.kernels.delta_net_prep import prepare_chunk
from flide_engine.kernels.delta_net_scan import next_state, output_chunk


@triton.jit
def _wait(flag, needed):
    """Until a flag has come so far; what was written before that is seen.

    Only the last look is one that clears the processor's cache, which others use.
    """
    done = tl.atomic_add(flag, 0, sem="acquire")
    while done < needed:
        done = tl.atomic_add(flag, 0, sem="relaxed")
        if done >= needed:
            done = tl.atomic_add(flag, 0, sem="acquire")


@triton.jit
def _tell(flag, more):
    """What all threads have written until now is there for whoever sees it."""
    tl.debug_barrier()
    tl.atomic_add(flag, more, sem="release")


@triton.jit
def _pass_on(
    number, hv, low, high, k_in, w_in, u_in, decay_in, state, passed, scans, chunk_slots,
    chunks, prepared, published,
    HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
    SLOT: tl.constexpr, STAGES: tl.constexpr, product: tl.constexpr,
):  # fmt: skip
    """One chain and value head, slices `low` to `high` of dv: `state_kernel`."""
    kind = k_in.dtype.element_ty
    parts: tl.constexpr = DV // BV
    dk = tl.arange(0, DK)
    scan = scans + number * 7
    first = tl.load(scan)
    end = first + tl.load(scan + 1)
    slot = tl.load(scan + 2).to(tl.int64)
    out = tl.load(scan + 3)
    awaited = tl.load(scan + 4)
    needed = tl.load(scan + 6)
    for part in range(low, high):
        mark = published + (number * HV + hv) * parts + part
        if awaited >= 0:
            _wait(published + (awaited * HV + hv) * parts + part, needed)
        dv = part * BV + tl.arange(0, BV)
        inner = dk[None, :] * DV + dv[:, None]
        s = tl.load(
            state + (slot * SLOT + hv * DK * DV) + inner,
            mask=(slot >= 0) & (inner >= 0), other=0.0,
        )  # fmt: skip
        for start in range(first // GROUP * GROUP, end, GROUP):
            begin = tl.maximum(start, first)
            stop = tl.minimum(start + GROUP, end)
            _wait(prepared + start // GROUP * HV + hv, tl.minimum(chunks - start, GROUP))
            decay = tl.load(decay_in + begin * HV + hv)
            for c in tl.range(begin, stop, num_stages=STAGES):
                at = tl.cast(c * HV + hv, tl.int64)
                kept = tl.load(chunk_slots + c).to(tl.int64)
                # the next one, so that nobody waits for it
                coming = tl.load(decay_in + at + HV, mask=c + 1 < stop, other=0.0)
                s = next_state(s, decay, at, dv, k_in, w_in, u_in, DK, DV, product)
                place = ((out + c - first).to(tl.int64) * HV + hv) * DV * DK
                tl.store(passed + place + dv[:, None] * DK + dk[None, :], s.to(kind))
                if kept >= 0:
                    tl.store(state + (kept * SLOT + hv * DK * DV) + inner, s)
                decay = coming
            _tell(mark, stop - begin)


@triton.jit
def _wait_for_output(
    c, hv, chunk_waits, chunks, prepared, published, HV: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Until a chunk is prepared and the state before it is there: all flags are asked at once."""
    lane = tl.arange(0, WIDTH)
    scan = tl.load(chunk_waits + c * 2)
    start = c // GROUP * GROUP
    of_state = (lane > 0) & (lane <= PARTS) & (scan >= 0)
    flag = published + (scan * HV + hv) * PARTS + lane - 1
    flag = tl.where(lane == 0, prepared + start // GROUP * HV + hv, flag)
    needed = tl.load(chunk_waits + c * 2 + 1)
    needed = tl.where(lane == 0, tl.minimum(chunks - start, GROUP), needed)
    asked = (lane == 0) | of_state
    done = tl.atomic_add(flag, 0, mask=asked, sem="acquire")
    missing = tl.sum((asked & (done < needed)).to(tl.int32), 0)
    while missing > 0:
        done = tl.atomic_add(flag, 0, mask=asked, sem="relaxed")
        missing = tl.sum((asked & (done < needed)).to(tl.int32), 0)
        if missing == 0:
            done = tl.atomic_add(flag, 0, mask=asked, sem="acquire")
    tl.debug_barrier()


@triton.jit
def _look_up(
    task, chained, drained, progress, order, to_prepare, roots, HV: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """What a program does next: an entry of `order`, its head, slices `low` to `high` if it is a
    chain; and whether all chains of their own have been claimed. Claims one of those if `chained`.
    """
    entry = 0
    hv = task % HV
    low = 0
    high = 0
    if chained:
        number = tl.atomic_add(progress + CHAINS, 1, sem="relaxed")
        if number < roots * (HV * PARTS):
            entry = tl.load(order + number // (HV * PARTS))
            hv = number // PARTS % HV
            low = number % PARTS
            high = low + 1
        else:
            drained = 1
    elif task >= to_prepare:
        entry = tl.load(order + roots + (task - to_prepare) // HV)
        if entry < 0:
            high = PARTS
    return entry, hv, low, high, drained


@triton.jit
def merged_kernel(
    mixed, stream, stride, slots, a_log, dt_bias, state, norm, z, out, eps,
    chunk_rows, chunk_slots, chunk_skips, chunk_sources, chunk_waits, scans, order, counts,
    k, w, u, total, decay, passed, progress,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
    BV: tl.constexpr, SLOT: tl.constexpr, CONV_SLOT: tl.constexpr, STAGES: tl.constexpr,
    THREADS: tl.constexpr, WIDTH: tl.constexpr, product: tl.constexpr,
    count_at: tl.constexpr, scans_at: tl.constexpr, roots_at: tl.constexpr,
    ordered_at: tl.constexpr,
):  # fmt: skip
    """`prep_kernel`, `state_kernel` and `output_kernel`. progress: `marks_of` zeros."""
    parts: tl.constexpr = DV // BV
    lanes = tl.arange(0, THREADS)
    chunks = tl.load(counts + count_at)
    roots = tl.load(counts + roots_at)
    prepared = progress + MARKS
    published = prepared + (chunks + GROUP - 1) // GROUP * HV
    to_prepare = chunks * HV
    everything = to_prepare + tl.load(counts + ordered_at) * HV
    chains = roots * (HV * parts)
    programs = tl.num_programs(0)
    early = tl.where(to_prepare > programs, tl.minimum(chains, programs // 8), 0)
    drained = (chains == 0).to(tl.int32)  # whether this program has seen the last chain claimed
    arrived = tl.atomic_add(progress + ARRIVED, 1, sem="relaxed")
    task = -1  # none of the list
    if (arrived == 0) | (arrived > early):
        task = tl.atomic_add(progress + LISTED, 1, sem="relaxed")
    while task < everything:
        chained = ((task < 0) | (task >= to_prepare)) & (drained == 0)
        # the next of the list, asked for now, so that nobody waits for it
        ticket = tl.atomic_add(
            progress + LISTED + lanes * 0, 1, mask=(lanes == 0) & (chained == 0), sem="relaxed"
        )
        entry, hv, low, high, drained = _look_up(
            task, chained, drained, progress, order, to_prepare, roots, HV, parts
        )
        if high > low:
            _pass_on(
                -1 - entry, hv, low, high, k, w, u, decay, state, passed, scans, chunk_slots,
                chunks, prepared, published, HV, DK, DV, BV, SLOT, STAGES, product,
            )  # fmt: skip
        elif (chained == 0) & (task >= 0):
            if task < to_prepare:
                c = task // HV
                row = tl.load(chunk_rows + c * 64 + tl.arange(0, 64)).to(tl.int64)
                prepare_chunk(
                    c, hv, row, mixed, stream, stride, slots, a_log, dt_bias,
                    chunk_rows, chunk_slots, k, w, u, total, decay,
                    HK, HV, DK, DV, BD, CONV_SLOT, product,
                )  # fmt: skip
                _tell(prepared + c // GROUP * HV + hv, 1)
            else:
                _wait_for_output(
                    entry, hv, chunk_waits, chunks, prepared, published, HV, parts, WIDTH
                )
                source = tl.load(chunk_sources + entry).to(tl.int64)
                output_chunk(
                    entry, hv, source, mixed, w, u, total, passed, z, stride, norm, out, eps,
                    chunk_rows, chunk_skips, HK, HV, DK, DV, product,
                )  # fmt: skip
        if chained == 0:
            task = tl.max(tl.where(lanes == 0, ticket, 0), 0)
