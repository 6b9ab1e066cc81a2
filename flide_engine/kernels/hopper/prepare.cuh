// Chunks: convolution, gates, and all of the delta rule that does not need the state before a
// chunk. A block of eight warps a chunk of 64 positions and a value head; the rows before a
// branch's own are its ancestors'.
//
//     A = strict_lower(beta k k^T * D),  X = (I + A)^-1,  u = X beta v,  w = X beta k e^G,
//     kd = k e^(G_63 - G),  p = lower(q k^T * D),  with D_ij = e^(G_i - G_j)
#pragma once
#include "convolve.cuh"

__device__ inline uint4* at_inverse(uint4* tile, int row, int eight) {
    return tile + row * 8 + (eight ^ (row & 7));
}

/// Two neighbouring columns of A, in the block (i, m) of 16 x 16.
__device__ inline float2* at_block(float* blocks, int i, int m, int row, int pair) {
    const int block = i * (i + 1) / 2 + m;
    return reinterpret_cast<float2*>(blocks + block * 256 + row * 16) + (pair ^ ((row & 2) << 1));
}

__device__ inline float& in_block(float* blocks, int i, int m, int row, int column) {
    float2* two = at_block(blocks, i, m, row, column >> 1);
    return column & 1 ? two->y : two->x;
}

/// x k^T of 16 rows of a tile, up to the diagonal.
__device__ inline void score(float (&sum)[8][4], const uint4* tile, const uint4* keys, int rows,
                             int lane) {
    const int quarter = lane / 8, r = lane % 8;
#pragma unroll 2
    for (int step = 0; step < 8; step++) {
        u32 x[4];
        ldmatrix(x, at_tile(tile, rows * 16 + quarter % 2 * 8 + r, step * 2 + quarter / 2));
#pragma unroll
        for (int two = 0; two < 4; two++) {
            if (two > rows) break;  // above the diagonal
            u32 b[4];
            ldmatrix(b, at_tile(keys, two * 16 + quarter / 2 * 8 + r, step * 2 + quarter % 2));
            mma_bf16(sum[2 * two], x, b[0], b[1]);
            mma_bf16(sum[2 * two + 1], x, b[2], b[3]);
        }
    }
}

/// Elements of 16 rows below the diagonal, and on it if `diagonal`, times their decay; zeros above.
__device__ inline void decay_scores(float (&sum)[8][4], Preparing& own, int rows, bool diagonal,
                                    int lane) {
    const int g = lane / 4, h = lane % 4;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        if (n / 2 > rows) break;
        const int j = n * 8 + 2 * h;
        const float2 from = *reinterpret_cast<const float2*>(own.total() + j);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = rows * 16 + half * 8 + g, last = diagonal ? i : i - 1;
            const float to = own.total()[i], scale = diagonal ? 1.0f : own.beta()[i];
            float& x = sum[n][2 * half];
            float& y = sum[n][2 * half + 1];
            x = j <= last ? x * exp2_of(to - from.x) * scale : 0.0f;
            y = j + 1 <= last ? y * exp2_of(to - from.y) * scale : 0.0f;
        }
    }
}

/// p of 16 rows to memory.
__device__ inline void write_scores(Preparing& own, u16* p_out, int rows, int lane) {
    float sum[8][4] = {};
    score(sum, own.rows[0].tile, own.rows[1].tile, rows, lane);
    decay_scores(sum, own, rows, true, lane);
    uint4* out = reinterpret_cast<uint4*>(p_out);
#pragma unroll
    for (int m = 0; m < 2; m++) {  // blocks above the diagonal are zeros
        const uint4 two = rounded(sum[4 * m], sum[4 * m + 1]);
        const uint4 next = rounded(sum[4 * m + 2], sum[4 * m + 3]);
        out[by_score(2 * rows, m, lane)] = make_uint4(two.x, two.z, next.x, next.z);
        out[by_score(2 * rows + 1, m, lane)] = make_uint4(two.y, two.w, next.y, next.w);
    }
}

/// 16 rows of A to shared memory.
__device__ inline void write_blocks(Preparing& own, int rows, int lane) {
    float sum[8][4] = {};
    score(sum, own.rows[1].tile, own.rows[1].tile, rows, lane);
    decay_scores(sum, own, rows, false, lane);
#pragma unroll
    for (int n = 0; n < 8; n++) {
        if (n / 2 > rows) break;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            *at_block(own.blocks, rows, n / 2, half * 8 + lane / 4, n % 2 * 4 + lane % 4) =
                make_float2(sum[n][2 * half], sum[n][2 * half + 1]);
        }
    }
}

__device__ inline void put(uint4* inverse, int row, int column, float x) {
    reinterpret_cast<u16*>(at_inverse(inverse, row, column / 8))[column % 8] =
        static_cast<u16>(pack(x, 0.0f));
}

/// The inverse of a block on the diagonal, by substitution, a lane a column; in place.
__device__ inline void invert_diagonal(Preparing& own, int rows, int lane) {
    const int column = lane % 16;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
        for (int m = 0; m < i; m += 2) {
            const float2 a = *at_block(own.blocks, rows, rows, i, m / 2);
            sum -= a.x * x[m];
            if (m + 1 < i) sum -= a.y * x[m + 1];
        }
        x[i] = sum;
    }
    sync_warp();  // all have read
    if (lane < 16) {
#pragma unroll
        for (int i = 0; i < 16; i++) in_block(own.blocks, rows, rows, i, column) = x[i];
    } else {
#pragma unroll
        for (int i = 0; i < 16; i++) put(own.inverse, rows * 16 + i, rows * 16 + column, x[i]);
    }
}

/// c -= a b^T for 16 x 16, c and a as C holds them; b: a block of shared memory.
__device__ inline void subtract_product(float (&c)[2][4], const float (&a)[2][4], float* blocks,
                                        int i, int m, int g, int h) {
#pragma unroll
    for (int step = 0; step < 2; step++) {
        // the k of both operands in the same new order: columns 2h, 2h + 1 for h, h + 4
        const u32 left[4] = {tf32(-a[step][0]), tf32(-a[step][2]), tf32(-a[step][1]),
                             tf32(-a[step][3])};
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const float2 b = *at_block(blocks, i, m, n * 8 + g, step * 4 + h);
            mma_tf32(c[n], left, tf32(b.x), tf32(b.y));
        }
    }
}

/// X below the diagonal, a warp a column of blocks: X_ij = -X_ii sum_m A_im X_mj. As transposes, so
/// that each product's result is the next one's left operand.
__device__ inline void solve_column(Preparing& own, int j, int lane) {
    const int g = lane / 4, h = lane % 4;
    float y[4][2][4];
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            y[0][n][e] = in_block(own.blocks, j, j, n * 8 + 2 * h + e % 2, e / 2 * 8 + g);
        }
    }
#pragma unroll
    for (int below = 1; below < 4; below++) {
        const int i = j + below;
        if (i > 3) break;
        float sum[2][4] = {}, made[2][4] = {};
#pragma unroll
        for (int m = 0; m < below; m++) subtract_product(sum, y[m], own.blocks, i, j + m, g, h);
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) sum[n][e] = -sum[n][e];
        }
        subtract_product(made, sum, own.blocks, i, i, g, h);
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                y[below][n][e] = made[n][e];
                put(own.inverse, i * 16 + n * 8 + 2 * h + e % 2, j * 16 + e / 2 * 8 + g,
                    made[n][e]);
            }
        }
    }
}

/// 16 dimensions of the keys a warp: beta k e^G as the right operand, then kd in k's place.
__device__ inline void decay_keys(u32 (&written)[4][4], Preparing& own, int warp, int lane) {
    const int h = lane % 4, quarter = lane / 8, r = lane % 8;
    uint4* keys = own.rows[1].tile;
#pragma unroll
    for (int step = 0; step < 4; step++) {
        const int j = step * 16 + 2 * h;
        const float2 write = *reinterpret_cast<const float2*>(own.write() + j);
        const float2 write8 = *reinterpret_cast<const float2*>(own.write() + j + 8);
        u32 k[4];
        ldmatrix_transposed(k,
                            at_tile(keys, step * 16 + quarter % 2 * 8 + r, warp * 2 + quarter / 2));
        written[step][0] = scaled(k[0], write.x, write.y),
        written[step][1] = scaled(k[1], write8.x, write8.y);
        written[step][2] = scaled(k[2], write.x, write.y),
        written[step][3] = scaled(k[3], write8.x, write8.y);
    }
    sync_warp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = i * 16 + lane / 2;
        uint4* place = at_tile(keys, row, warp * 2 + lane % 2);
        const uint4 k = *place;
        const float keep = own.keep()[row];
        *place = make_uint4(scaled(k.x, keep, keep), scaled(k.y, keep, keep),
                            scaled(k.z, keep, keep), scaled(k.w, keep, keep));
    }
}

/// w of 16 dimensions of the keys, into the place of the raw values.
__device__ inline void write_w(const u32 (&written)[4][4], Preparing& own, int warp, int lane) {
    const int quarter = lane / 8, r = lane % 8;
    float w[4][2][4] = {};
#pragma unroll
    for (int step = 0; step < 4; step++) {
#pragma unroll
        for (int tile = step; tile < 4; tile++) {
            u32 x[4];
            ldmatrix(x, at_inverse(own.inverse, tile * 16 + quarter % 2 * 8 + r,
                                   step * 2 + quarter / 2));
            mma_bf16(w[tile][0], x, written[step][0], written[step][1]);
            mma_bf16(w[tile][1], x, written[step][2], written[step][3]);
        }
    }
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint4* place =
                    at_tile(own.rows[2].tile, tile * 16 + half * 8 + lane / 4, warp * 2 + n);
                reinterpret_cast<u32*>(place)[lane % 4] =
                    pack(w[tile][n][2 * half], w[tile][n][2 * half + 1]);
            }
        }
    }
}

/// u, transposed, of 16 dimensions of the values.
__device__ inline void write_values(Preparing& own, u16* out, int warp, int lane) {
    const int h = lane % 4, quarter = lane / 8, r = lane % 8;
    float u[8][4] = {};
#pragma unroll
    for (int step = 0; step < 4; step++) {
        const int j = step * 16 + 2 * h;
        const float2 beta = *reinterpret_cast<const float2*>(own.beta() + j);
        const float2 beta8 = *reinterpret_cast<const float2*>(own.beta() + j + 8);
        u32 x[4];
        const int row = step * 16 + quarter / 2 * 8 + r;
        ldmatrix_transposed(x, at_tile(own.rows[0].tile, row, warp * 2 + quarter % 2));
        const u32 v[4] = {scaled(x[0], beta.x, beta.y), scaled(x[1], beta.x, beta.y),
                          scaled(x[2], beta8.x, beta8.y), scaled(x[3], beta8.x, beta8.y)};
#pragma unroll
        for (int two = step; two < 4; two++) {
            u32 b[4];
            ldmatrix(
                b, at_inverse(own.inverse, two * 16 + quarter / 2 * 8 + r, step * 2 + quarter % 2));
            mma_bf16(u[2 * two], v, b[0], b[1]);
            mma_bf16(u[2 * two + 1], v, b[2], b[3]);
        }
    }
#pragma unroll
    for (int m = 0; m < 4; m++) {
        reinterpret_cast<uint4*>(out)[by_value(warp, m, lane)] = rounded(u[2 * m], u[2 * m + 1]);
    }
}

/// A state that the round resumes from, rounded, as the chains pass theirs on; 16 values a warp.
__device__ inline void round_state(const float* state, uint4* passed, int tile, int lane) {
    const int g = lane / 4, h = lane % 4;
#pragma unroll 1
    for (int step = 0; step < 8; step++) {
        float s[2][4];
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[n][e] =
                    state[(step * 16 + n * 8 + 2 * h + e % 2) * DIM + tile * 16 + e / 2 * 8 + g];
            }
        }
        passed[by_state(tile, step, lane)] = rounded(s[0], s[1]);
    }
}

/// Of a chunk's rows that of a thread, as RoundPlan.chain_rows.
__device__ inline int code_of(const Lists& lists, int c, int thread) {
    if (thread >= HISTORY + CHUNK) return -1;
    const int* rows = lists.rows + c * CHUNK;
    return thread < HISTORY ? lists.row_taps[rows[0] * HISTORY + thread] : rows[thread - HISTORY];
}

/// A chunk and head. code: `code_of` it.
__device__ inline void prepare_chunk(Preparing& own, const u16* stream, i64 stride, float rate,
                                     float bias, const Slots& slots, const Lists& lists,
                                     const Chunks& chunks, int task, int code) {
    const int thread = fresh(threadIdx.x), warp = thread / LANES, lane = thread % LANES,
              part = warp % 4;
    const int c = task / HV, head = task % HV, key_head = head / RATIO;
    const i64 at = static_cast<i64>(task) * OPERAND;
    if (thread == 0) copied_out();
    sync_block();  // all have read what the chunk before left
    if (thread < HISTORY + CHUNK) own.codes[thread] = code;
    sync_block();
    fetch(own, stream, stride, slots, key_head, head, thread);
    Gate gate;
    if (warp >= 6) {
        gate = load_gate(own.codes[HISTORY + thread - 192], stream, stride, head, rate, bias, lane);
        if (lane == LANES - 1) own.ends[warp - 6] = gate.total;
    }
    copies_done();
    sync_block();
    convolve_keys(own, thread);
    if (warp >= 6) store_gate(own, gate, thread - 192, own.ends[0] + own.ends[1]);
    before_copies();
    sync_block();
    if (thread == 0) copy_out(chunks.q + at, own.rows[0].tile, OPERAND * 2);
    if (warp < 4) {
        write_scores(own, chunks.p + static_cast<i64>(task) * SCORES, part, lane);
        if (thread < CHUNK) chunks.total[task * CHUNK + thread] = own.total()[thread];
        if (thread == 0) chunks.decay[task] = exp2_of(own.total()[CHUNK - 1]);
    } else {
        write_blocks(own, part, lane);
        sync_warp();
        invert_diagonal(own, part, lane);
    }
    if (thread == 0) copied_out();
    sync_block();
    u32 written[4][4];
    decay_keys(written, own, warp, lane);
    if (warp < 4) {
        convolve_values(own, thread);
    } else if (part < 3) {
        solve_column(own, part, lane);
    }
    before_copies();
    sync_block();
    if (thread == 0) copy_out(chunks.kd + at, own.rows[1].tile, OPERAND * 2);
    write_w(written, own, warp, lane);
    before_copies();
    write_values(own, chunks.u + at, warp, lane);
    sync_block();
    if (thread == 0) copy_out(chunks.w + at, own.rows[2].tile, OPERAND * 2);
    const int slot = lists.slots[c];
    if (slot < 0) return;
    u16* kept = slots.conv + slot * slots.conv_stride;
    keep_rows(own, stream, stride, kept, (2 * HK + head) * DIM, thread);
    if (head % RATIO == 0) {
        keep_rows(own, stream, stride, kept, key_head * DIM, thread);
        keep_rows(own, stream, stride, kept, (HK + key_head) * DIM, thread);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    prepare(const u16* stream, i64 stride, const u16* conv, const float* a_log, const BIAS* dt_bias,
            Slots slots, Lists lists, Chunks chunks, u16* passed, int* progress) {
    SHARED_BYTES(memory);
    Preparing& own = *reinterpret_cast<Preparing*>(memory);
    // a block has one head, whose taps it keeps; what can be asked for at once is
    const int thread = threadIdx.x, head = blockIdx.x % HV, step = gridDim.x / HV;
    int c = blockIdx.x / HV;
    int code = c < lists.capacity ? code_of(lists, c, thread) : -1;
    const int count = lists.counts[CHUNK_COUNT], every = count + lists.counts[RESUMED_COUNT];
    const int marks = 1 + lists.counts[SCAN_COUNT] * HV * PARTS;
    const float rate = -expf(a_log[head]), bias = number_of(dt_bias[head]);
    load_taps(own, conv, head);
    for (int i = blockIdx.x * THREADS + thread; i < marks; i += gridDim.x * THREADS)
        progress[i] = 0;
    for (; c < count; c += step) {
        prepare_chunk(own, stream, stride, rate, bias, slots, lists, chunks, c * HV + head, code);
        code = c + step < count ? code_of(lists, c + step, thread) : -1;
    }
    for (; c < every; c += step) {
        const int* resumed = lists.resumed + (c - count) * 2;
        const float* state = slots.state + resumed[0] * slots.state_stride + head * STATE;
        u16* place = passed + (static_cast<i64>(resumed[1]) * HV + head) * STATE;
        round_state(state, reinterpret_cast<uint4*>(place), thread / LANES, thread % LANES);
    }
    if (thread == 0) written_out();
}
