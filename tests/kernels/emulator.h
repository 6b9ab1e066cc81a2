// The GPU's part of primitives.cuh on a CPU: a block's threads are fibers that take turns wherever
// they wait for each other. What a warp does together is done by what its lanes hand in.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __noinline__
#define SHARED_BYTES(name) unsigned char* name = emulated::shared.data()

struct uint4 {
    u32 x, y, z, w;
};
struct uint2 {
    u32 x, y;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct Place {
    int x;
};
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

namespace emulated {
struct Copy {
    void* to;
    const void* from;
};
struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool ended;
    // begun, by group; the last is not closed yet
    std::vector<std::vector<Copy>> copies;
    std::vector<std::vector<std::function<void()>>> products;
};
struct Warp {
    u64 slots[2][32][8];  // two operations' operands: none overtakes another by two
    int arrived = 0, turn = 0;
};
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline ucontext_t scheduler;
inline std::vector<unsigned char> shared;
inline int current, block_arrived, block_turn, ended;
inline std::function<void()> body;

inline void yield() { swapcontext(&fibers[current].context, &scheduler); }

inline void run_fiber() {
    body();
    fibers[current].ended = true;
    ended++;
    yield();
}

/// What all lanes hand in, once all have.
inline const u64 (*together(const u64* mine, int words))[8] {
    Warp& warp = warps[current / 32];
    const int turn = warp.turn;
    memcpy(warp.slots[turn & 1][current % 32], mine, words * sizeof(u64));
    if (++warp.arrived == 32) {
        warp.arrived = 0;
        warp.turn++;
    } else {
        while (warp.turn == turn) yield();
    }
    return warp.slots[turn & 1];
}

inline float bf16(u64 bits) {
    const u32 wide = static_cast<u32>(bits & 0xffff) << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
}
inline float f32(u64 bits) {
    const u32 low = static_cast<u32>(bits);
    float x;
    memcpy(&x, &low, 4);
    return x;
}
inline u32 bits(float x) {
    u32 made;
    memcpy(&made, &x, 4);
    return made;
}
/// The nearest bfloat16, ties to even, as a float's bits.
inline u32 rounded(float x) {
    const u32 b = bits(x);
    return (std::isnan(x) ? b | 0x400000u : b + 0x7fff + (b >> 16 & 1)) & 0xffff0000u;
}
struct Barrier {
    uint8_t pending, count, phase, unused;
    int32_t bytes;
};
static_assert(sizeof(Barrier) == 8);
inline Barrier& barrier(u64* at) { return *reinterpret_cast<Barrier*>(at); }
inline void settle(Barrier& b) {
    if (b.pending == 0 && b.bytes == 0) {
        b.phase ^= 1;
        b.pending = b.count;
    }
}

/// One block after the other; each claims what is left, as few programs on a card would.
inline void launch(int blocks, int threads, size_t bytes, std::function<void()> kernel);
}  // namespace emulated

inline Place threadIdx, blockIdx, gridDim;

inline void emulated::launch(int blocks, int threads, size_t bytes, std::function<void()> kernel) {
    gridDim.x = blocks;
    body = std::move(kernel);
    fibers.clear();
    fibers.resize(threads);
    for (int block = 0; block < blocks; block++) {
        shared.assign(bytes, 0xff);  // NaN: nothing may count on zeros
        warps.assign((threads + 31) / 32, Warp());
        block_arrived = block_turn = ended = 0;
        for (Fiber& fiber : fibers) {
            if (!fiber.stack) fiber.stack.reset(new char[1 << 17]);
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get();
            fiber.context.uc_stack.ss_size = 1 << 17;
            fiber.context.uc_link = nullptr;
            makecontext(&fiber.context, run_fiber, 0);
            fiber.ended = false;
            fiber.copies.assign(1, {});
            fiber.products.assign(1, {});
        }
        while (ended < threads) {
            for (current = 0; current < threads; current++) {
                if (fibers[current].ended) continue;
                threadIdx.x = current;
                blockIdx.x = block;
                swapcontext(&scheduler, &fibers[current].context);
            }
        }
    }
}

inline float as_float(u32 bits) { return emulated::f32(bits); }
inline u32 pack(float low, float high) {
    return emulated::rounded(low) >> 16 | emulated::rounded(high);
}
inline u32 tf32(float x) { return emulated::bits(x) >> 13 << 13; }
inline float exp2_of(float x) { return std::exp2(x); }
inline float log_of(float x) { return std::log2(x); }
inline float rsqrt_of(float x) { return 1.0f / std::sqrt(x); }
inline float fused(float a, float b, float c) { return std::fma(a, b, c); }
inline float greater(float a, float b) { return std::fmax(a, b); }
inline bool known(float) { return true; }
inline float reciprocal(float x) { return 1.0f / x; }

/// c += a b of a warp, [16, 8], from what its lanes hold; element: of a lane's operands (four of a,
/// two of b), by lane, k and which.
template <int DEPTH, typename Element>
inline void warp_product(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, const Element& element) {
    const u64 mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const auto all = emulated::together(mine, 6);
    const int g = emulated::current % 32 / 4, h = emulated::current % 4;
    for (int e = 0; e < 4; e++) {
        float sum = c[e];
        const int row = g + e / 2 * 8, column = 2 * h + e % 2;
        for (int k = 0; k < DEPTH; k++) {
            sum += element(all, row % 8, k, row / 8, 2) * element(all, column, k, 4, 1);
        }
        c[e] = sum;
    }
}

inline void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    warp_product<16>(c, a, b0, b1, [](auto all, int line, int k, int first, int apart) {
        return emulated::bf16(all[line * 4 + k % 8 / 2][first + k / 8 * apart] >> k % 2 * 16);
    });
}

inline void mma_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    warp_product<8>(c, a, b0, b1, [](auto all, int line, int k, int first, int apart) {
        return emulated::f32(all[line * 4 + k % 4][first + k / 4 * apart]);
    });
}

inline void load_matrices(u32 (&r)[4], const void* row, bool transposed) {
    const u64 mine[1] = {reinterpret_cast<u64>(row)};
    const auto all = emulated::together(mine, 1);
    const int g = emulated::current % 32 / 4, h = emulated::current % 4;
    for (int i = 0; i < 4; i++) {
        const auto element = [&](int row, int column) {
            return static_cast<u32>(reinterpret_cast<const u16*>(all[i * 8 + row][0])[column]);
        };
        r[i] = transposed ? element(2 * h, g) | element(2 * h + 1, g) << 16
                          : element(g, 2 * h) | element(g, 2 * h + 1) << 16;
    }
    emulated::together(mine, 1);  // nobody may write before all have read
}
inline void ldmatrix(u32 (&r)[4], const void* row) { load_matrices(r, row, false); }
inline void ldmatrix_transposed(u32 (&r)[4], const void* row) { load_matrices(r, row, true); }

inline float from_lane(float x, const std::function<int(int)>& source) {
    const u64 mine[1] = {emulated::bits(x)};
    const auto all = emulated::together(mine, 1);
    const int lane = source(emulated::current % 32);
    return lane < 0 ? x : emulated::f32(all[lane][0]);
}
inline float shuffle_xor(float x, int mask) {
    return from_lane(x, [=](int t) { return t ^ mask; });
}
inline u32 shuffle_xor(u32 x, int mask) {
    const u64 mine[1] = {x};
    return static_cast<u32>(emulated::together(mine, 1)[emulated::current % 32 ^ mask][0]);
}
inline float shuffle_up(float x, int by) {
    return from_lane(x, [=](int t) { return t - by; });
}
inline float shuffle(float x, int lane) {
    return from_lane(x, [=](int) { return lane; });
}
inline int shuffle(int x, int lane) {
    const u64 mine[1] = {static_cast<u32>(x)};
    return static_cast<int>(emulated::together(mine, 1)[lane][0]);
}
inline int first_lane(int x) { return shuffle(x, 0); }
inline bool any_lane(bool x) {
    const u64 mine[1] = {x};
    const auto all = emulated::together(mine, 1);
    bool any = false;
    for (int t = 0; t < 32; t++) any |= all[t][0] != 0;
    return any;
}
inline void sync_warp() {
    const u64 nothing[1] = {0};
    emulated::together(nothing, 1);
}
inline void sync_block() {
    const int turn = emulated::block_turn;
    if (++emulated::block_arrived == static_cast<int>(emulated::fibers.size())) {
        emulated::block_arrived = 0;
        emulated::block_turn++;
    } else {
        while (emulated::block_turn == turn) emulated::yield();
    }
}

inline void release_one(int* place) { ++*place; }
inline int acquire(const int* place) {
    emulated::yield();
    return *place;
}
inline int claim(int* counter) { return (*counter)++; }
inline float load_shared_by_all(const float* place) { return *place; }

inline void barrier_init(u64* at, int arrivals) {
    const auto count = static_cast<uint8_t>(arrivals);
    emulated::barrier(at) = {count, count, 0, 0, 0};
}
inline void barriers_made() {}
inline void before_copies() {}
inline void barrier_arrive(u64* at) {
    emulated::barrier(at).pending--;
    emulated::settle(emulated::barrier(at));
}
inline void barrier_expect(u64* at, u32 bytes) {
    emulated::barrier(at).bytes += static_cast<int32_t>(bytes);
}
inline void barrier_wait(u64* at, u32 parity) {
    while (emulated::barrier(at).phase == parity) emulated::yield();
}
inline bool barrier_ready(u64* at, u32 parity) { return emulated::barrier(at).phase != parity; }
inline int fresh(int x) { return x; }
inline void pause() { emulated::yield(); }

namespace emulated {
/// Ends all groups of copies but so many: as late as a card may.
inline void end_copies(size_t most) {
    auto& groups = fibers[current].copies;
    while (groups.size() > most + 1) {
        for (const Copy& copy : groups.front()) memcpy(copy.to, copy.from, 16);
        groups.erase(groups.begin());
    }
}
}  // namespace emulated
inline void copy_16(void* shared, const void* global) {
    emulated::fibers[emulated::current].copies.back().push_back({shared, global});
}
inline void copies_grouped() { emulated::fibers[emulated::current].copies.emplace_back(); }
template <int MOST>
inline void copies_but() {
    emulated::end_copies(MOST);
}
inline void copies_done() {
    copies_grouped();
    emulated::end_copies(0);
}
inline void before_products() {}
template <int COUNT>
inline void fewer_registers() {}
template <int COUNT>
inline void more_registers() {}
inline void copy_out(void* global, const void* shared, u32 bytes) { memcpy(global, shared, bytes); }
inline void copied_out() {}
inline void written_out() {}

namespace emulated {
/// A product, which reads and writes once it has to have ended.
inline void begin_product(std::function<void()> product) {
    fibers[current].products.back().push_back(std::move(product));
}
inline void end_products(size_t most) {
    const int mine = current;
    while (fibers[mine].products.size() > most + 1) {
        const auto group = std::move(fibers[mine].products.front());
        fibers[mine].products.erase(fibers[mine].products.begin());
        for (const auto& product : group) product();
    }
}
}  // namespace emulated
inline void products_begin() {}
inline void products_issued() { emulated::fibers[emulated::current].products.emplace_back(); }
inline void products_end() { emulated::end_products(0); }
inline void products_end_but_last() { emulated::end_products(1); }

template <int N>
inline void settle(float (&)[N][4]) {}
template <int N>
inline void settle(uint4 (&)[N]) {}
inline u32 operand(const void* shared) {
    return static_cast<u32>((static_cast<const unsigned char*>(shared) - emulated::shared.data()) /
                            16);
}

/// Element of a tile [64, 128] as tiles.cuh has it.
inline float tile_element(u32 operand, int row, int column) {
    const uint4* tile = reinterpret_cast<const uint4*>(emulated::shared.data()) + operand;
    const uint4* eight = tile + column / 64 * 512 + row * 8 + ((column / 8 ^ row) & 7);
    return emulated::bf16(reinterpret_cast<const u16*>(eight)[column % 8]);
}
/// A warp's 16 rows of a warpgroup's product; right: by k and column.
template <int N, typename Right>
inline void warp_rows(float (&c)[N][4], const uint4& a, const Right& right) {
    const u64 mine[4] = {a.x, a.y, a.z, a.w};
    const auto all = emulated::together(mine, 4);
    const int g = emulated::current % 32 / 4, h = emulated::current % 4;
    for (int n = 0; n < N; n++) {
        for (int e = 0; e < 4; e++) {
            const int row = g + e / 2 * 8;
            for (int k = 0; k < 16; k++) {
                const u64 left = all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2] >> k % 2 * 16;
                c[n][e] += emulated::bf16(left) * right(k, n * 8 + 2 * h + e % 2);
            }
        }
    }
    sync_warp();  // nobody may overwrite before all have read
}
inline void rows_of_tile(float (&c)[8][4], u32 rows, u32 tile, int step) {
    const int g = emulated::current % 32 / 4, h = emulated::current % 4;
    float left[2][16];
    for (int k = 0; k < 16; k++) {
        for (int half = 0; half < 2; half++) {
            const int row = emulated::current / 32 % 4 * 16 + half * 8 + g;
            left[half][k] = tile_element(rows, row, step * 16 + k);
        }
    }
    for (int n = 0; n < 16; n++) {
        const int column = n / 2 * 8 + 2 * h + n % 2;
        for (int k = 0; k < 16; k++) {
            const float right = tile_element(tile, column, step * 16 + k);
            c[n / 2][n % 2] += left[0][k] * right;
            c[n / 2][2 + n % 2] += left[1][k] * right;
        }
    }
    sync_warp();
}
template <bool ADDS>
inline void warpgroup_mma_64(float (&c)[8][4], const uint4& a, u32 tile, int step) {
    emulated::begin_product([=, &c, &a] {
        if (!ADDS) memset(c, 0, sizeof(c));
        warp_rows(c, a, [&](int k, int n) { return tile_element(tile, n, step * 16 + k); });
    });
}
template <bool ADDS>
inline void warpgroup_mma_64(float (&c)[8][4], u32 rows, u32 tile, int step) {
    emulated::begin_product([=, &c] {
        if (!ADDS) memset(c, 0, sizeof(c));
        rows_of_tile(c, rows, tile, step);
    });
}
template <int N>
inline void add_columns(float (&c)[N][4], const uint4& a, u32 tile, int step) {
    emulated::begin_product([=, &c, &a] {
        warp_rows(c, a, [&](int k, int n) { return tile_element(tile, step * 16 + k, n); });
    });
}
inline void warpgroup_mma_128(float (&c)[16][4], const uint4& a, u32 tile, int step) {
    add_columns(c, a, tile, step);
}
inline void warpgroup_mma_256(float (&c)[32][4], const uint4& a, u32 tile, int step) {
    add_columns(c, a, tile, step);
}
inline void copy_into(void* shared, const void* global, u32 bytes, u64* at) {
    memcpy(shared, global, bytes);
    emulated::barrier(at).bytes -= static_cast<int32_t>(bytes);
    emulated::settle(emulated::barrier(at));
}
