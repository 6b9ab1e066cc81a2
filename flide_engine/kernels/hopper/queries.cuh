// What a block of `attend` has in shared memory, and what it is given.
//
// Queries, keys and values lie as panels [64, 64] of 8 KiB, 64 columns each, in the 128-byte
// swizzle of products.
#pragma once
#include "primitives.cuh"

constexpr int LANES = 32;
constexpr int KEYS = 64;                                    // of a step
constexpr int BLOCK = GROUP <= 1 ? 1 : GROUP <= 2 ? 2 : 4;  // rows of a product for a query
constexpr int GROUPS = (TILE * BLOCK + 63) / 64;            // warpgroups that multiply, of 64 rows
constexpr int ROWS = GROUPS * 64;
constexpr int FEEDERS = 4;  // warps that copy
constexpr int THREADS = GROUPS * 128 + FEEDERS * LANES;
constexpr int OPERAND = KEYS * WIDTH;
constexpr int SLOTS = (224 * 1024 - ROWS * WIDTH * 2) / (OPERAND * 2);
constexpr int EIGHTS = WIDTH / 8;
constexpr int AT_ONCE = LANES / EIGHTS;  // rows that a warp copies at once
constexpr int ROW = KV_HEADS * WIDTH;    // elements from one row's keys to the next one's
constexpr float LOG2_E = 1.4426950408889634f;

static_assert(GROUP <= 4 && TILE <= LANES && GROUPS <= 2, "a product has no more than 128 rows");
static_assert(WIDTH == 128 || WIDTH == 256, "a warp copies whole rows");

/// 64 keys. node: whose rows see them, or ANY. at: chain position of the first. masked: whether
/// some query may not see all of them. last: of the tile.
struct Step {
    int node, at, masked, last;
};
constexpr int ANY = -3, NOBODY = -2;

/// A query of a tile: its number, or -1; node, or NOBODY; position in its chain.
struct Asked {
    int query, node, time;
};

/// Shared memory of a block. tiles: keys, values, keys, ... in turn; full, empty, steps: of each (a
/// step is with its keys). asked: of this tile and the next, in turn.
struct Attending {
    uint4 q[GROUPS][OPERAND / 8], tiles[SLOTS][OPERAND / 8];
    u64 full[SLOTS], empty[SLOTS], asked_over;
    Step steps[SLOTS];
    Asked asked[2][TILE];
};

/// Queries [R, KV_HEADS * GROUP, WIDTH], rows of the stream, pages [64, KV_HEADS, WIDTH]; elements
/// from one page to the next.
struct Sources {
    const u16 *q, *k, *v, *keys, *values;
    i64 page;
};

/// Work lists as `layout.tasks` writes them, and a plan's own; queries, nodes, ends, pages: of a
/// tile. numbers: of pages. rows: nullptr: queries are rows. count: of tiles.
struct Lists {
    const int *queries, *nodes, *ends, *pages;
    const int *numbers, *chain_rows, *starts, *cu_seqlens, *row_nodes, *positions, *rows, *count;
};

/// Eight columns of a tile.
__device__ inline uint4* at_eight(uint4* tile, int row, int eight) {
    return tile + eight / 8 * (KEYS * 8) + row * 8 + ((eight ^ row) & 7);
}
