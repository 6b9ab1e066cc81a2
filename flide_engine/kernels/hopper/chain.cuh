// The chain of states, a block a node, value head and half of the values, chunk by chunk:
//
//     S = e^(G_63) S + kd^T (u - w S)
//
// A warpgroup carries 64 values of S, transposed, in registers: as the sum of a product holds it,
// and rounded as the left operand of the next one does, so nothing moves between lanes. A fifth
// warp claims chains and copies w, kd and u ahead, over the end of a chain into the next.
//
// A chain that starts from a slot of this round waits until its ancestor has stored it. Chains are
// claimed in stream order, ancestors first, and run in the order of their claims, so the first that
// has not ended waits for nobody.
#pragma once
#include "tiles.cuh"

constexpr int STAGES = 5;
constexpr int VALUES = OPERAND / PARTS;             // elements of u of a block
constexpr int COPIED = (2 * OPERAND + VALUES) * 2;  // bytes of a stage
constexpr int STORERS = 4 * LANES;  // each says so when it has stored its part of a state

/// A chunk of a chain. task: -1 after the last. out: number of the state after it. kept: slot it is
/// stored in, or -1. slot: that the chain starts from, or -1: zeros; begins, ends: with this chunk.
struct Step {
    int task, out, kept, begins, ends, slot;
};

/// Shared memory of a block.
struct Chaining {
    uint4 w[STAGES][OPERAND / 8], kd[STAGES][OPERAND / 8], u[STAGES][VALUES / 8];
    u64 full[STAGES], empty[STAGES];
    Step steps[STAGES];
    float decay[STAGES];
};

/// Claims chains, and copies what their chunks need, as stages become free; one warp.
__device__ inline void feed(Chaining& own, const Lists& lists, const Chunks& chunks, int* progress,
                            int lane) {
    const int tasks = lists.counts[SCAN_COUNT] * HV * PARTS;
    int turn = 0, coming = lane == 0 ? claim(progress) : 0;
    for (int task = first_lane(coming); task < tasks; task = first_lane(coming)) {
        const int inside = task % (HV * PARTS), head = inside / PARTS;
        const int* scan = lists.scans + task / (HV * PARTS) * 6;
        const int first = scan[0], count = scan[1], out = scan[3];
        const int* flag = scan[4] < 0 ? nullptr : progress + 1 + scan[4] * (HV * PARTS) + inside;
        const int needed =
            scan[5] * STORERS;  // for all parts of all states up to the one it starts from
        int kept = -1;
        float decay = 0.0f;
        for (int i = 0; i < count; i++, turn++) {
            const int stage = turn % STAGES, at = (first + i) * HV + head;
            if (i % LANES == 0 && i + lane < count) {  // those of the next chunks, a lane each
                kept = lists.slots[first + i + lane];
                decay = chunks.decay[at + lane * HV];
            }
            const int slot = shuffle(kept, i % LANES);
            const float shrinks = shuffle(decay, i % LANES);
            if (lane != 0) continue;
            if (i == (count < STAGES ? 0 : count - STAGES))
                coming = claim(progress);  // not long before
            barrier_wait(&own.empty[stage], (turn / STAGES + 1) & 1);
            own.steps[stage] = Step{task, out + i, slot, i == 0, i + 1 == count, scan[2]};
            own.decay[stage] = shrinks;
            barrier_expect(&own.full[stage], COPIED);
            const i64 place = static_cast<i64>(at) * OPERAND;
            copy_into(own.w[stage], chunks.w + place, OPERAND * 2, &own.full[stage]);
            copy_into(own.u[stage], chunks.u + place + inside % PARTS * VALUES, VALUES * 2,
                      &own.full[stage]);
            copy_into(own.kd[stage], chunks.kd + place, OPERAND * 2, &own.full[stage]);
            while (i == 0 && flag != nullptr && acquire(flag) < needed) pause();
            barrier_arrive(&own.full[stage]);
        }
        sync_warp();
    }
    if (lane != 0) return;
    const int stage = turn % STAGES;
    barrier_wait(&own.empty[stage], (turn / STAGES + 1) & 1);
    own.steps[stage].task = -1;
    barrier_arrive(&own.full[stage]);
}

/// 16 values of a state, transposed: element (n, e) is that of key n * 8 + 2h + e % 2, value
/// e / 2 * 8 + g. state: nullptr: zeros.
__device__ inline void load_state(float (&s)[16][4], const float* state, int g, int h) {
#pragma unroll
    for (int n = 0; n < 16; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            s[n][e] =
                state == nullptr
                    ? 0.0f
                    : load_shared_by_all(state + (n * 8 + 2 * h + e % 2) * DIM + e / 2 * 8 + g);
        }
    }
}

__device__ inline void store_state(const float (&s)[16][4], float* state, int g, int h) {
#pragma unroll
    for (int n = 0; n < 16; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) state[(n * 8 + 2 * h + e % 2) * DIM + e / 2 * 8 + g] = s[n][e];
    }
}

/// u of a warp's 16 values and all positions, in the places of a product's sum.
__device__ inline void load_values(float (&u)[8][4], const uint4* values, int tile, int lane) {
#pragma unroll
    for (int m = 0; m < 4; m++) {
        const uint4 x = values[by_value(tile, m, lane)];
        u[2 * m][0] = low_of(x.x), u[2 * m][1] = high_of(x.x);
        u[2 * m][2] = low_of(x.y), u[2 * m][3] = high_of(x.y);
        u[2 * m + 1][0] = low_of(x.z), u[2 * m + 1][1] = high_of(x.z);
        u[2 * m + 1][2] = low_of(x.w), u[2 * m + 1][3] = high_of(x.w);
    }
}

/// n = u - w S as the left operand, rounded.
__device__ inline void subtract(uint4 (&n)[4], const float (&u)[8][4], const float (&sum)[8][4]) {
#pragma unroll
    for (int m = 0; m < 4; m++) {
        float even[4], odd[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            even[e] = u[2 * m][e] - sum[2 * m][e], odd[e] = u[2 * m + 1][e] - sum[2 * m + 1][e];
        }
        n[m] = rounded(even, odd);
    }
}

__device__ inline void pass_on(uint4* out, const uint4 (&state)[8], int tile, int lane) {
#pragma unroll
    for (int k = 0; k < 8; k++) out[by_state(tile, k, lane)] = state[k];
}

/// All chains of the block, 16 values a warp. What nothing waits for is done while products run.
__device__ inline void follow(Chaining& own, const Slots& slots, uint4* passed, int* progress,
                              int warp, int lane) {
    const int g = lane / 4, h = lane % 4;
    float s[16][4];
    uint4 left[8];
    uint4* out = nullptr;  // of the chunk before
    for (int turn = 0;; turn++) {
        const int stage = turn % STAGES;
        barrier_wait(&own.full[stage], (turn / STAGES) & 1);
        const Step step = own.steps[stage];
        if (step.task < 0) return;
        const int head = step.task / PARTS % HV, tile = step.task % PARTS * 4 + warp;
        const i64 inside = static_cast<i64>(head) * STATE + tile * 16;
        if (step.begins) {
            const float* state = slots.state + step.slot * slots.state_stride + inside;
            load_state(s, step.slot < 0 ? nullptr : state, g, h);
#pragma unroll
            for (int k = 0; k < 8; k++) left[k] = rounded(s[2 * k], s[2 * k + 1]);
        }
        float sum[8][4], u[8][4];
        const u32 w = operand(own.w[0]) + stage * (sizeof(own.w[0]) / 16);
        const u32 kd = w + STAGES * (sizeof(own.w[0]) / 16);
        products_begin();
        warpgroup_mma_64<false>(sum, left[0], w, 0);
#pragma unroll
        for (int k = 1; k < 8; k++) warpgroup_mma_64<true>(sum, left[k], w, k);
        products_issued();
        if (!step.begins) pass_on(out, left, tile, lane);
        load_values(u, own.u[stage], warp, lane);
        const float decay = own.decay[stage];
#pragma unroll
        for (int i = 0; i < 16; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++) s[i][e] *= decay;
        }
        settle(s);
        settle(u);
        products_end();
        settle(sum);
        uint4 n[4];
        subtract(n, u, sum);
        products_begin();
#pragma unroll
        for (int k = 0; k < 4; k++) warpgroup_mma_128(s, n[k], kd, k);
        products_issued();
        out = passed + (static_cast<i64>(step.out) * HV + head) * (STATE / 8);
        products_end();
        settle(s);
        if (lane == 0) barrier_arrive(&own.empty[stage]);
#pragma unroll
        for (int k = 0; k < 8; k++) left[k] = rounded(s[2 * k], s[2 * k + 1]);
        if (step.kept >= 0) {
            store_state(s, slots.state + step.kept * slots.state_stride + inside, g, h);
            release_one(progress + 1 + step.task);
        }
        if (step.ends) pass_on(out, left, tile, lane);
    }
}

extern "C" __global__ void __launch_bounds__(160, 1)
    chain(Slots slots, Lists lists, Chunks chunks, uint4* passed, int* progress) {
    SHARED_BYTES(memory);
    Chaining& own = *reinterpret_cast<Chaining*>(memory);
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&own.full[i], 1);
            barrier_init(&own.empty[i], 4);
        }
        barriers_made();
    }
    sync_block();
    if (warp == 4) {
        feed(own, lists, chunks, progress, lane);
    } else {
        follow(own, slots, passed, progress, warp, lane);
    }
}
