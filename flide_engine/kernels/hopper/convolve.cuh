// Chunks, first part: rows of the stream through the convolution, and gates. What a block of
// `prepare` has in shared memory.
#pragma once
#include "tiles.cuh"

constexpr int HISTORY = 3;
constexpr int THREADS = 256;
constexpr int ROWS_OF_THREAD = 4;  // of the convolution

/// Rows of queries, keys or values before the convolution; then the tile that comes of them, and in
/// what is left numbers of the positions.
union Rows {
    uint4 raw[HISTORY + CHUNK][16];
    struct {
        uint4 tile[OPERAND / 8];
        float numbers[2][CHUNK];
    };
};

/// Shared memory of a block. rows: of queries (values later), keys (kd later), values (w later).
/// taps: of their convolutions, times -log2(e), eight channels of a tap side by side. blocks: A's
/// lower blocks of 16 x 16, on the diagonal their inverses later. inverse: X, bfloat16 [64, 64].
/// codes: of rows, as RoundPlan.chain_rows. ends: log decay of each half of the chunk.
struct Preparing {
    Rows rows[3];
    float taps[3][4][DIM];
    float blocks[10 * 256];
    uint4 inverse[SCORES / 8];
    int codes[HISTORY + CHUNK];
    float ends[2];

    __device__ float* total() { return rows[0].numbers[0]; }  // G
    __device__ float* beta() { return rows[0].numbers[1]; }
    __device__ float* write() { return rows[1].numbers[0]; }  // beta e^G
    __device__ float* keep() { return rows[1].numbers[1]; }   // e^(G_63 - G)
};

static_assert(sizeof(Rows) == sizeof(Rows::raw), "numbers have room behind the tile");

/// Begins to copy the raw rows of a chunk, from the stream or from where a slot keeps them.
__device__ inline void fetch(Preparing& own, const u16* stream, i64 stride, const Slots& slots,
                             int key_head, int head, int thread) {
    const int eight = thread % 16;
    const int first[3] = {key_head * DIM, (HK + key_head) * DIM, (2 * HK + head) * DIM};
#pragma unroll 1
    for (int i = thread / 16; i < HISTORY + CHUNK; i += THREADS / 16) {
        const int code = own.codes[i];
        const u16* row = stream + code * stride;
        if (code < -1) {
            const int past = -2 - code;
            row = slots.conv + (past / 3) * slots.conv_stride + (past % 3) * CHANNELS;
        }
#pragma unroll
        for (int kind = 0; kind < 3; kind++) {
            uint4* place = &own.rows[kind].raw[i][eight];
            if (code == -1) {
                *place = make_uint4(0, 0, 0, 0);
            } else {
                copy_16(place, row + first[kind] + eight * 8);
            }
        }
    }
}

/// The taps of a head.
__device__ inline void load_taps(Preparing& own, const u16* weight, int head) {
    for (int i = threadIdx.x; i < 3 * DIM; i += THREADS) {
        const int kind = i / DIM,
                  channel = (kind == 2 ? 2 * HK + head : kind * HK + head / RATIO) * DIM + i % DIM;
        const uint2 four = *reinterpret_cast<const uint2*>(weight + channel * 4);
        own.taps[kind][0][i % DIM] = -LOG2_E * low_of(four.x);
        own.taps[kind][1][i % DIM] = -LOG2_E * high_of(four.x);
        own.taps[kind][2][i % DIM] = -LOG2_E * low_of(four.y);
        own.taps[kind][3][i % DIM] = -LOG2_E * high_of(four.y);
    }
}

/// sums += x w of eight channels.
__device__ inline void add_tap(float (&sums)[8], const uint4& x, const float4& first,
                               const float4& second) {
    sums[0] += low_of(x.x) * first.x, sums[1] += high_of(x.x) * first.y;
    sums[2] += low_of(x.y) * first.z, sums[3] += high_of(x.y) * first.w;
    sums[4] += low_of(x.z) * second.x, sums[5] += high_of(x.z) * second.y;
    sums[6] += low_of(x.w) * second.z, sums[7] += high_of(x.w) * second.w;
}

/// silu(convolution) of some rows of one kind, eight channels of each: y [rows][8], from the raw
/// rows.
__device__ inline void add_taps(float (&y)[ROWS_OF_THREAD][8], const Preparing& own, int kind,
                                int low, int eight) {
#pragma unroll
    for (int tap = 0; tap < 4; tap++) {
        const float4* w = reinterpret_cast<const float4*>(&own.taps[kind][tap][eight * 8]);
        const float4 first = w[0], second = w[1];
#pragma unroll
        for (int i = 0; i < ROWS_OF_THREAD; i++) {
            add_tap(y[i], own.rows[kind].raw[low + i + tap][eight], first, second);
        }
    }
}

/// What add_taps made, through silu, into the tile; queries and keys of norm 128^-0.5 and 1.
__device__ inline void activate(float (&y)[ROWS_OF_THREAD][8], uint4* tile, const Preparing& own,
                                int kind, int low, int eight) {
    // with x for -log2(e) times the convolution, silu is x / (1 + 2^x) / -log2(e)
    const float norm = kind == 0 ? -0.08838834764831845f : kind == 1 ? -1.0f : -1.0f / LOG2_E;
#pragma unroll
    for (int i = 0; i < ROWS_OF_THREAD; i++) {
        float squares = 0.0f, scale = norm;
#pragma unroll
        for (int c = 0; c < 8; c++) {
            y[i][c] *= reciprocal(1.0f + exp2_of(y[i][c]));
            squares += y[i][c] * y[i][c];
        }
        if (kind < 2) {
#pragma unroll
            for (int apart = 1; apart < 16; apart *= 2) squares += shuffle_xor(squares, apart);
            scale *= rsqrt_of(squares + 1e-6f * LOG2_E * LOG2_E);
        }
#pragma unroll
        for (int c = 0; c < 8; c++) y[i][c] *= scale;
        uint4 made = make_uint4(pack(y[i][0], y[i][1]), pack(y[i][2], y[i][3]),
                                pack(y[i][4], y[i][5]), pack(y[i][6], y[i][7]));
        if (own.codes[HISTORY + low + i] < 0) made = make_uint4(0, 0, 0, 0);
        *at_tile(tile, low + i, eight) = made;
    }
}

/// Queries and keys, in place. 16 threads take four rows, each eight channels. One loop body: code
/// that outgrows the instruction cache costs more than the loop.
__device__ inline void convolve_keys(Preparing& own, int thread) {
    const int eight = thread % 16, low = thread / 16 * ROWS_OF_THREAD;
#pragma unroll 1
    for (int kind = 0; kind < 2; kind++) {
        float y[ROWS_OF_THREAD][8] = {};
        add_taps(y, own, kind, low, eight);
        sync_block();  // all have read
        activate(y, own.rows[kind].tile, own, kind, low, eight);
    }
}

/// Values, into the place of the queries, by four warps, while others solve.
__device__ inline void convolve_values(Preparing& own, int thread) {
    const int eight = thread % 16;
#pragma unroll 1
    for (int low = thread / 16 * ROWS_OF_THREAD; low < CHUNK; low += 32) {
        float y[ROWS_OF_THREAD][8] = {};
        add_taps(y, own, 2, low, eight);
        activate(y, own.rows[0].tile, own, 2, low, eight);
    }
}

/// A position: cumulative log decay within its half of the chunk, and beta.
struct Gate {
    float total, beta;
};

/// Of a position a thread, neutral where there is none; by two warps.
__device__ inline Gate load_gate(int row, const u16* stream, i64 stride, int head, float rate,
                                 float bias, int lane) {
    float g = 0.0f, beta = 0.0f;
    if (row >= 0) {
        const u16* gate = stream + row * stride + CHANNELS + HV * DIM + head;
        const float x = number_of(gate[HV]) + bias;
        const float softplus =
            x > 20.0f ? x * LOG2_E : log_of(1.0f + exp2_of(LOG2_E * x));  // base 2
        g = rate * softplus;
        beta = reciprocal(1.0f + exp2_of(-LOG2_E * number_of(gate[0])));
    }
#pragma unroll
    for (int apart = 1; apart < LANES; apart *= 2) {
        const float before = shuffle_up(g, apart);
        if (lane >= apart) g += before;
    }
    return Gate{g, beta};
}

/// By the same warps, once all know both halves' ends.
__device__ inline void store_gate(Preparing& own, const Gate& gate, int j, float end) {
    const float total = gate.total + (j < LANES ? 0.0f : own.ends[0]);
    own.total()[j] = total;
    own.beta()[j] = gate.beta;
    own.write()[j] = gate.beta * exp2_of(total);
    own.keep()[j] = exp2_of(end - total);
}

/// Raw rows of the chunk's last three positions, 128 channels of them, into a slot.
__device__ inline void keep_rows(const Preparing& own, const u16* stream, i64 stride, u16* slot,
                                 int first, int thread) {
    if (thread >= 48) return;
    const int i = thread / 16, channel = first + thread % 16 * 8;
    const i64 row = own.codes[HISTORY + 61 + i];
    *reinterpret_cast<uint4*>(slot + i * CHANNELS + channel) =
        *reinterpret_cast<const uint4*>(stream + row * stride + channel);
}
