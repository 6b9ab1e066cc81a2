// Gated fork attention, a block a tile of queries and key head:
//
//     out = sigmoid(gate) * softmax(scale q k^T) v
//
// A warpgroup has 64 rows of queries and their sums in registers. The scores of 64 keys are
// multiplied, and their weights computed, while the values of those before are added up.
#pragma once
#include "feed.cuh"

constexpr int FEEDER_REGISTERS = 56, REGISTERS = 224;  // of a thread, where two warpgroups multiply

/// s = q k^T.
__device__ inline void multiply_keys(float (&s)[8][4], u32 q, u32 keys) {
    warpgroup_mma_64<false>(s, q, keys, 0);
#pragma unroll
    for (int k = 1; k < WIDTH / 16; k++) warpgroup_mma_64<true>(s, q, keys, k);
}

__device__ inline void add_step(float (&o)[32][4], const uint4& p, u32 values, int k) {
    warpgroup_mma_256(o, p, values, k);
}
__device__ inline void add_step(float (&o)[16][4], const uint4& p, u32 values, int k) {
    warpgroup_mma_128(o, p, values, k);
}

/// o += p v.
__device__ inline void add_values(float (&o)[WIDTH / 8][4], const uint4 (&p)[4], u32 values) {
#pragma unroll
    for (int k = 0; k < 4; k++) add_step(o, p[k], values, k);
}

/// Two rows of a lane's: whose, and how far their softmax has come.
struct Softmax {
    int node[2], time[2];
    float top[2], total[2], shrink[2];  // total: of the lane's columns; shrink: of the sums before
};

/// What a row does not see weighs nothing.
__device__ inline void mask(float (&s)[8][4], const Softmax& rows, const Step& step, int h) {
    const float nothing = as_float(0xff800000u);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int node = rows.node[half], ahead = rows.time[half] - step.at + 1;
        int upto = 0;
        if (step.node == ANY) {
            upto = node == NOBODY ? 0 : KEYS;
        } else if (step.node == node) {
            upto = ahead;
        }
        upto -= 2 * h;
        const int from = ahead - WINDOW - 2 * h;
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int j = n * 8 + e;
                const bool seen = j < upto && (WINDOW == 0 || j >= from);
                s[n][2 * half + e] = seen ? s[n][2 * half + e] : nothing;
            }
        }
    }
}

/// Scores become weights.
__device__ inline void weigh(float (&s)[8][4], Softmax& rows, const Step& step, float scale,
                             int h) {
    if (step.masked) mask(s, rows, step, h);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int a = 2 * half, b = a + 1;
        float now = rows.top[half];
#pragma unroll
        for (int n = 0; n < 8; n++) now = greater(now, greater(s[n][a], s[n][b]));
        now = greater(now, shuffle_xor(now, 1));
        now = greater(now, shuffle_xor(now, 2));
        // a row that has seen nothing yet stays at -inf without turning into NaN
        const float safe = now == as_float(0xff800000u) ? 0.0f : now;
        const float least = -(safe * scale);
        float even = 0.0f, odd = 0.0f;
#pragma unroll
        for (int n = 0; n < 8; n++) {
            s[n][a] = exp2_of(fused(s[n][a], scale, least));
            s[n][b] = exp2_of(fused(s[n][b], scale, least));
            even += s[n][a], odd += s[n][b];
        }
        rows.shrink[half] = exp2_of((rows.top[half] - safe) * scale);
        rows.total[half] = fused(rows.total[half], rows.shrink[half], even + odd);
        rows.top[half] = now;
    }
}

/// Weights as the left operand.
__device__ inline void round_weights(uint4 (&p)[4], const float (&s)[8][4]) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const float (&x)[4] = s[2 * k], (&y)[4] = s[2 * k + 1];
        p[k] = make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(y[0], y[1]), pack(y[2], y[3]));
    }
}

/// Of 4 x 4 in four lanes, a column each: a row each.
__device__ inline void turn_over(u32 (&x)[4], int h) {
#pragma unroll
    for (int apart = 1; apart < 4; apart *= 2) {
        const bool high = (h & apart) != 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & apart) continue;
            const u32 got = shuffle_xor(high ? x[i] : x[i | apart], apart);
            x[i] = high ? got : x[i];
            x[i | apart] = high ? x[i | apart] : got;
        }
    }
}

/// Two values times sigmoid(gate).
__device__ inline u32 gated(u32 value, u32 gate) {
    // squared, the sigmoid without a division
    const float low = rsqrt_of(1.0f + exp2_of(low_of(gate) * -LOG2_E));
    const float high = rsqrt_of(1.0f + exp2_of(high_of(gate) * -LOG2_E));
    return scaled(value, low * low, high * high);
}

/// The outputs of one of a lane's two rows.
__device__ inline void store_row(const float (&o)[WIDTH / 8][4], int half, float total,
                                 const uint4 (&gate)[WIDTH / 32], u16* out, int h) {
    total += shuffle_xor(total, 1);
    total += shuffle_xor(total, 2);
    const float share = reciprocal(total > 0.0f ? total : 1.0f);
#pragma unroll
    for (int c = 0; c < WIDTH / 32; c++) {
        u32 x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float (&two)[4] = o[c * 4 + i];
            x[i] = pack(two[2 * half] * share, two[2 * half + 1] * share);
        }
        turn_over(x, h);
        const uint4 made = make_uint4(gated(x[0], gate[c].x), gated(x[1], gate[c].y),
                                      gated(x[2], gate[c].z), gated(x[3], gate[c].w));
        if (out != nullptr) *reinterpret_cast<uint4*>(out + c * 32 + h * 8) = made;
    }
}

/// Where a warp is among the places.
struct Reading {
    Attending& own;
    int lane, slot = 0;
    u32 parity = 0;

    __device__ inline u32 take() {
        barrier_wait(&own.full[slot], parity);
        return operand(own.tiles[0]) + slot * (sizeof(own.tiles[0]) / 16);
    }

    /// The place after this one; this one.
    __device__ inline int next() {
        const int taken = slot;
        if (++slot == SLOTS) slot = 0, parity ^= 1;
        return taken;
    }

    __device__ inline void release(u64* barrier) {
        if (lane == 0) barrier_arrive(barrier);
    }
};

/// What was added up before shrinks, if in any row of the warp's it does: 1 changes no bit.
__device__ inline void shrink(float (&o)[WIDTH / 8][4], const Softmax& rows) {
    if (!any_lane(rows.shrink[0] != 1.0f || rows.shrink[1] != 1.0f)) return;
#pragma unroll
    for (int n = 0; n < WIDTH / 8; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) o[n][e] *= rows.shrink[e / 2];
    }
}

/// What two rows of a lane begin with.
__device__ inline void begin(float (&o)[WIDTH / 8][4], Softmax& rows, const Asked* asked, int m) {
#pragma unroll
    for (int n = 0; n < WIDTH / 8; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) o[n][e] = 0.0f;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = m + half * 8;
        const bool there = row / BLOCK < TILE && row % BLOCK < GROUP;
        const Asked& own = asked[row / BLOCK % TILE];
        rows.node[half] = there ? own.node : NOBODY;
        rows.time[half] = own.time;
        rows.top[half] = as_float(0xff800000u);
        rows.total[half] = 0.0f;
    }
}

/// Sums and totals of one tile's rows over their keys. The scores of a step are multiplied while
/// the sums of those before shrink, and its weights computed while the values of the one before are
/// added.
__device__ inline void add_up(float (&o)[WIDTH / 8][4], Softmax& rows, Attending& own,
                              Reading& reading, u32 q, float scale, int h) {
    float s[8][4];
    uint4 p[4];
    u32 keys = reading.take();
    Step step = own.steps[reading.slot];
    products_begin();
    multiply_keys(s, q, keys);
    products_issued();
    products_end();
    settle(s);
    reading.release(&own.empty[reading.next()]);
    if (step.last) reading.release(&own.asked_over);
    weigh(s, rows, step, scale, h);
    round_weights(p, s);
    while (!step.last) {
        const u32 values = reading.take();
        const int values_at = reading.next();
        keys = reading.take();
        step = own.steps[reading.slot];
        products_begin();
        multiply_keys(s, q, keys);
        products_issued();
        shrink(o, rows);
        products_begin();
        add_values(o, p, values);
        products_issued();
        products_end_but_last();
        settle(s);
        weigh(s, rows, step, scale, h);
        // in this order, which compilers change: else nobody computes while values are added
        if (known(rows.total[0]) && known(rows.total[1])) {
            reading.release(&own.empty[reading.slot]);
            if (step.last) reading.release(&own.asked_over);
        }
        reading.next();
        products_end();
        settle(o);
        settle(s);
        settle(p);
        reading.release(&own.empty[values_at]);
        round_weights(p, s);
    }
    shrink(o, rows);
    products_begin();
    add_values(o, p, reading.take());
    products_issued();
    products_end();
    settle(o);
    reading.release(&own.empty[reading.next()]);
}

/// All tiles of the block; one warpgroup's 64 rows.
__device__ inline void attend_rows(Attending& own, const u16* q_gate, i64 stride, int tasks,
                                   float scale, u16* out, int group, int warp, int lane) {
    const int g = lane / 4, h = lane % 4, m = group * 64 + warp * 16 + g;
    const u32 q = operand(own.q[0]) + group * (sizeof(own.q[0]) / 16);
    Reading reading{own, lane};
    u32 turn = 0;
    for (int task = blockIdx.x; task < tasks; task += gridDim.x, turn ^= 1) {
        float o[WIDTH / 8][4];
        Softmax rows;
        reading.take();  // its keys come with the queries
        begin(o, rows, own.asked[turn], m);
        add_up(o, rows, own, reading, q, scale, h);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = m + half * 8, kv = task % KV_HEADS;
            const bool there = rows.node[half] != NOBODY;
            const i64 query = there ? own.asked[turn][row / BLOCK % TILE].query : 0;
            const int head = kv * GROUP + (there ? row % BLOCK : 0);
            const u16* gates = q_gate + query * stride + (2 * head + 1) * WIDTH + h * 8;
            uint4 gate[WIDTH / 32];
#pragma unroll
            for (int c = 0; c < WIDTH / 32; c++)
                gate[c] = *reinterpret_cast<const uint4*>(gates + c * 32);
            u16* place = out + (query * (KV_HEADS * GROUP) + head) * WIDTH;
            store_row(o, half, rows.total[half], gate, there ? place : nullptr, h);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend(const u16* q_gate, i64 stride, Sources from, Lists lists, float scale, u16* out) {
    SHARED_BYTES(memory);
    Attending& own = *reinterpret_cast<Attending*>(memory);
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) {
            barrier_init(&own.full[i], FEEDERS);
            barrier_init(&own.empty[i], GROUPS * 4);
        }
        barrier_init(&own.asked_over, GROUPS * 4);
        barriers_made();
    }
    sync_block();
    if (warp >= GROUPS * 4) {
        if (GROUPS > 1) fewer_registers<FEEDER_REGISTERS>();
        feed(own, lists, from, warp - GROUPS * 4, lane);
    } else {
        if (GROUPS > 1) more_registers<REGISTERS>();
        attend_rows(own, q_gate, stride, *lists.count * KV_HEADS, scale, out, warp / 4, warp % 4,
                    lane);
    }
}
