// Copies of `attend`: four warps bring queries, and keys and values of 64 positions at a time, as
// places for them become free; over the end of a tile into the next.
#pragma once
#include "queries.cuh"

constexpr int UNDER_WAY = 3;  // groups of copies, at most, before others are told of the first

/// A warp's way around the places.
struct Filling {
    Attending& own;
    int lane;
    int slot = 0, told = 0, open = 0;  // next place, next that others are told of, how many between
    u32 parity = 1;

    /// Others may take the place whose copies were begun first of those they do not know of.
    __device__ inline void tell() {
        before_products();
        sync_warp();
        if (lane == 0) barrier_arrive(&own.full[told]);
        if (++told == SLOTS) told = 0;
        open--;
    }

    __device__ inline void tell_all() {
        copies_but<0>();
#pragma unroll 1
        while (open > 0) tell();
    }

    /// Nobody waits for what this warp knows of while it waits.
    __device__ inline void wait(u64* barrier, u32 phase) {
        if (first_lane(barrier_ready(barrier, phase)) == 0) tell_all();
        barrier_wait(barrier, phase);
    }

    __device__ inline uint4* take() {
        wait(&own.empty[slot], parity);
        return own.tiles[slot];
    }

    __device__ inline void next() {
        copies_grouped();
        if (++open > UNDER_WAY) {
            copies_but<UNDER_WAY>();
            tell();
        }
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};

/// What a tile begins with, a number a lane: first and last node, stream row of the last query,
/// steps of the node's own that all see, first and number of pages; and the queries.
struct Head {
    int numbers, query;
};

__device__ inline Head head_of(const Lists& lists, int task, int tasks, int lane) {
    if (task >= tasks) return Head{0, 0};
    const int tile = task / KV_HEADS;
    const int* of = lane < 2 ? lists.nodes : lane < 4 ? lists.ends : lists.pages;
    return Head{lane < 6 ? of[2 * tile + lane % 2] : 0,
                lane < TILE ? lists.queries[tile * TILE + lane] : -1};
}

/// The queries' rows into their places, a query's heads side by side. Rows that do not exist are
/// those of the first query.
__device__ inline void copy_queries(Attending& own, const u16* q, int query, int kv, int warp,
                                    int lane) {
#pragma unroll 4
    for (int i = 0; i < ROWS / (FEEDERS * AT_ONCE); i++) {
        const int m = (i * FEEDERS + warp) * AT_ONCE + lane / EIGHTS;
        const int found = shuffle(query, m / BLOCK % LANES);
        const bool there = found >= 0 && m / BLOCK < TILE && m % BLOCK < GROUP;
        const i64 row = (there ? found : 0) * (KV_HEADS * GROUP) + kv * GROUP;
        const u16* from = q + (row + (there ? m % BLOCK : 0)) * WIDTH + lane % EIGHTS * 8;
        copy_16(at_eight(own.q[m / 64], m % 64, lane % EIGHTS), from);
    }
}

/// A lane's query.
__device__ inline Asked described(const Lists& lists, int query) {
    if (query < 0) return Asked{query, NOBODY, 0};
    const int row = lists.rows == nullptr ? query : lists.rows[query];
    return Asked{query, lists.row_nodes[row], lists.positions[row]};
}

/// A row of the tile for each of a warp's first 16 lanes.
__device__ inline int row_of(int warp, int lane) {
    return (lane / AT_ONCE * FEEDERS + warp) * AT_ONCE + lane % AT_ONCE;
}

/// 64 rows of keys or values. place: of the rows of `row_of`, how many rows behind `from`.
__device__ inline void copy_rows(uint4* tile, const u16* from, int place, int warp, int lane) {
    constexpr int APART = FEEDERS * AT_ONCE;  // rows from one to the next: 4 or 8
    uint4* at = at_eight(tile, warp * AT_ONCE + lane / EIGHTS, lane % EIGHTS);
    uint4* odd = at_eight(tile, warp * AT_ONCE + lane / EIGHTS + APART, lane % EIGHTS);
    from += lane % EIGHTS * 8;
#pragma unroll
    for (int i = 0; i < KEYS / APART; i++) {
        const i64 row = shuffle(place, i * AT_ONCE + lane / EIGHTS);
        copy_16((i % 2 == 0 ? at : odd) + i / 2 * (2 * APART * 8), from + row * ROW);
    }
}

/// Row of the stream at `index` of a node's own, negative: its ancestors'; past the end one that
/// all of the node see: no weight makes nothing of what is not finite.
__device__ inline int held_row(const Lists& lists, int node, int low, int high, int tail,
                               int index) {
    if (low + index >= high) return low;
    if (index >= 0) return low + index;
    return lists.chain_rows[node * 66 + 3 + tail + index];
}

/// All tiles of the block; one of its FEEDERS warps.
__device__ inline void feed(Attending& own, const Lists& lists, const Sources& from, int warp,
                            int lane) {
    Filling filling{own, lane};
    const int tasks = *lists.count * KV_HEADS, mine = row_of(warp, lane % 16);
    Head coming = head_of(lists, blockIdx.x, tasks, lane);
    u32 turn = 0;
    for (int task = blockIdx.x; task < tasks; task += gridDim.x, turn ^= 1) {
        const int query = coming.query, given = coming.numbers;
        const int first = shuffle(given, 0), last = shuffle(given, 1);
        const int bound = shuffle(given, 2) + 1, full = shuffle(given, 3);
        const int pages = shuffle(given, 4), pasts = shuffle(given, 5);
        coming = head_of(lists, task + gridDim.x, tasks, lane);  // nobody waits for it here
        const int head_at = task % KV_HEADS * WIDTH, tail = lists.starts[first] % KEYS;
        bool begins = true;
        for (int node = first, number = 0; node <= last; node++) {
            const int low = lists.cu_seqlens[node], end = lists.cu_seqlens[node + 1];
            const int high = end < bound ? end : bound;
            const int past = node == first ? pasts : 0;
            const int steps = (high - low + tail + KEYS - 1) / KEYS;
            for (int t = -past; t < steps; t++) {
                const bool open = t < 0 || (t < full && (t > 0 || tail == 0));
                i64 offset = head_at;
                int place = mine;
                if (t < 0) {
                    if ((t + past) % LANES == 0 && t + lane < 0)
                        number = lists.numbers[pages + past + t + lane];
                    offset += shuffle(number, (t + past) % LANES) * from.page;
                } else if (open) {
                    place += low - tail + t * KEYS;
                } else {
                    place = held_row(lists, node, low, high, tail, t * KEYS - tail + mine);
                }
#pragma unroll 1
                for (int kind = 0; kind < 2; kind++) {
                    uint4* tile = filling.take();
                    if (kind == 0 && warp == 0 && lane == 0) {
                        own.steps[filling.slot] =
                            Step{open ? ANY : node, (pasts + t) * KEYS, !open || WINDOW > 0,
                                 node == last && t + 1 == steps};
                    }
                    const u16* all = t < 0 ? (kind == 0 ? from.keys : from.values)
                                           : (kind == 0 ? from.k : from.v);
                    copy_rows(tile, all + offset, place, warp, lane);
                    if (begins) {
                        const Asked asked = described(lists, warp == 0 ? query : -1);
                        filling.wait(&own.asked_over, turn ^ 1);
                        copy_queries(own, from.q, query, task % KV_HEADS, warp, lane);
                        if (warp == 0 && lane < TILE) own.asked[turn][lane] = asked;
                        begins = false;
                    }
                    filling.next();
                }
            }
        }
        filling.tell_all();
    }
}
