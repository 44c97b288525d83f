// Weighted sums of values with AMX (see amx_attention.h).
//
// Values are weighted in blocks of 32 positions, which begin at multiples of 32 for every query. A pair, which a tile instruction adds
// first, is a position and the sixteenth after it. Each weight is split into two bfloat16 numbers: its leading bits and the rest. A
// position that a query does not see adds an exact zero.

#pragma once

#include <vector>

#include "amx_blocks.h"

namespace {

constexpr int64_t HALF = KEYS / 2;

// Where the weight of a position is among those of a chunk.
int64_t weight_place(int64_t j) { return j / KEYS * KEYS + j % HALF * 2 + j % KEYS / HALF; }

// Writes the two parts of the weights of a block. They are the leading bits without rounding, since the rest is exact; it is rounded.
INLINE void store_weights(F32x16 first_half, F32x16 second_half, uint16_t* leading, uint16_t* rest) {
    constexpr int FIRST_OR_BOTH_OTHERS = 0xf8;
    const I512 high = set1_epi32((int32_t)0xffff0000), half_a_step = set1_epi32(0x8000);
    const auto pairs = [&](I512 first, I512 second) __attribute__((always_inline)) {
        return _mm512_ternarylogic_epi32(_mm512_srli_epi32(first, 16), second, high, FIRST_OR_BOTH_OTHERS);
    };
    const auto rest_of = [&](F32x16 weight) __attribute__((always_inline)) {
        const F32x16 its_leading = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(weight), high));
        return add_epi32(_mm512_castps_si512(sub_ps(weight, its_leading)), half_a_step);
    };
    _mm512_storeu_si512(leading, pairs(_mm512_castps_si512(first_half), _mm512_castps_si512(second_half)));
    _mm512_storeu_si512(rest, pairs(rest_of(first_half), rest_of(second_half)));
}

// Rearranges the values of a pair of positions as tiles read them, zeros for nullptr -> whether any is not finite
bool lay_out_pair(const uint16_t* first_values, const uint16_t* second_values, int64_t width, uint16_t* to) {
    const I512 exponent = set1_epi32(0x7f807f80);
    const Mask16 has_first = first_values ? lanes(16) : 0, has_second = second_values ? lanes(16) : 0;
    const uint16_t *firsts = has_first ? first_values : to, *seconds = has_second ? second_values : to;  // a masked load from nullptr is slow
    __mmask32 are_not_finite = 0;
    for (int64_t i = 0; i < width; i += COLUMNS) {
        _mm_prefetch((const char*)(firsts + KEYS * width + i), _MM_HINT_T0);   // the next block: its rows are not read in order
        _mm_prefetch((const char*)(seconds + KEYS * width + i), _MM_HINT_T0);
        const I512 first = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(has_first, firsts + i));
        const I512 second = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(has_second, seconds + i));
        const I512 both = _mm512_or_si512(first, _mm512_slli_epi32(second, 16));
        are_not_finite |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(both, exponent), exponent);
        _mm512_storeu_si512(to + i / COLUMNS * VALUE_TILE, both);
    }
    return are_not_finite != 0;
}

// Rearranges the values of a chunk as tiles read them. Later ones are 0, and so are those on paths.
void lay_out_values(TiledBlock& b, const Positions& chunk) {
    const int64_t width = b.call.value_dim, in_order = num_in_order(b.call, b.block.num_keys);
    const auto values_at = [&](int64_t j) { return j < in_order ? b.block.values + j * width : nullptr; };
    for (int64_t at = chunk.first; at < chunk.end; at += KEYS) {
        uint16_t* to = b.values + (at - chunk.first) * width;
        bool is_finite = true;
        for (int64_t j = at; j < at + HALF; j++, to += 2 * COLUMNS)
            is_finite &= !lay_out_pair(values_at(j), values_at(j + HALF), width, to);
        b.is_finite[(at - chunk.first) / KEYS] = is_finite;
    }
}

// Adds the weighted values that a query sees in the block at `at`, in the order in which a tile would.
void weigh_one(const TiledBlock& b, int64_t row, int64_t first, int64_t at) {
    const Query& query = b.block.queries[row];
    const int64_t begin = std::max(at, query.earliest), end = std::min(at + KEYS, query.position + 1);
    for (int64_t column = 0; column < b.call.value_dim; column += COLUMNS) {
        F32x16 sum = loadu_ps(b.sums + row * b.call.value_dim + column);
        for (const uint16_t* part : {b.leading, b.rest}) {
            F32x16 sums[2] = {setzero_ps(), setzero_ps()};  // of the first and of the second positions of pairs
            for (int64_t j = begin; j < end; j++) {
                const uint32_t weight = (uint32_t)part[row % b.tile_rows * CHUNK + weight_place(j - first)] << 16;
                const F32x16 value = load_bf16(b.block.values + slot_of(b.call, query, j) * b.call.value_dim + column, lanes(16));
                F32x16& its_sum = sums[j % KEYS / HALF];
                its_sum = fmadd_ps(_mm512_castsi512_ps(set1_epi32((int32_t)weight)), value, its_sum);
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

// Adds both parts of the weights, in tiles 4 and 5, times the values of two tiles of columns to two sums. values: the first tile's
#define WEIGH_TWO(sums, next_sums, values) \
    _tile_loadd(6, values, TILE_BYTES); \
    _tile_dpbf16ps(sums, 4, 6); \
    _tile_loadd(7, values + VALUE_TILE, TILE_BYTES); \
    _tile_dpbf16ps(next_sums, 4, 7); \
    _tile_dpbf16ps(sums, 5, 6); \
    _tile_dpbf16ps(next_sums, 5, 7);

#define WEIGH_ONE(sums, values) \
    _tile_loadd(6, values, TILE_BYTES); \
    _tile_dpbf16ps(sums, 4, 6); \
    _tile_dpbf16ps(sums, 5, 6);

// Adds the weighted values to the tile's sums, for 64 columns or fewer.
template <int TILES>
void weigh_columns(const TiledBlock& b, int64_t tile, const Weighed& w, int64_t column) {
    const int64_t width = b.call.value_dim, stride = width * sizeof(float);
    float* sums = b.sums + b.first_query(tile) * width + column;
    finish_stores();
    _tile_loadd(0, sums, stride);
    if constexpr (TILES > 1) _tile_loadd(1, sums + COLUMNS, stride);
    if constexpr (TILES > 2) _tile_loadd(2, sums + 2 * COLUMNS, stride);
    if constexpr (TILES > 3) _tile_loadd(3, sums + 3 * COLUMNS, stride);
    const uint16_t* values = w.values + column / COLUMNS * VALUE_TILE;
    for (int64_t block = 0; block < w.num_blocks; block++, values += KEYS * width) {
        _tile_loadd(4, w.leading + block * KEYS, w.stride);
        _tile_loadd(5, w.rest + block * KEYS, w.stride);
        if constexpr (TILES == 1) { WEIGH_ONE(0, values) }
        if constexpr (TILES > 1) { WEIGH_TWO(0, 1, values) }
        if constexpr (TILES == 3) { WEIGH_ONE(2, values + 2 * VALUE_TILE) }
        if constexpr (TILES > 3) { WEIGH_TWO(2, 3, values + 2 * VALUE_TILE) }
    }
    _tile_stored(0, sums, stride);
    if constexpr (TILES > 1) _tile_stored(1, sums + COLUMNS, stride);
    if constexpr (TILES > 2) _tile_stored(2, sums + 2 * COLUMNS, stride);
    if constexpr (TILES > 3) _tile_stored(3, sums + 3 * COLUMNS, stride);
}

#undef WEIGH_ONE
#undef WEIGH_TWO

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
Weighed in_order(const TiledBlock& b, int64_t first, int64_t from, int64_t to) {
    const int64_t place = from - first;
    return {b.leading + place, b.rest + place, b.values + place * b.call.value_dim, CHUNK * sizeof(uint16_t), (to - from) / KEYS};
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
    for (int64_t j = at; j < at + HALF; j++)
        is_finite &= !lay_out_pair(values_at(j), values_at(j + HALF), width, values + 2 * (j - at) * COLUMNS);
    if (!is_finite) {  // 0 times infinity is not 0
        for (int64_t i = query; i < end; i++) weigh_one(b, i, first, at);
        return;
    }
    std::fill_n(parts[0], 2 * TILE_ROWS * KEYS, 0);
    for (int64_t i = query; i < end; i++) {
        const int64_t tile_row = i - b.first_query(tile), from = tile_row * CHUNK + at - first, to = tile_row * KEYS;
        std::copy_n(b.leading + from, KEYS, parts[0] + to);
        std::copy_n(b.rest + from, KEYS, parts[1] + to);
    }
    weigh_tile(b, tile, {parts[0], parts[1], values, KEYS * sizeof(uint16_t), 1});
}

// Whether a tile may weight the block at `at` at once: slots are the same for all its queries, and values are finite or seen by all.
bool is_shared(const TiledBlock& b, int64_t tile, int64_t first, int64_t at) {
    if (b.call.paths != nullptr && at + KEYS > b.call.start) return false;
    if (b.is_finite[(at - first) / KEYS]) return true;
    for (int64_t i = b.first_query(tile); i < b.end_of_tile(tile); i++)
        if (b.block.queries[i].earliest > at || b.block.queries[i].position < at + KEYS - 1) return false;
    return true;
}

// Adds a block that the queries of a tile cannot weight together.
void weigh_apart(const TiledBlock& b, int64_t tile, int64_t first, int64_t at) {
    for (int64_t i = b.first_query(tile), end; i < b.end_of_tile(tile); i = end) {
        end = b.call.paths == nullptr ? i + 1 : b.end_of_row(i);
        if (b.call.paths == nullptr) weigh_one(b, i, first, at);
        else weigh_path(b, i, end, first, at);
    }
}

// Adds the blocks that a tile sees of the chunk at `first`, in order: runs of those that it can weight, and between them those that it
// cannot.
void weigh_chunk(const TiledBlock& b, int64_t tile, const Positions& seen, int64_t first) {
    for (int64_t at = seen.first; at < seen.end;) {
        int64_t to = at;
        while (to < seen.end && is_shared(b, tile, first, to)) to += KEYS;
        if (to > at) weigh_tile(b, tile, in_order(b, first, at, to));
        if (to < seen.end) weigh_apart(b, tile, first, to);
        at = to + KEYS;
    }
}

}  // namespace
