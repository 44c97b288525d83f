// A block of queries, whose attention is computed with AMX (see amx_attention.h).

#pragma once

#include "amx_tiles.h"
#include "queries.h"

namespace {

constexpr int64_t KEYS = 32;                 // positions that are weighted together
constexpr int64_t CHUNK = 8 * KEYS;          // positions that are read at a time
constexpr int64_t TILED_QUERIES = TILE_ROWS;
constexpr int64_t COLUMNS = 16;              // of a tile of sums
constexpr int64_t VALUE_TILE = TILE_ROWS * TILE_BYTES / 2;  // numbers of a tile of values

// A range of positions.
struct Positions {
    int64_t first, end;
    bool is_empty() const { return first >= end; }
};

// The queries and what is computed for them. Rows fill whole tiles; those of the last tile may belong to no query.
struct TiledBlock {
    const AttentionCall& call;
    const QueryBlock& block;
    int64_t tile_rows, num_rows;
    Unit *queries, *keys, *path_keys;        // [num_rows, steps, PARTS], [CHUNK / 16, steps, PARTS, 16], [steps, PARTS, 16] of many queries
    uint16_t* values;                        // [CHUNK / KEYS, value_dim / COLUMNS, pairs of positions, COLUMNS, 2]
    float* products;                         // [TILE_ROWS, CHUNK] of a tile of queries with the keys of a chunk, if they are not kept
    uint16_t *leading, *rest;                // [TILE_ROWS, CHUNK] the parts of their weights
    float* sums;                             // [num_rows, value_dim]
    bool is_finite[CHUNK / KEYS];            // whether all values of a block are finite

    bool has_many() const { return block.count >= WORTH_TILES; }
    bool keeps_products() const { return block.count <= TILED_QUERIES; }
    // The place of a query's product with the key at position j of a chunk, and how far it is to the next query's.
    float* product(int64_t query, int64_t j, int64_t chunk) const {
        return keeps_products() ? block.queries[query].scores + j : products + query % tile_rows * CHUNK + j - chunk;
    }
    int64_t product_stride() const { return keeps_products() ? block.queries[1].scores - block.queries[0].scores : CHUNK; }
    int64_t num_tiles() const { return num_rows / tile_rows; }
    int64_t first_query(int64_t tile) const { return tile * tile_rows; }
    int64_t end_of_tile(int64_t tile) const { return std::min((tile + 1) * tile_rows, block.count); }
    // One past the last query of the same row and the same tile: these see the same keys.
    int64_t end_of_row(int64_t query) const {
        int64_t end = query + 1;
        while (end < end_of_tile(query / tile_rows) && block.queries[end].row == block.queries[query].row) end++;
        return end;
    }
    // The positions of a chunk that the queries of a tile see, in whole blocks.
    Positions seen_by(int64_t tile, const Positions& chunk) const {
        Positions seen = {INT64_MAX, 0};
        for (int64_t i = first_query(tile); i < end_of_tile(tile); i++) {
            seen.first = std::min(seen.first, block.queries[i].earliest);
            seen.end = std::max(seen.end, block.queries[i].position + 1);
        }
        return {std::max(chunk.first, seen.first / KEYS * KEYS), std::min(chunk.end, round_up(seen.end, KEYS))};
    }
};

// Tile 5 holds keys, 6 one query, and 7 its products with the keys.
void shape_for_one_query() {
    TileShapes shapes;
    for (int tile : {5, 6, 7}) shapes.set(tile, TILE_ROWS);
    shapes.bytes[6] = shapes.bytes[7] = sizeof(Unit);
    shapes.load();
}

// Tiles 0 to 5 hold queries, their weights and sums, 6 and 7 keys or values.
void shape_for_queries(int64_t tile_rows) {
    TileShapes shapes;
    for (int tile = 0; tile < 6; tile++) shapes.set(tile, tile_rows);
    for (int tile : {6, 7}) shapes.set(tile, TILE_ROWS);
    shapes.load();
}

}  // namespace
