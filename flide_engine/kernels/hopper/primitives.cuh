// Hopper instructions by name: what delta_net.cu and attention.cu ask of a GPU, and nothing else.
//
// A warp's lane t holds, with g = t / 4 and h = t % 4, of m16n8k16 and m16n8k8 products
// (PTX ISA, "Matrix Fragments for mma.m16n8k16" and "mma.m16n8k8"):
//   A [16, 16] bf16  a0 (g, 2h), a1 (g + 8, 2h), a2 (g, 2h + 8), a3 (g + 8, 2h + 8), two columns
//   each B [16, 8] bf16   b0 (2h, g), b1 (2h + 8, g), two rows each C [16, 8] f32    c0 (g, 2h), c1
//   (g, 2h + 1), c2 (g + 8, 2h), c3 (g + 8, 2h + 1) A [16, 8] tf32   a0 (g, h), a1 (g + 8, h), a2
//   (g, h + 4), a3 (g + 8, h + 4) B [8, 8] tf32    b0 (h, g), b1 (h + 4, g)
// EMULATED: the same functions on a CPU, for tests (tests/kernels/emulator.h).
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifdef EMULATED
#include "emulator.h"
#else

#define SHARED_BYTES(name) extern __shared__ __align__(1024) unsigned char name[]

__device__ inline float as_float(u32 bits) { return __uint_as_float(bits); }

/// Two bfloat16, rounded to nearest even.
__device__ inline u32 pack(float low, float high) {
    u32 made;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(made) : "f"(high), "f"(low));
    return made;
}

/// As tf32: products leave out the last 13 bits.
__device__ inline u32 tf32(float x) { return __float_as_uint(x); }

__device__ inline float exp2_of(float x) {
    float made;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(made) : "f"(x));
    return made;
}

/// The logarithm to base 2.
__device__ inline float log_of(float x) {
    float made;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(made) : "f"(x));
    return made;
}

__device__ inline float rsqrt_of(float x) {
    float made;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(made) : "f"(x));
    return made;
}

/// a b + c, rounded once.
__device__ inline float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }

/// The greater; of a number and NaN, the number.
__device__ inline float greater(float a, float b) { return fmaxf(a, b); }

/// True of all that arithmetic yields: what depends on it comes after x.
__device__ inline bool known(float x) { return __float_as_uint(x) != 0xffffffffu; }

/// 1 / x, 0 of infinity.
__device__ inline float reciprocal(float x) {
    float made;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(made) : "f"(x));
    return made;
}

/// c += a b, operands bfloat16.
__device__ inline void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// c += a b, operands tf32.
__device__ inline void mma_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline u32 address_of(const void* shared) {
    return static_cast<u32>(__cvta_generic_to_shared(shared));
}

/// Four 8 x 8 matrices of 16 bits; lane t names the row t % 8 of matrix t / 8.
__device__ inline void ldmatrix(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address_of(row))
                 : "memory");
}

/// The same, each matrix transposed.
__device__ inline void ldmatrix_transposed(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address_of(row))
                 : "memory");
}

__device__ inline float shuffle_xor(float x, int mask) {
    return __shfl_xor_sync(0xffffffffu, x, mask);
}

__device__ inline u32 shuffle_xor(u32 x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

__device__ inline float shuffle_up(float x, int by) { return __shfl_up_sync(0xffffffffu, x, by); }

__device__ inline float shuffle(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

__device__ inline int shuffle(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

__device__ inline int first_lane(int x) { return shuffle(x, 0); }

__device__ inline bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }

__device__ inline void sync_warp() { __syncwarp(); }

/// All warps of the block, each at whichever of these it is.
__device__ inline void sync_block() { asm volatile("bar.sync 0;" ::: "memory"); }

/// Adds 1, before which all this thread has written can be seen by whoever reads the sum.
__device__ inline void release_one(int* place) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(place) : "memory");
}

__device__ inline int acquire(const int* place) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(place) : "memory");
    return value;
}

__device__ inline int claim(int* counter) { return atomicAdd(counter, 1); }

/// From the level of memory that all processors share.
__device__ inline float load_shared_by_all(const float* place) { return __ldcg(place); }

__device__ inline void barrier_init(u64* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address_of(barrier)), "r"(arrivals)
                 : "memory");
}

/// After barrier_init; then the block waits for each other.
__device__ inline void barriers_made() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Between what a thread wrote into shared memory and copies that overwrite it; then the block
/// waits.
__device__ inline void before_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address_of(barrier)) : "memory");
}

/// Has the barrier wait for so many bytes of copies, besides arrivals.
__device__ inline void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile(
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(address_of(barrier)),
        "r"(bytes)
        : "memory");
}

__device__ inline void barrier_wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@done bra.uni over;\nbra.uni again;\nover:\n}" ::"r"(address_of(barrier)),
        "r"(parity)
        : "memory");
}

/// Whether barrier_wait would return at once.
__device__ inline bool barrier_ready(u64* barrier, u32 parity) {
    u32 ready;
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}"
        : "=r"(ready)
        : "r"(address_of(barrier)), "r"(parity)
        : "memory");
    return ready != 0;
}

/// x, of which nothing is computed before: what a loop needs anew costs less than keeping it in
/// memory.
__device__ inline int fresh(int x) {
    int made;
    asm volatile("mov.u32 %0, %1;" : "=r"(made) : "r"(x));
    return made;
}

/// A while that costs others nothing.
__device__ inline void pause() { __nanosleep(64); }

/// 16 bytes into shared memory, by the time of copies_done.
__device__ inline void copy_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address_of(shared)), "l"(global)
                 : "memory");
}

__device__ inline void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// What this thread has begun to copy since the last of these is one group.
__device__ inline void copies_grouped() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Until no more than so many groups are under way, the latest.
template <int MOST>
__device__ inline void copies_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(MOST) : "memory");
}

/// Between what a thread has copied into shared memory and products of operands there; then those
/// who multiply are told.
__device__ inline void before_products() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// A warpgroup's registers a thread: fewer than the launch gave, or more, once others have given
/// theirs.
template <int COUNT>
__device__ inline void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ inline void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/// Begins to write so many bytes, a multiple of 16, that before_copies has shown.
__device__ inline void copy_out(void* global, const void* shared, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
                 "r"(address_of(shared)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// Until what this thread has had written need no longer be kept.
__device__ inline void copied_out() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/// Until it has been written.
__device__ inline void written_out() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/// A tile (tiles.cuh) as a right operand: half of its descriptor; 16 bytes further is 1 more.
__device__ inline u32 operand(const void* shared) { return (address_of(shared) & 0x3ffff) >> 4; }

/// The other half: 128-byte swizzle, eight rows of 128 bytes 1 KiB apart.
constexpr u32 OPERAND_ROWS = 1024 >> 4 | 1u << 30;

/// Before products of a warpgroup whose operands and sums have been in use.
__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

/// After the last of them; until products_end, nothing may touch their sums.
__device__ inline void products_issued() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

__device__ inline void products_end() {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

/// Until only the products issued last are under way.
__device__ inline void products_end_but_last() {
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}

#define SUM4(c, n) "+f"((c)[n][0]), "+f"((c)[n][1]), "+f"((c)[n][2]), "+f"((c)[n][3])

/// Has these computed before what follows, however little it needs them.
template <int N>
__device__ inline void settle(float (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) asm volatile("" : SUM4(c, n));
}

template <int N>
__device__ inline void settle(uint4 (&a)[N]) {
#pragma unroll
    for (int n = 0; n < N; n++)
        asm volatile("" : "+r"(a[n].x), "+r"(a[n].y), "+r"(a[n].z), "+r"(a[n].w));
}

/// c (+)= a b [64, 64] of a warpgroup. b: 16 columns, from 16 `step` on, of a tile's 64 rows;
/// transposed.
template <bool ADDS>
__device__ inline void warpgroup_mma_64(float (&c)[8][4], const uint4& a, u32 tile, int step) {
    const u32 low = tile + (step / 4 * 8192 + step % 4 * 32) / 16;
    asm volatile(
        "{\n.reg .pred adds;\n.reg .b64 b;\nsetp.ne.b32 adds, %38, 0;\nmov.b64 b, {%36, %37};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%"
        "24,%25,"
        "%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, b, adds, 1, 1, 0;\n}"
        : SUM4(c, 0), SUM4(c, 1), SUM4(c, 2), SUM4(c, 3), SUM4(c, 4), SUM4(c, 5), SUM4(c, 6),
          SUM4(c, 7)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(low), "r"(OPERAND_ROWS), "n"(ADDS));
}

/// The same of rows of a tile in shared memory. a: 64 rows, of which it takes the same 16 columns.
template <bool ADDS>
__device__ inline void warpgroup_mma_64(float (&c)[8][4], u32 rows, u32 tile, int step) {
    const u32 inside = (step / 4 * 8192 + step % 4 * 32) / 16;
    asm volatile(
        "{\n.reg .pred adds;\n.reg .b64 a, b;\nsetp.ne.b32 adds, %35, 0;\n"
        "mov.b64 a, {%32, %34};\nmov.b64 b, {%33, %34};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
        "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
        "}, a, b, adds, 1, 1, 0, 0;\n}"
        : SUM4(c, 0), SUM4(c, 1), SUM4(c, 2), SUM4(c, 3), SUM4(c, 4), SUM4(c, 5), SUM4(c, 6),
          SUM4(c, 7)
        : "r"(rows + inside), "r"(tile + inside), "r"(OPERAND_ROWS), "n"(ADDS));
}

/// c += a b [64, 128] of a warpgroup. b: 16 rows of a tile, from 16 `step` on.
__device__ inline void warpgroup_mma_128(float (&c)[16][4], const uint4& a, u32 tile, int step) {
    // its halves of 64 columns lie 8 KiB apart
    const u32 low = tile + step * (2048 / 16) + (8192u >> 4 << 16);
    asm volatile(
        "{\n.reg .b64 b;\nmov.b64 b, {%68, %69};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%"
        "24,%25,"
        "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%"
        "48,%49,"
        "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, b, 1, 1, 1, "
        "1;\n}"
        : SUM4(c, 0), SUM4(c, 1), SUM4(c, 2), SUM4(c, 3), SUM4(c, 4), SUM4(c, 5), SUM4(c, 6),
          SUM4(c, 7), SUM4(c, 8), SUM4(c, 9), SUM4(c, 10), SUM4(c, 11), SUM4(c, 12), SUM4(c, 13),
          SUM4(c, 14), SUM4(c, 15)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(low), "r"(OPERAND_ROWS));
}

/// The same of 256 columns.
__device__ inline void warpgroup_mma_256(float (&c)[32][4], const uint4& a, u32 tile, int step) {
    const u32 low = tile + step * (2048 / 16) + (8192u >> 4 << 16);
    asm volatile(
        "{\n.reg .b64 b;\nmov.b64 b, {%132, %133};\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
        "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,"
        "%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,"
        "%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
        "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,"
        "%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,"
        "%118,%119,"
        "%120,%121,%122,%123,%124,%125,%126,%127"
        "}, {%128,%129,%130,%131}, b, 1, 1, 1, 1;\n}"
        : SUM4(c, 0), SUM4(c, 1), SUM4(c, 2), SUM4(c, 3), SUM4(c, 4), SUM4(c, 5), SUM4(c, 6),
          SUM4(c, 7), SUM4(c, 8), SUM4(c, 9), SUM4(c, 10), SUM4(c, 11), SUM4(c, 12), SUM4(c, 13),
          SUM4(c, 14), SUM4(c, 15), SUM4(c, 16), SUM4(c, 17), SUM4(c, 18), SUM4(c, 19), SUM4(c, 20),
          SUM4(c, 21), SUM4(c, 22), SUM4(c, 23), SUM4(c, 24), SUM4(c, 25), SUM4(c, 26), SUM4(c, 27),
          SUM4(c, 28), SUM4(c, 29), SUM4(c, 30), SUM4(c, 31)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(low), "r"(OPERAND_ROWS));
}

/// Begins a copy of so many bytes, a multiple of 16, that the barrier waits for.
__device__ inline void copy_into(void* shared, const void* global, u32 bytes, u64* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(address_of(shared)),
        "l"(global), "r"(bytes), "r"(address_of(barrier))
        : "memory");
}
#endif

__device__ inline float low_of(u32 two) { return as_float(two << 16); }
__device__ inline float high_of(u32 two) { return as_float(two & 0xffff0000u); }

/// Two bfloat16 times two numbers, rounded.
__device__ inline u32 scaled(u32 two, float low, float high) {
    return pack(low_of(two) * low, high_of(two) * high);
}
