// Gated fork attention for one model's heads: KV_HEADS, GROUP (query heads of each), WIDTH, WINDOW
// (0: none), and TILE, queries of a tile.
#include "attend.cuh"

static_assert(sizeof(Attending) <= ATTEND_BYTES, "attention_hopper.py knows this size");
