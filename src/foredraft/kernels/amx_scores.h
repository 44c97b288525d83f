// Products of queries and keys with AMX (see amx_attention.h).
//
// A product is summed in the order of the tile instruction, whether a tile holds one query or sixteen.

#pragma once

#include "amx_blocks.h"

namespace {

// Products of one query with sixteen keys.
void multiply_one(const uint16_t* query, const uint16_t* keys, int64_t dim, float* products) {
    _tile_zero(7);
    for (int64_t i = 0; i < dim; i += 32) {
        _tile_loadd(5, keys + i, dim * sizeof *keys);
        _tile_loadd(6, query + i, sizeof(Unit));
        _tile_dpbf16ps(7, 5, 6);
    }
    _tile_stored(7, products, sizeof *products);
}

// Products of one query with all keys that it sees.
void multiply_alone(const AttentionCall& call, const QueryBlock& block, const Query& query) {
    for (int64_t j = query.first_block(); j <= query.position; j += 16) {
        const bool is_in_order = call.paths == nullptr || j + 16 <= call.start;
        const uint16_t* keys = is_in_order ? block.keys + j * call.key_dim : collect_keys(call, block, query, j);
        multiply_one(query.from, keys, call.key_dim, query.scores + j);
    }
    finish_stores();
}

constexpr int MOST_KEPT_STEPS = 4;           // of queries, which stay in tiles

// Adds a step of a tile of queries times sixteen or 32 keys to tiles 0 and 1. queries: of this step. keys: the first sixteen's
template <int STEP, int TILES>
void multiply_step(const Unit* keys, int64_t next) {
    _tile_loadd(6, keys, TILE_BYTES);
    if constexpr (STEP == 0) _tile_dpbf16ps(0, 2, 6);
    if constexpr (STEP == 1) _tile_dpbf16ps(0, 3, 6);
    if constexpr (STEP == 2) _tile_dpbf16ps(0, 4, 6);
    if constexpr (STEP == 3) _tile_dpbf16ps(0, 5, 6);
    if constexpr (TILES == 1) return;
    _tile_loadd(7, keys + next, TILE_BYTES);
    if constexpr (STEP == 0) _tile_dpbf16ps(1, 2, 7);
    if constexpr (STEP == 1) _tile_dpbf16ps(1, 3, 7);
    if constexpr (STEP == 2) _tile_dpbf16ps(1, 4, 7);
    if constexpr (STEP == 3) _tile_dpbf16ps(1, 5, 7);
}

// A tile of queries: [tile_rows, steps, PARTS]. Up to MOST_KEPT_STEPS are in tiles 2 to 5.
struct TileOfQueries {
    int64_t steps;
    const Unit* queries;
    int64_t stride() const { return steps * PARTS * sizeof(Unit); }
    bool are_kept() const { return steps <= MOST_KEPT_STEPS; }

    void keep() const {
        if (!are_kept()) return;
        _tile_loadd(2, queries, stride());
        if (steps > 1) _tile_loadd(3, queries + PARTS, stride());
        if (steps > 2) _tile_loadd(4, queries + 2 * PARTS, stride());
        if (steps > 3) _tile_loadd(5, queries + 3 * PARTS, stride());
    }

    // Products with 16 TILES keys. keys: [TILES, steps, PARTS, 16]. between: numbers from one query's products to the next one's
    template <int TILES>
    void multiply(const Unit* keys, float* to, int64_t between) const {
        const int64_t step = PARTS * 16, next = steps * step;
        _tile_zero(0);
        _tile_zero(1);
        if (are_kept()) {
            multiply_step<0, TILES>(keys, next);
            if (steps > 1) multiply_step<1, TILES>(keys + step, next);
            if (steps > 2) multiply_step<2, TILES>(keys + 2 * step, next);
            if (steps > 3) multiply_step<3, TILES>(keys + 3 * step, next);
        } else {
            for (int64_t i = 0; i < steps; i++) {
                _tile_loadd(2, queries + i * PARTS, stride());
                multiply_step<0, TILES>(keys + i * step, next);
            }
        }
        _tile_stored(0, to, between * sizeof *to);
        if constexpr (TILES > 1) _tile_stored(1, to + 16, between * sizeof *to);
    }
};

void lay_out_queries(const TiledBlock& b) {
    const int64_t units = num_steps(b.call.key_dim) * PARTS;
    for (int64_t i = 0; i < b.block.count; i++) unpack_query(b.block.queries[i].from, b.call.key_dim, b.queries + i * units);
}

// Where the keys end whose slots are the same for all queries, in whole tiles.
int64_t end_of_shared_keys(const TiledBlock& b) {
    return b.call.paths == nullptr ? INT64_MAX : num_in_order(b.call, b.block.num_keys) / 16 * 16;
}

void lay_out_keys(const TiledBlock& b, const Positions& chunk) {
    const int64_t units = num_steps(b.call.key_dim) * PARTS * 16, end = std::min(chunk.end, end_of_shared_keys(b));
    for (int64_t j = chunk.first; j < end; j += 16)
        unpack_sixteen_keys(b.call, b.block, j, b.keys + (j - chunk.first) / 16 * units);
}

// Products of the queries of one row, `query` .. end - 1, with the keys of the row's path at `span`. The other queries of the tile are
// multiplied too, and their products discarded.
void multiply_path(const TiledBlock& b, const TileOfQueries& tile, int64_t query, int64_t end, const Positions& span, int64_t chunk) {
    const Query& row = b.block.queries[query];
    const int64_t first_query = query / b.tile_rows * b.tile_rows;
    alignas(ALIGN) float products[TILE_ROWS][16];
    for (int64_t j = std::max(span.first, row.first_block()); j < span.end && j <= row.position; j += 16) {
        const uint16_t* keys[16];
        for (int64_t i = 0; i < 16; i++)
            keys[i] = b.block.keys + slot_of(b.call, row, std::min(j + i, row.position)) * b.call.key_dim;
        unpack_keys(keys, b.call.key_dim, b.path_keys);
        finish_stores();
        tile.multiply<1>(b.path_keys, products[0], 16);
        finish_stores();
        for (int64_t i = query; i < end; i++) storeu_ps(b.product(i, j, chunk), load_ps(products[i - first_query]));
    }
}

// Products of a tile of queries with the keys at the positions `seen` of a chunk.
void multiply_chunk(const TiledBlock& b, int64_t tile, const Positions& seen, int64_t chunk) {
    const int64_t steps = num_steps(b.call.key_dim), units = steps * PARTS, shared = std::clamp(end_of_shared_keys(b), seen.first, seen.end);
    const TileOfQueries queries = {steps, b.queries + b.first_query(tile) * units};
    const int64_t between = b.product_stride();
    float* to = b.product(b.first_query(tile), seen.first, chunk);
    finish_stores();
    queries.keep();
    int64_t j = seen.first;
    for (; j + 32 <= shared; j += 32, to += 32) queries.multiply<2>(b.keys + (j - chunk) * units, to, between);
    if (j < shared) queries.multiply<1>(b.keys + (j - chunk) * units, to, between);
    finish_stores();
    for (int64_t i = b.first_query(tile), end; shared < seen.end && i < b.end_of_tile(tile); i = end) {
        end = b.end_of_row(i);
        multiply_path(b, queries, i, end, {shared, seen.end}, chunk);
    }
}

}  // namespace
