// Outputs, a block a chunk and value head, 32 values a warp, all transposed:
//
//     n = u - w S,  o = e^G q S + p n,  y = norm(o) * weight * silu(z)
#pragma once
#include "chain.cuh"

/// sum += x S, transposed, [16 values, 64 positions], of both tiles of values of a warp. x: w or q;
/// state: of a tile and k-step, as the left operand. Products that add to one sum lie apart.
template <typename State>
__device__ inline void multiply(float (&sum)[2][8][4], const State& state, const uint4* x,
                                int lane) {
    const int quarter = lane / 8, r = lane % 8;
#pragma unroll 2
    for (int step = 0; step < 8; step++) {
        const uint4 first = state(0, step), second = state(1, step);
        const u32 a[2][4] = {{first.x, first.y, first.z, first.w},
                             {second.x, second.y, second.z, second.w}};
#pragma unroll
        for (int two = 0; two < 4; two++) {
            u32 b[4];
            ldmatrix(b, at_tile(x, two * 16 + quarter / 2 * 8 + r, step * 2 + quarter % 2));
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                mma_bf16(sum[tile][2 * two], a[tile], b[0], b[1]);
                mma_bf16(sum[tile][2 * two + 1], a[tile], b[2], b[3]);
            }
        }
    }
}

/// Shared memory of a block. state: of o, float32 [64, 128], later.
struct Output {
    uint4 state[STATE / 8];
    uint4 w[OPERAND / 8], q[OPERAND / 8], p[SCORES / 8];
    float grown[CHUNK], squares[4][CHUNK], scale[CHUNK];
    int rows[CHUNK];
    u64 full;
};

/// Begins the copies of a chunk and head; source: of the state before it, -1: zeros. One thread.
__device__ inline void bring(Output& own, const Chunks& chunks, const u16* passed, int at,
                             int source) {
    const i64 place = at;
    barrier_expect(&own.full, (OPERAND + OPERAND + SCORES) * 2 + (source < 0 ? 0 : STATE * 2));
    copy_into(own.w, chunks.w + place * OPERAND, OPERAND * 2, &own.full);
    copy_into(own.q, chunks.q + place * OPERAND, OPERAND * 2, &own.full);
    copy_into(own.p, chunks.p + place * SCORES, SCORES * 2, &own.full);
    if (source >= 0) {
        copy_into(own.state, passed + (static_cast<i64>(source) * HV + at % HV) * STATE, STATE * 2,
                  &own.full);
    }
    barrier_arrive(&own.full);
}

/// Where element (position, value) of o lies: spread over the banks.
__device__ inline float* at_output(Output& own, int position, int dim) {
    return reinterpret_cast<float*>(own.state) + position * DIM + (dim ^ (position / 2 % 4 * 8));
}

/// o, transposed, [32 values, 64 positions] of a warp. resumed: whether a state is before the
/// chunk.
__device__ inline void sums(float (&o)[2][8][4], Output& own, const uint4* u, bool resumed,
                            int warp, int lane) {
    const int h = lane % 4;
    uint4 n[2][4];
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) o[tile][j][e] = 0.0f;
        }
    }
    if (resumed) {
        const auto state = [&](int tile, int k) {
            return own.state[by_state(2 * warp + tile, k, lane)];
        };
        multiply(o, state, own.w, lane);
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            float values[8][4];
            load_values(values, u, 2 * warp + tile, lane);
            subtract(n[tile], values, o[tile]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) o[tile][j][e] = 0.0f;
            }
        }
        multiply(o, state, own.q, lane);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 grown = *reinterpret_cast<const float2*>(own.grown + j * 8 + 2 * h);
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                o[tile][j][0] *= grown.x, o[tile][j][1] *= grown.y;
                o[tile][j][2] *= grown.x, o[tile][j][3] *= grown.y;
            }
        }
    } else {
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
#pragma unroll
            for (int m = 0; m < 4; m++) n[tile][m] = u[by_value(2 * warp + tile, m, lane)];
        }
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
        uint4 b[8];
#pragma unroll
        for (int j = 4 * m; j < 8; j++)
            b[j] = own.p[by_score(j, m, lane)];  // below, there are zeros
#pragma unroll
        for (int step = 0; step < 2; step++) {
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                const uint4 x = n[tile][2 * m + step];
                const u32 a[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (int j = 4 * m + 2 * step; j < 8; j++) {
                    mma_bf16(o[tile][j], a, step == 0 ? b[j].x : b[j].z,
                             step == 0 ? b[j].y : b[j].w);
                }
            }
        }
    }
}

/// o to shared memory, and the warp's part of the sum of squares of each position.
__device__ inline void spread(const float (&o)[2][8][4], Output& own, int warp, int lane) {
    const int g = lane / 4, h = lane % 4;
#pragma unroll
    for (int j = 0; j < 8; j++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int position = j * 8 + 2 * h + e;
            float squares = 0.0f;
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float x = o[tile][j][half * 2 + e];
                    squares += x * x;
                    *at_output(own, position, warp * 32 + tile * 16 + half * 8 + g) = x;
                }
            }
#pragma unroll
            for (int apart = 4; apart < LANES; apart *= 2) squares += shuffle_xor(squares, apart);
            if (g == 0) own.squares[warp][position] = squares;
        }
    }
}

__device__ inline float gated(float x, float gate) {
    return x * gate * reciprocal(1.0f + exp2_of(-LOG2_E * gate));
}

extern "C" __global__ void __launch_bounds__(128, 3)
    outputs(const u16* z, i64 stride, const float* norm, float eps, Lists lists, Chunks chunks,
            const u16* passed, u16* out) {
    SHARED_BYTES(memory);
    Output& own = *reinterpret_cast<Output*>(memory);
    const int tasks = lists.counts[CHUNK_COUNT] * HV;
    int coming = blockIdx.x / HV < lists.capacity ? lists.sources[blockIdx.x / HV] : -1;
    if (threadIdx.x == 0) {
        barrier_init(&own.full, 1);
        barriers_made();
    }
    sync_block();
    u32 parity = 0;
    for (int task = blockIdx.x; task < tasks; task += gridDim.x, parity ^= 1) {
        const int thread = fresh(threadIdx.x), warp = thread / LANES, lane = thread % LANES,
                  eight = thread % 16;
        const int c = task / HV, head = task % HV, source = coming;
        // the next one's, so that nobody waits for it
        coming = task + gridDim.x < tasks ? lists.sources[(task + gridDim.x) / HV] : -1;
        if (thread == 0) bring(own, chunks, passed, task, source);
        const uint4* u =
            reinterpret_cast<const uint4*>(chunks.u + static_cast<i64>(task) * OPERAND);
        if (thread < CHUNK) {
            const int row = lists.rows[c * CHUNK + thread];
            own.rows[thread] = thread < lists.skips[c] ? -1 : row;  // an ancestor's are its own
            own.grown[thread] = exp2_of(chunks.total[task * CHUNK + thread]);
        }
        sync_block();
        barrier_wait(&own.full, parity);
        float o[2][8][4];
        sums(o, own, u, source >= 0, warp, lane);
        uint4 gates[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const i64 row = own.rows[i * 8 + thread / 16];
            gates[i] =
                row < 0
                    ? make_uint4(0, 0, 0, 0)
                    : *reinterpret_cast<const uint4*>(z + row * stride + head * DIM + eight * 8);
        }
        sync_block();  // all have read the state, whose place o takes
        spread(o, own, warp, lane);
        sync_block();
        if (thread < CHUNK) {
            const float squares = own.squares[0][thread] + own.squares[1][thread] +
                                  own.squares[2][thread] + own.squares[3][thread];
            own.scale[thread] = rsqrt_of(squares * (1.0f / DIM) + eps);
        }
        sync_block();
        const float4* weights = reinterpret_cast<const float4*>(norm + eight * 8);
        const float4 first = weights[0], second = weights[1];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int position = i * 8 + thread / 16;
            const i64 row = own.rows[position];
            if (row < 0) continue;
            const float4* found =
                reinterpret_cast<const float4*>(at_output(own, position, eight * 8));
            const float4 a = found[0], b = found[1];
            const float scale = own.scale[position];
            const uint4 gate = gates[i];
            *reinterpret_cast<uint4*>(out + row * (HV * DIM) + head * DIM + eight * 8) =
                make_uint4(pack(gated(a.x * scale * first.x, low_of(gate.x)),
                                gated(a.y * scale * first.y, high_of(gate.x))),
                           pack(gated(a.z * scale * first.z, low_of(gate.y)),
                                gated(a.w * scale * first.w, high_of(gate.y))),
                           pack(gated(b.x * scale * second.x, low_of(gate.z)),
                                gated(b.y * scale * second.y, high_of(gate.z))),
                           pack(gated(b.z * scale * second.z, low_of(gate.w)),
                                gated(b.w * scale * second.w, high_of(gate.w))));
        }
        before_copies();
        sync_block();
    }
}
