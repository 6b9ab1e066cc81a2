// What the launches of the delta net hand to each other, and how it lies.
//
// w, kd and q lie as tiles [64, 128], whose copies are operands of products; the others as lanes
// hold them (primitives.cuh): a lane loads 16 bytes that are its part of two neighbouring 8-wide
// blocks, a warp 512 in a row, and nobody moves anything between lanes.
#pragma once
#include "primitives.cuh"

constexpr int CHUNK = 64;
constexpr int DIM = 128;  // of keys and of values
constexpr int LANES = 32;
constexpr int OPERAND = CHUNK * DIM;   // elements of w, q, kd, u of a chunk and head
constexpr int SCORES = CHUNK * CHUNK;  // elements of p
constexpr int STATE = DIM * DIM;
constexpr float LOG2_E = 1.4426950408889634f;

// Where 16 bytes of each lane are. n: 8-wide block, m: pair of k-steps of 16, and the like.
__device__ inline int by_score(int n, int m, int lane) { return (n * 2 + m) * LANES + lane; }  // p
__device__ inline int by_value(int tile, int m, int lane) {
    return (tile * 4 + m) * LANES + lane;
}  // u
__device__ inline int by_state(int tile, int k, int lane) { return (tile * 8 + k) * LANES + lane; }

/// Eight columns of a tile [64, 128]: two halves of 64 columns, rows of 128 bytes that are spread
/// so that the same columns of eight rows lie in different banks (the 128-byte swizzle of
/// products).
template <typename Tile>
__device__ inline Tile* at_tile(Tile* tile, int row, int eight) {
    return tile + eight / 8 * (CHUNK * 8) + row * 8 + ((eight ^ row) & 7);
}

/// Outputs of chunks, [C, HV] of each: kd, w, q [64, 128], u [128, 64] and p [64, 64] bfloat16;
/// total [64], the cumulative log decay in base 2, and decay, that of the whole chunk, float32.
struct Chunks {
    u16 *kd, *w, *q, *u, *p;
    float *total, *decay;
};

/// Chunks of the round and their chains, as `layout.tasks` writes them. counts: how many of each.
struct Lists {
    const int *rows, *skips, *slots, *sources;  // of a chunk
    const int *row_taps, *scans, *resumed, *counts;
    int capacity;  // chunks that there is room for
};

/// Where checkpoints lie: states of one layer, float32 [slot, HV, 128, 128], and the last three
/// rows before the convolution, bfloat16 [slot, 3, channels]; elements between slots.
struct Slots {
    float* state;
    u16* conv;
    i64 state_stride, conv_stride;
};

constexpr int CHANNELS = 2 * HK * DIM + HV * DIM;
constexpr int RATIO = HV / HK;

__device__ inline float number_of(float x) { return x; }
__device__ inline float number_of(u16 x) { return as_float(static_cast<u32>(x) << 16); }

/// A state as the left operand of products: transposed, rounded. Of one lane and tile of 16 values.
__device__ inline uint4 rounded(const float (&even)[4], const float (&odd)[4]) {
    return make_uint4(pack(even[0], even[1]), pack(even[2], even[3]), pack(odd[0], odd[1]),
                      pack(odd[2], odd[3]));
}
