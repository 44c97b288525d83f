// Attention of some rows over the keys and values of one sequence (arXiv:2305.13245).
//
// For each query, scores are computed and exponentiated, then values are added, all in order of position. Few queries read
// keys and values directly from the cache. For many queries, keys and values are converted once and multiplied by a tile of queries
// at a time: in the same order, so that a row's bits do not depend on the path.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "queries.h"
#include "team.h"
#ifdef __AMX_TILE__
#include "amx_attention.h"
#else
#include "no_tiles.h"
#endif

namespace {

constexpr int FEWEST_QUERIES = 8, MOST_QUERIES = 192;  // of a block; threads share the blocks
constexpr int MOST_SCORED = 96;                        // of a block whose scores are kept
constexpr int BLOCKS_PER_THREAD = 4;
constexpr int64_t SCORES_IN_CACHE = 1 << 18;          // of a block, unless it has the fewest queries
constexpr int64_t VALUES = 64;                        // values that are converted at a time

// ------------------------------------------------------------------------------------------------------------- scores

// Scores of one query with its keys, from the sixteen that begin at position `first` on.
void score_query(const AttentionCall& call, const QueryBlock& block, const Query& query, int64_t first) {
    for (int64_t j = std::max(first, query.first_block()); j <= query.position; j += 16) {
        const bool is_in_order = call.paths == nullptr || j + 16 <= call.start;
        const uint16_t* keys = is_in_order ? block.keys + j * call.key_dim : collect_keys(call, block, query, j);
        storeu_ps(query.scores + j, score_block(query.from, keys, call.key_dim));
    }
}

// Products of Q queries with the sixteen keys from position j on. units: [Q, steps, PARTS], keys: [steps, PARTS, 16]
template <int Q>
void score_tile(const Query* queries, int64_t j, int64_t steps, const Unit* units, const Unit* keys) {
    alignas(ALIGN) float waiting[4][Q][16];  // sums of 1, 2, 4 and 8 parts, to be added to sums of as many parts
    for (int part = 0; part < PARTS; part++) {
        F32x16 sums[Q];
#pragma GCC unroll 12
        for (int q = 0; q < Q; q++) sums[q] = setzero_ps();
        const Unit *query = units + PART_ORDER[part], *key = keys + PART_ORDER[part] * 16;
        for (int64_t t = 0; t < steps; t++, query += PARTS, key += PARTS * 16) {
#pragma GCC unroll 12
            for (int q = 0; q < Q; q++) sums[q] = score_step(sums[q], query + q * steps * PARTS, key);
        }
        int level = 0;
        for (; part >> level & 1; level++) {
#pragma GCC unroll 12
            for (int q = 0; q < Q; q++) sums[q] = add_ps(load_ps(waiting[level][q]), sums[q]);
        }
#pragma GCC unroll 12
        for (int q = 0; q < Q; q++) storeu_ps(part == PARTS - 1 ? queries[q].scores + j : waiting[level][q], sums[q]);
    }
}

template <int Q = TILE>
void any_score_tile(int count, const Query* queries, int64_t j, int64_t steps, const Unit* units, const Unit* keys) {
    if (count >= Q) return score_tile<Q>(queries, j, steps, units, keys);
    if constexpr (Q > 1) any_score_tile<Q - 1>(count, queries, j, steps, units, keys);
}

// units, keys: buffers for MOST_QUERIES queries and for sixteen keys
void score_queries(const AttentionCall& call, const QueryBlock& block, Unit* units, Unit* keys) {
    const int64_t steps = num_steps(call.key_dim), tiles = (block.count + TILE - 1) / TILE;
    for (int64_t i = 0; i < block.count; i++) unpack_query(block.queries[i].from, call.key_dim, units + i * steps * PARTS);
    const int64_t in_order = call.paths == nullptr ? block.num_keys : num_in_order(call, block.num_keys) / 16 * 16;
    for (int64_t j = block.earliest / 16 * 16; j < in_order; j += 16) {
        unpack_sixteen_keys(call, block, j, keys);
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t begin = block.count * tile / tiles, end = block.count * (tile + 1) / tiles;
            const bool is_sorted = call.paths == nullptr;
            if (is_sorted && (j > block.queries[end - 1].position || j + 16 <= block.queries[begin].earliest)) continue;
            any_score_tile((int)(end - begin), block.queries + begin, j, steps, units + begin * steps * PARTS, keys);
        }
    }
    if (call.paths == nullptr) return;
    for (int64_t i = 0; i < block.count; i++) score_query(call, block, block.queries[i], in_order);
}

// ------------------------------------------------------------------------------------------------------------- values

// The weighted sums of values for a few queries, 64 columns at a time, in order of keys.
template <int Q>
void weigh_values(const AttentionCall& call, const QueryBlock& block, const Query* queries) {
    int64_t first = queries[0].earliest;
    for (int q = 1; q < Q; q++) first = std::min(first, queries[q].earliest);
    const int64_t in_order = num_in_order(call, queries[Q - 1].position + 1);
    for (int64_t column = 0; column < call.value_dim; column += GROUP) {
        F32x16 sums[Q][4];
        Mask16 masks[4];
        for (int p = 0; p < 4; p++) {
            const int64_t left = call.value_dim - column - 16 * p;
            masks[p] = left > 0 ? lanes(left) : 0;
            for (int q = 0; q < Q; q++) sums[q][p] = setzero_ps();
        }
        for (int64_t j = first; j < in_order; j++) {
            F32x16 v[4];
            for (int p = 0; p < 4; p++) v[p] = load_bf16(block.values + j * call.value_dim + column + 16 * p, masks[p]);
            for (int q = 0; q < Q; q++) {
                // a weight of 0 is not enough: a later row's value may be NaN
                if (Q > 1 && (j < queries[q].earliest || j > queries[q].position)) continue;
                const F32x16 w = set1_ps(queries[q].scores[j]);
                for (int p = 0; p < 4; p++) sums[q][p] = fmadd_ps(w, v[p], sums[q][p]);
            }
        }
        for (int q = 0; q < Q && call.paths != nullptr; q++)
            for (int64_t j = std::max(in_order, queries[q].earliest); j <= queries[q].position; j++) {
                const uint16_t* value = block.values + slot_of(call, queries[q], j) * call.value_dim + column;
                const F32x16 w = set1_ps(queries[q].scores[j]);
                for (int p = 0; p < 4; p++) sums[q][p] = fmadd_ps(w, load_bf16(value + 16 * p, masks[p]), sums[q][p]);
            }
        for (int q = 0; q < Q; q++)
            for (int p = 0; p < 4 && masks[p]; p++) store_output(call, queries[q], column + 16 * p, sums[q][p]);
    }
}

template <int Q = QUERIES_AT_ONCE>
void weigh_any_values(int count, const AttentionCall& call, const QueryBlock& block, const Query* queries) {
    if (count >= Q) return weigh_values<Q>(call, block, queries);
    if constexpr (Q > 1) weigh_any_values<Q - 1>(count, call, block, queries);
}

// Adds the weighted values at positions first .. end - 1 to the sums of Q queries that see all of them. values: [end - first, width],
// sums: [Q, width]
template <int Q>
void value_tile(const Query* queries, int64_t first, int64_t end, const float* values, int64_t width, float* sums) {
    const float* weights[Q];
    for (int q = 0; q < Q; q++) weights[q] = queries[q].scores + first;
    for (int64_t column = 0; column < width; column += 16) {
        F32x16 s[Q];
#pragma GCC unroll 12
        for (int q = 0; q < Q; q++) s[q] = load_ps(sums + q * width + column);
        for (int64_t j = 0; j < end - first; j++) {
            const F32x16 v = load_ps(values + j * width + column);
#pragma GCC unroll 12
            for (int q = 0; q < Q; q++) s[q] = fmadd_ps(set1_ps(weights[q][j]), v, s[q]);
        }
#pragma GCC unroll 12
        for (int q = 0; q < Q; q++) store_ps(sums + q * width + column, s[q]);
    }
}

template <int Q = TILE>
void any_value_tile(int count, const Query* queries, int64_t first, int64_t end, const float* values, int64_t width, float* sums) {
    if (count >= Q) return value_tile<Q>(queries, first, end, values, width, sums);
    if constexpr (Q > 1) any_value_tile<Q - 1>(count, queries, first, end, values, width, sums);
}

// Adds to each query's sums the weighted values that it sees at positions first .. end - 1. Those seen by all are added as a tile.
void add_values(const Query* queries, int count, int64_t first, int64_t end, const float* values, int64_t width, float* sums) {
    int64_t last_earliest = queries[0].earliest, first_position = queries[0].position;
    for (int q = 1; q < count; q++) {
        last_earliest = std::max(last_earliest, queries[q].earliest);
        first_position = std::min(first_position, queries[q].position);
    }
    const int64_t seen_from = std::clamp(last_earliest, first, end);
    const int64_t seen_to = std::clamp(first_position + 1, seen_from, end);
    const auto add_seen = [&](int64_t from, int64_t to) {
        for (int q = 0; q < count; q++) {
            const int64_t begin = std::max(from, queries[q].earliest), last = std::min(to, queries[q].position + 1);
            if (begin < last) value_tile<1>(queries + q, begin, last, values + (begin - first) * width, width, sums + q * width);
        }
    };
    add_seen(first, seen_from);
    if (seen_from < seen_to) any_value_tile(count, queries, seen_from, seen_to, values + (seen_from - first) * width, width, sums);
    add_seen(seen_to, end);
}

// values, sums: buffers for VALUES and for MOST_QUERIES rows of `width` numbers
void weigh_values_of_many(const AttentionCall& call, const QueryBlock& block, int64_t width, float* values, float* sums) {
    std::fill_n(sums, block.count * width, 0.0f);
    const int64_t tiles = (block.count + TILE - 1) / TILE, in_order = num_in_order(call, block.num_keys);
    const auto convert = [&](int64_t slot, float* to) {
        for (int64_t i = 0; i < width; i += 16)
            store_ps(to + i, load_bf16(block.values + slot * call.value_dim + i, lanes(call.value_dim - i)));
    };
    for (int64_t first = block.earliest; first < in_order; first += VALUES) {
        const int64_t end = std::min(first + VALUES, in_order);
        for (int64_t j = first; j < end; j++) convert(j, values + (j - first) * width);
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t begin = block.count * tile / tiles, count = block.count * (tile + 1) / tiles - begin;
            add_values(block.queries + begin, (int)count, first, end, values, width, sums + begin * width);
        }
    }
    for (int64_t i = 0; i < block.count && call.paths != nullptr; i++) {
        const Query& query = block.queries[i];
        for (int64_t j = std::max(in_order, query.earliest); j <= query.position; j++) {
            convert(slot_of(call, query, j), values);
            value_tile<1>(&query, j, j + 1, values, width, sums + i * width);
        }
    }
    for (int64_t i = 0; i < block.count; i++)
        for (int64_t column = 0; column < call.value_dim; column += 16)
            store_output(call, block.queries[i], column, load_ps(sums + i * width + column));
}

// ------------------------------------------------------------------------------------------------------------- blocks

void attend_few(const AttentionCall& call, const QueryBlock& block) {
    for (int64_t i = 0; i < block.count; i++) {
        score_query(call, block, block.queries[i], 0);
        exponentiate(call, block.queries[i]);
    }
    for (int64_t i = 0; i < block.count; i += QUERIES_AT_ONCE)
        weigh_any_values((int)std::min<int64_t>(block.count - i, QUERIES_AT_ONCE), call, block, block.queries + i);
}

void attend_many(const AttentionCall& call, const QueryBlock& block) {
    const int64_t units = num_steps(call.key_dim) * PARTS, width = round_up(call.value_dim, 16);
    thread_local std::vector<float> memory;
    memory.resize((block.count + 16) * units + (block.count + VALUES) * width + ALIGN);
    float* values = (float*)round_up((int64_t)memory.data(), ALIGN);
    float* sums = values + VALUES * width;
    Unit* keys = (Unit*)(sums + block.count * width);
    score_queries(call, block, keys + 16 * units, keys);
    for (int64_t i = 0; i < block.count; i++) exponentiate(call, block.queries[i]);
    weigh_values_of_many(call, block, width, values, sums);
}

// Numbers from one query's scores to the next one's: a line more than needed, so that they do not all map to one first-level cache set.
int64_t score_stride(int64_t num_keys) { return round_up(num_keys, 16) + 16; }

// The most keys that its rows see.
int64_t num_keys_of(const AttentionCall& call) {
    return call.num_seen ? call.num_seen : call.start + (call.paths == nullptr ? call.num_rows : call.path_stride);
}

// Queries of a block: for a long prompt as many as keep their scores in the cache, for a few rows so few that all threads have work.
int64_t block_queries(const AttentionCall& call, int num_threads) {
    const bool by_tiles = attends_by_tiles(call);  // of which many queries keep no scores
    const int64_t in_cache = by_tiles ? MOST_QUERIES : std::min<int64_t>(MOST_SCORED, SCORES_IN_CACHE / score_stride(num_keys_of(call)));
    const int64_t share = call.num_rows * call.num_heads / (BLOCKS_PER_THREAD * num_threads);
    const int64_t tile = by_tiles ? TILED_QUERIES : TILE;
    return std::max<int64_t>(FEWEST_QUERIES, std::min(share, in_cache) / tile * tile);
}

// Attention of the index-th block of `size` queries. A query is a row and one of the `groups` heads that share a key head; rows are in
// order.
void attend_block(const AttentionCall& call, int64_t index, int64_t size, float* scores) {
    const int64_t groups = call.num_heads / call.num_kv_heads, num_queries = call.num_rows * groups;
    const int64_t per_head = (num_queries + size - 1) / size, head = index / per_head, first = index % per_head * size;
    Query queries[MOST_QUERIES];
    QueryBlock block = {call.keys + head * call.capacity * call.key_dim, call.values + head * call.capacity * call.value_dim,
                        queries, std::min(size, num_queries - first), 0, INT64_MAX};
    const auto place_of = [&](int64_t row) { return call.positions == nullptr ? call.start + row : call.positions[row]; };
    const auto position_of = [&](int64_t row) { return call.num_seen ? call.num_seen - 1 : place_of(row); };
    for (int64_t row = first / groups; row <= (first + block.count - 1) / groups; row++)
        block.num_keys = std::max(block.num_keys, position_of(row) + 1);
    for (int64_t i = 0; i < block.count; i++) {
        Query& query = queries[i];
        query.row = (first + i) / groups;
        query.head = head * groups + (first + i) % groups;
        query.place = place_of(query.row);
        query.position = position_of(query.row);
        query.earliest = call.window ? std::max<int64_t>(query.position - call.window + 1, 0) : 0;
        block.earliest = std::min(block.earliest, query.earliest);
        query.from = call.query + query.head * call.query_head + query.row * call.query_row;
        query.scores = scores + i * score_stride(block.num_keys);
        query.sink = call.sinks ? call.sinks + query.head : nullptr;
        query.bias = call.bias ? call.bias + query.head * (2 * call.farthest + 1) + call.farthest : nullptr;
    }
    if (attends_by_tiles(call)) attend_by_tiles(call, block);
    else if (block.count < WORTH_TILES) attend_few(call, block);
    else attend_many(call, block);
}

// Computes the thread's share of a call's blocks. Threads take turns, which continue from call to call.
void attend_shared(const AttentionCall& call, const Team& team, int64_t& next_block, float* scores) {
    const int64_t size = block_queries(call, team.size), num_queries = call.num_rows * (call.num_heads / call.num_kv_heads);
    const int64_t blocks = call.num_kv_heads * ((num_queries + size - 1) / size);
    for (int64_t index = 0; index < blocks; index++)
        if (next_block++ % team.size == team.rank) attend_block(call, index, size, scores);
}

int64_t score_room(int64_t num_keys) {
    const int64_t stride = score_stride(num_keys);
    const int64_t least = std::max<int64_t>(FEWEST_QUERIES, TILED_QUERIES);  // so many are kept even if they are not in the cache
    const int64_t scores = std::max(least * stride, std::min(MOST_SCORED * stride, SCORES_IN_CACHE));
    return scores * (int64_t)sizeof(float);
}

}  // namespace
