// Attention with AMX: scores and weighted sums of values, a tile at a time (see attention.h).
//
// A score is summed in the order of the tile instruction, whether a tile holds one query or sixteen. Values are weighted in blocks of
// 32 positions, which begin at multiples of 32 for every query. Each weight is split into two bfloat16 numbers: its leading bits and the
// rest. A position that a query does not see adds an exact zero.

#pragma once

#include <vector>

#include "amx.h"
#include "queries.h"

namespace {

constexpr int64_t KEYS = 32;                 // positions that are weighted together
constexpr int64_t CHUNK = 8 * KEYS;          // positions whose values are rearranged at a time
constexpr int64_t COLUMNS = 16;               // of a tile of sums
constexpr int64_t VALUE_TILE = TILE_ROWS * TILE_BYTES / 2;  // numbers of a tile of values

bool attends_by_tiles(const AttentionCall& call) { return call.key_dim % 32 == 0 && call.value_dim % COLUMNS == 0; }

// What a block of queries needs in addition to scores. Rows fill whole tiles; those of the last tile may belong to no query.
struct TiledBlock {
    const AttentionCall& call;
    const QueryBlock& block;
    int64_t tile_rows, num_rows;
    uint16_t *leading, *rest;                 // [num_rows, CHUNK] the parts of the weights
    uint16_t* values;                         // [CHUNK / KEYS, value_dim / COLUMNS, pairs of positions, COLUMNS, 2]
    float* sums;                              // [num_rows, value_dim]
    bool is_finite[CHUNK / KEYS];            // whether all values of a block are finite

    int64_t num_tiles() const { return num_rows / tile_rows; }
    int64_t last_query(int64_t tile) const { return std::min((tile + 1) * tile_rows, block.count) - 1; }
    // One past the last query of the same row and the same tile: these see the same keys.
    int64_t end_of_row(int64_t query) const {
        int64_t end = query + 1;
        while (end <= last_query(query / tile_rows) && block.queries[end].row == block.queries[query].row) end++;
        return end;
    }
};

// Tiles 0 to 3 hold sums, 4 queries or their weights, 5 keys or values. For one query, 6 holds it, and 7 its products with 16 keys.
void shape_tiles(int64_t tile_rows) {
    TileShapes shapes;
    for (int tile = 0; tile < 5; tile++) shapes.set(tile, (int)tile_rows);
    for (int tile = 5; tile < 8; tile++) shapes.set(tile, TILE_ROWS);
    shapes.bytes[6] = shapes.bytes[7] = sizeof(Unit);
    shapes.load();
}

// ------------------------------------------------------------------------------------------------------------- scores

// Products of one query with sixteen keys.
void multiply_one(const uint16_t* query, const uint16_t* keys, int64_t dim, float* scores) {
    _tile_zero(7);
    for (int64_t i = 0; i < dim; i += 32) {
        _tile_loadd(5, keys + i, dim * sizeof *keys);
        _tile_loadd(6, query + i, sizeof(Unit));
        _tile_dpbf16ps(7, 5, 6);
    }
    _tile_stored(7, scores, sizeof *scores);
}

// Scores of one query with its keys, from the sixteen that begin at position `first` on.
void score_one(const AttentionCall& call, const QueryBlock& block, const Query& query, int64_t first) {
    for (int64_t j = std::max(first, query.first_block()); j <= query.position; j += 16) {
        const bool is_in_order = call.paths == nullptr || j + 16 <= call.start;
        const uint16_t* keys = is_in_order ? block.keys + j * call.key_dim : collect_keys(call, block, query, j);
        multiply_one(query.from, keys, call.key_dim, query.scores + j);
    }
}

// Many queries and sixteen keys, unpacked. queries: [num_rows, steps * PARTS], keys: [steps, PARTS, 16]
struct Unpacked {
    int64_t steps, stride;
    Unit *queries, *keys;
};

// Products of a tile of queries with sixteen keys. between: bytes from one query's products to the next one's.
void multiply_tile(const Unpacked& from, int64_t first_query, float* products, int64_t between) {
    finish_stores();
    _tile_zero(0);
    for (int64_t step = 0; step < from.steps; step++) {
        _tile_loadd(4, from.queries + first_query * from.stride + step * PARTS, from.stride * sizeof(Unit));
        _tile_loadd(5, from.keys + step * PARTS * 16, TILE_BYTES);
        _tile_dpbf16ps(0, 4, 5);
    }
    _tile_stored(0, products, between);
}

// Scores of the queries of one row, `query` .. end - 1, with the keys of the row's path, from the sixteen at `first` on. The other
// queries of the tile are multiplied too, and their products discarded.
void score_path(const TiledBlock& b, const Unpacked& unpacked, int64_t query, int64_t end, int64_t first) {
    const Query& row = b.block.queries[query];
    const int64_t first_query = query / b.tile_rows * b.tile_rows;
    alignas(ALIGN) float products[TILE_ROWS][16];
    for (int64_t j = std::max(first, row.first_block()); j <= row.position; j += 16) {
        const uint16_t* keys[16];
        for (int64_t i = 0; i < 16; i++)
            keys[i] = b.block.keys + slot_of(b.call, row, std::min(j + i, row.position)) * b.call.key_dim;
        unpack_keys(keys, b.call.key_dim, unpacked.keys);
        multiply_tile(unpacked, first_query, products[0], sizeof products[0]);
        for (int64_t i = query; i < end; i++) storeu_ps(b.block.queries[i].scores + j, load_ps(products[i - first_query]));
    }
}

void score_many(const TiledBlock& b) {
    const AttentionCall& call = b.call;
    const QueryBlock& block = b.block;
    thread_local std::vector<Unit> memory;
    const int64_t steps = num_steps(call.key_dim), stride = steps * PARTS;
    memory.assign((b.num_rows + 16) * stride + ALIGN, 0);
    Unit* keys = (Unit*)round_up((int64_t)memory.data(), ALIGN);
    const Unpacked unpacked = {steps, stride, keys + 16 * stride, keys};
    for (int64_t i = 0; i < block.count; i++) unpack_query(block.queries[i].from, call.key_dim, unpacked.queries + i * stride);
    const int64_t in_order = call.paths == nullptr ? block.num_keys : num_in_order(call, block.num_keys) / 16 * 16;
    const int64_t between = (block.queries[1].scores - block.queries[0].scores) * sizeof(float);
    for (int64_t j = block.earliest / 16 * 16; j < in_order; j += 16) {
        unpack_sixteen_keys(call, block, j, keys);
        for (int64_t tile = 0; tile < b.num_tiles(); tile++) {
            const Query *first = block.queries + tile * b.tile_rows, *last = block.queries + b.last_query(tile);
            if (call.paths == nullptr && (j > last->position || j + 16 <= first->earliest)) continue;
            multiply_tile(unpacked, tile * b.tile_rows, first->scores + j, between);
        }
    }
    if (call.paths == nullptr) return;
    for (int64_t i = 0, end; i < block.count; i = end) {
        end = b.end_of_row(i);
        score_path(b, unpacked, i, end, in_order);
    }
}

void score_by_tiles(const TiledBlock& b) {
    if (b.block.count >= WORTH_TILES) return score_many(b);
    for (int64_t i = 0; i < b.block.count; i++) score_one(b.call, b.block, b.block.queries[i], 0);
}

// ------------------------------------------------------------------------------------------------------------- values

// Splits the weights of positions first .. end - 1, a multiple of 16 of them, into their two parts.
void split_weights(const TiledBlock& b, int64_t first, int64_t end) {
    for (int64_t i = 0; i < b.num_rows; i++) {
        const bool is_query = i < b.block.count;
        const Query& query = b.block.queries[is_query ? i : 0];
        for (int64_t j = first; j < end; j += 16) {
            const bool is_seen = is_query && j >= query.first_block() && j <= query.position;
            const F32x16 weight = is_seen ? loadu_ps(query.scores + j) : setzero_ps();
            uint16_t *leading = b.leading + i * CHUNK + j - first, *rest = b.rest + i * CHUNK + j - first;
            store_bf16(leading, lanes(16), weight);
            store_bf16(rest, lanes(16), sub_ps(weight, load_bf16(leading, lanes(16))));
        }
    }
}

// Rearranges the values of two positions as tiles read them, zeros for nullptr -> whether any is not finite
bool lay_out_pair(const uint16_t* even_values, const uint16_t* odd_values, int64_t width, uint16_t* to) {
    const I512 exponent = set1_epi32(0x7f807f80);
    const Mask16 has_even = even_values ? lanes(16) : 0, has_odd = odd_values ? lanes(16) : 0;
    const uint16_t *evens = has_even ? even_values : to, *odds = has_odd ? odd_values : to;  // a masked load from nullptr is slow
    __mmask32 are_not_finite = 0;
    for (int64_t i = 0; i < width; i += COLUMNS) {
        const I512 even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(has_even, evens + i));
        const I512 odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(has_odd, odds + i));
        const I512 both = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
        are_not_finite |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(both, exponent), exponent);
        _mm512_storeu_si512(to + i / COLUMNS * VALUE_TILE, both);
    }
    return are_not_finite != 0;
}

// Rearranges the values at positions first .. end - 1 as tiles read them. Later ones are 0, and so are those on paths.
void lay_out_values(TiledBlock& b, int64_t first, int64_t end) {
    const int64_t width = b.call.value_dim, in_order = num_in_order(b.call, b.block.num_keys);
    const auto values_at = [&](int64_t j) { return j < in_order ? b.block.values + j * width : nullptr; };
    for (int64_t at = first; at < end; at += KEYS) {
        uint16_t* to = b.values + (at - first) * width;
        bool is_finite = true;
        for (int64_t j = at; j < at + KEYS; j += 2, to += 2 * COLUMNS)
            is_finite &= !lay_out_pair(values_at(j), values_at(j + 1), width, to);
        b.is_finite[(at - first) / KEYS] = is_finite;
    }
}

// Adds the weighted values that a query sees in the block at `at`, in the order in which a tile would.
void weigh_one(const TiledBlock& b, int64_t row, int64_t first, int64_t at) {
    const Query& query = b.block.queries[row];
    const int64_t begin = std::max(at, query.earliest), end = std::min(at + KEYS, query.position + 1);
    for (int64_t column = 0; column < b.call.value_dim; column += COLUMNS) {
        F32x16 sum = loadu_ps(b.sums + row * b.call.value_dim + column);
        for (const uint16_t* part : {b.leading, b.rest}) {
            F32x16 sums[2] = {setzero_ps(), setzero_ps()};  // of even and of odd positions
            for (int64_t j = begin; j < end; j++) {
                const uint32_t weight = (uint32_t)part[row * CHUNK + j - first] << 16;
                const F32x16 value = load_bf16(b.block.values + slot_of(b.call, query, j) * b.call.value_dim + column, lanes(16));
                sums[j & 1] = fmadd_ps(_mm512_castsi512_ps(set1_epi32((int32_t)weight)), value, sums[j & 1]);
            }
            sum = add_ps(sum, add_ps(sums[0], sums[1]));
        }
        storeu_ps(b.sums + row * b.call.value_dim + column, sum);
    }
}

// The weights of a tile of queries for consecutive blocks of positions, in two parts, and the values there. stride: bytes from one
// query's weights to the next one's.
struct Weighed {
    const uint16_t *leading, *rest, *values;
    int64_t stride, num_blocks;
};

// Adds the weighted values to the tile's sums, for 64 columns or fewer.
template <int TILES>
void weigh_columns(const TiledBlock& b, int64_t tile, const Weighed& w, int64_t column) {
    const int64_t width = b.call.value_dim, stride = width * sizeof(float);
    float* sums = b.sums + tile * b.tile_rows * width + column;
    finish_stores();
    _tile_loadd(0, sums, stride);
    if constexpr (TILES > 1) _tile_loadd(1, sums + COLUMNS, stride);
    if constexpr (TILES > 2) _tile_loadd(2, sums + 2 * COLUMNS, stride);
    if constexpr (TILES > 3) _tile_loadd(3, sums + 3 * COLUMNS, stride);
    for (int64_t block = 0; block < w.num_blocks; block++) {
        const uint16_t* values = w.values + block * KEYS * width + column / COLUMNS * VALUE_TILE;
        for (const uint16_t* part : {w.leading, w.rest}) {
            _tile_loadd(4, part + block * KEYS, w.stride);
            _tile_loadd(5, values, TILE_BYTES);
            _tile_dpbf16ps(0, 4, 5);
            if constexpr (TILES > 1) {
                _tile_loadd(5, values + VALUE_TILE, TILE_BYTES);
                _tile_dpbf16ps(1, 4, 5);
            }
            if constexpr (TILES > 2) {
                _tile_loadd(5, values + 2 * VALUE_TILE, TILE_BYTES);
                _tile_dpbf16ps(2, 4, 5);
            }
            if constexpr (TILES > 3) {
                _tile_loadd(5, values + 3 * VALUE_TILE, TILE_BYTES);
                _tile_dpbf16ps(3, 4, 5);
            }
        }
    }
    _tile_stored(0, sums, stride);
    if constexpr (TILES > 1) _tile_stored(1, sums + COLUMNS, stride);
    if constexpr (TILES > 2) _tile_stored(2, sums + 2 * COLUMNS, stride);
    if constexpr (TILES > 3) _tile_stored(3, sums + 3 * COLUMNS, stride);
}

void weigh_tile(const TiledBlock& b, int64_t tile, const Weighed& w) {
    for (int64_t column = 0; column < b.call.value_dim; column += 4 * COLUMNS) {
        switch ((b.call.value_dim - column) / COLUMNS) {
            case 1: weigh_columns<1>(b, tile, w, column); break;
            case 2: weigh_columns<2>(b, tile, w, column); break;
            case 3: weigh_columns<3>(b, tile, w, column); break;
            default: weigh_columns<4>(b, tile, w, column);
        }
    }
}

// The blocks from `from` to `to` of the chunk at `first`, whose slots are the same for all queries of the tile.
Weighed in_order(const TiledBlock& b, int64_t tile, int64_t first, int64_t from, int64_t to) {
    const int64_t place = tile * b.tile_rows * CHUNK + from - first;
    return {b.leading + place, b.rest + place, b.values + (from - first) * b.call.value_dim, CHUNK * sizeof(uint16_t), (to - from) / KEYS};
}

// Adds the block at `at` of a row's path for the queries of the row, `query` .. end - 1. Other queries of the tile get weights of 0.
void weigh_path(const TiledBlock& b, int64_t query, int64_t end, int64_t first, int64_t at) {
    thread_local std::vector<uint16_t> memory;
    const Query& row = b.block.queries[query];
    const int64_t width = b.call.value_dim, tile = query / b.tile_rows;
    memory.resize(KEYS * width + 2 * TILE_ROWS * KEYS + ALIGN);
    uint16_t* values = (uint16_t*)round_up((int64_t)memory.data(), ALIGN);
    uint16_t* parts[] = {values + KEYS * width, values + KEYS * width + TILE_ROWS * KEYS};
    const auto values_at = [&](int64_t j) {
        return j >= row.earliest && j <= row.position ? b.block.values + slot_of(b.call, row, j) * width : nullptr;
    };
    bool is_finite = true;
    for (int64_t j = at; j < at + KEYS; j += 2)
        is_finite &= !lay_out_pair(values_at(j), values_at(j + 1), width, values + (j - at) * COLUMNS);
    if (!is_finite) {  // 0 times infinity is not 0
        for (int64_t i = query; i < end; i++) weigh_one(b, i, first, at);
        return;
    }
    std::fill_n(parts[0], 2 * TILE_ROWS * KEYS, 0);
    for (int64_t i = query; i < end; i++) {
        const int64_t from = i * CHUNK + at - first, to = (i - tile * b.tile_rows) * KEYS;
        std::copy_n(b.leading + from, KEYS, parts[0] + to);
        std::copy_n(b.rest + from, KEYS, parts[1] + to);
    }
    weigh_tile(b, tile, {parts[0], parts[1], values, KEYS * sizeof(uint16_t), 1});
}

// Whether a tile may weight the block at `at` at once: slots are the same for all its queries, and values are finite or seen by all.
bool is_shared(const TiledBlock& b, int64_t tile, int64_t first, int64_t at) {
    if (b.call.paths != nullptr && at + KEYS > b.call.start) return false;
    if (b.is_finite[(at - first) / KEYS]) return true;
    for (int64_t i = tile * b.tile_rows; i <= b.last_query(tile); i++)
        if (b.block.queries[i].earliest > at || b.block.queries[i].position < at + KEYS - 1) return false;
    return true;
}

// Adds a block that the queries of a tile cannot weight together.
void weigh_apart(const TiledBlock& b, int64_t tile, int64_t first, int64_t at) {
    for (int64_t i = tile * b.tile_rows, end; i <= b.last_query(tile); i = end) {
        end = b.call.paths == nullptr ? i + 1 : b.end_of_row(i);
        if (b.call.paths == nullptr) weigh_one(b, i, first, at);
        else weigh_path(b, i, end, first, at);
    }
}

// Adds the blocks of the chunk at `first` in order: runs of those that a tile can weight, and between them those that it cannot.
void weigh_chunk(const TiledBlock& b, int64_t tile, int64_t first, int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end;) {
        int64_t to = at;
        while (to < end && is_shared(b, tile, first, to)) to += KEYS;
        if (to > at) weigh_tile(b, tile, in_order(b, tile, first, at, to));
        if (to < end) weigh_apart(b, tile, first, to);
        at = to + KEYS;
    }
}

void weigh_by_tiles(TiledBlock& b) {
    const int64_t num_keys = round_up(b.block.num_keys, KEYS);
    std::fill_n(b.sums, b.num_rows * b.call.value_dim, 0.0f);
    for (int64_t first = b.block.earliest / KEYS * KEYS; first < num_keys; first += CHUNK) {
        const int64_t end = std::min(first + CHUNK, num_keys);
        split_weights(b, first, end);
        lay_out_values(b, first, end);
        for (int64_t tile = 0; tile < b.num_tiles(); tile++) {
            int64_t from = INT64_MAX, to = 0;  // the positions that the tile's queries see
            for (int64_t i = tile * b.tile_rows; i <= b.last_query(tile); i++) {
                from = std::min(from, b.block.queries[i].earliest);
                to = std::max(to, b.block.queries[i].position + 1);
            }
            from = std::max(first, from / KEYS * KEYS);
            weigh_chunk(b, tile, first, from, std::min(end, round_up(to, KEYS)));
        }
    }
}

void attend_by_tiles(const AttentionCall& call, const QueryBlock& block) {
    const int64_t tile_rows = std::min<int64_t>(block.count, TILE_ROWS), num_rows = round_up(block.count, tile_rows);
    thread_local std::vector<float> memory;
    memory.resize(num_rows * (call.value_dim + CHUNK) + CHUNK * call.value_dim / 2 + ALIGN);
    float* sums = (float*)round_up((int64_t)memory.data(), ALIGN);
    uint16_t *values = (uint16_t*)(sums + num_rows * call.value_dim), *leading = values + CHUNK * call.value_dim;
    TiledBlock tiled = {call, block, tile_rows, num_rows, leading, leading + num_rows * CHUNK, values, sums, {}};
    const WithoutDenormals without;
    shape_tiles(tile_rows);
    score_by_tiles(tiled);
    for (int64_t i = 0; i < block.count; i++) exponentiate(call, block.queries[i]);
    weigh_by_tiles(tiled);
    _tile_release();
    for (int64_t i = 0; i < block.count; i++)
        for (int64_t column = 0; column < call.value_dim; column += COLUMNS)
            store_output(call, block.queries[i], column, loadu_ps(sums + i * call.value_dim + column));
}

}  // namespace
