// Attention of some rows over the keys and values of one sequence (arXiv:2305.13245).
//
// For each query, scores are computed and exponentiated, then values are added, all in order of position. Few queries read keys directly
// from the cache. For many queries, keys are rearranged once and multiplied by a tile of queries at a time: in the same order, so that a
// row's bits do not depend on how many there are.

#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
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
constexpr int64_t VALUES = 256;                       // positions whose values all tiles add before the next ones
constexpr int64_t FETCHED = 2048;                     // bytes between what is read and what is fetched

// A block's queries, divided evenly into tiles of at most `size`.
struct TilesOfQueries {
    int64_t count, bounds[MOST_SCORED + 1];
    TilesOfQueries(int64_t num_queries, int64_t size) : count((num_queries + size - 1) / size) {
        for (int64_t i = 0; i <= count; i++) bounds[i] = num_queries * i / count;
    }
    int64_t begin(int64_t tile) const { return bounds[tile]; }
    int64_t end(int64_t tile) const { return bounds[tile + 1]; }
};

// Fetches as much memory as `count` numbers take, some way ahead of what is read now: the processor does not do so across pages.
INLINE void fetch_ahead(const uint16_t* from, int64_t count) {
    for (int64_t i = 0; i < count; i += 32) _mm_prefetch((const char*)(from + i) + FETCHED, _MM_HINT_T0);
}

// ------------------------------------------------------------------------------------------------------------- scores

// Scores of all queries with their keys, from the sixteen that begin at position `first` on.
void score_each(const AttentionCall& call, const QueryBlock& block, int64_t first) {
    for (int64_t j = std::max(first, block.earliest / 16 * 16); j < block.num_keys; j += 16) {
        const bool are_in_order = call.paths == nullptr || j + 16 <= call.start;
        const uint16_t* keys = block.keys + j * call.key_dim;
        if (are_in_order) fetch_ahead(keys, 16 * call.key_dim);
        int64_t row = -1;  // whose path `keys` follow
        for (int64_t i = 0; i < block.count; i++) {
            const Query& query = block.queries[i];
            if (!query.sees(j, 16)) continue;
            if (!are_in_order && query.row != row) {
                keys = collect_keys(call, block, query, j);
                row = query.row;
            }
            storeu_ps(query.scores + j, score_block(query.from, keys, call.key_dim));
        }
    }
}

// Products of Q queries with K times sixteen keys: COUNT parts of them from FIRST on, added by a balanced tree. Steps: an integer or a
// constant. sums: [K, Q]
template <int Q, int K, int FIRST, int COUNT, class Steps>
INLINE void sum_parts(Steps steps, const Unit* units, const Unit* keys, F32x16* sums) {
    if constexpr (COUNT == 1) {
        const Unit *query = units + PART_ORDER[FIRST], *key = keys + PART_ORDER[FIRST] * 16;
#pragma GCC unroll 8
        for (int i = 0; i < K * Q; i++) sums[i] = setzero_ps();
#pragma GCC unroll 2
        for (int64_t t = 0; t < steps; t++, query += PARTS, key += PARTS * 16) {
#pragma GCC unroll 8
            for (int i = 0; i < K * Q; i++)
                sums[i] = score_step(sums[i], query + i % Q * steps * PARTS, key + i / Q * steps * PARTS * 16);
        }
    } else {
        F32x16 later[K * Q];
        sum_parts<Q, K, FIRST, COUNT / 2>(steps, units, keys, sums);
        sum_parts<Q, K, FIRST + COUNT / 2, COUNT / 2>(steps, units, keys, later);
#pragma GCC unroll 8
        for (int i = 0; i < K * Q; i++) sums[i] = add_ps(sums[i], later[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < K * Q; i++) pin(sums[i]);
}

// Products of Q queries with the K times sixteen keys from position j on. units: [Q, steps, PARTS], keys: [K, steps, PARTS, 16]
template <int Q, int K, class Steps>
void score_tile(const Query* queries, int64_t j, Steps steps, const Unit* units, const Unit* keys) {
    F32x16 sums[K * Q];
    sum_parts<Q, K, 0, PARTS>(steps, units, keys, sums);
#pragma GCC unroll 8
    for (int i = 0; i < K * Q; i++) storeu_ps(queries[i % Q].scores + j + 16 * (i / Q), sums[i]);
}

template <int K, int Q = SCORE_QUERIES>
void any_score_tile(int64_t count, const Query* queries, int64_t j, int64_t steps, const Unit* units, const Unit* keys) {
    constexpr std::integral_constant<int64_t, num_steps(64)> usual;  // of heads of 64 numbers: known loops run faster
    if (count >= Q && steps == usual) return score_tile<Q, K>(queries, j, usual, units, keys);
    if (count >= Q) return score_tile<Q, K>(queries, j, steps, units, keys);
    if constexpr (Q > 1) any_score_tile<K, Q - 1>(count, queries, j, steps, units, keys);
}

// units, keys: buffers for the block's queries and for SCORE_KEYS times sixteen keys
void score_queries(const AttentionCall& call, const QueryBlock& block, Unit* units, Unit* keys) {
    const int64_t steps = num_steps(call.key_dim), query_units = steps * PARTS, key_units = query_units * 16;
    const TilesOfQueries tiles(block.count, SCORE_QUERIES);
    for (int64_t i = 0; i < block.count; i++) unpack_query(block.queries[i].from, call.key_dim, units + i * query_units);
    const int64_t in_order = call.paths == nullptr ? block.num_keys : num_in_order(call, block.num_keys) / 16 * 16;
    for (int64_t j = block.earliest / 16 * 16; j < in_order; j += 16 * SCORE_KEYS) {
        const int64_t end = std::min(j + 16 * SCORE_KEYS, in_order);
        fetch_ahead(block.keys + j * call.key_dim, 16 * SCORE_KEYS * call.key_dim);
        for (int64_t k = j; k < end; k += 16) unpack_sixteen_keys(call, block, k, keys + (k - j) / 16 * key_units);
        for (int64_t tile = 0; tile < tiles.count; tile++) {
            const int64_t begin = tiles.begin(tile), count = tiles.end(tile) - begin;
            const Query* queries = block.queries + begin;
            const Unit* own = units + begin * query_units;
            const bool is_sorted = call.paths == nullptr;
            const int64_t from = is_sorted ? queries[0].earliest : 0, to = is_sorted ? queries[count - 1].position + 1 : in_order;
            if (j + 16 > from && j + 16 * (SCORE_KEYS - 1) < std::min(to, end)) {
                any_score_tile<SCORE_KEYS>(count, queries, j, steps, own, keys);
                continue;
            }
            for (int64_t k = j; k < std::min(to, end); k += 16)
                if (k + 16 > from) any_score_tile<1>(count, queries, k, steps, own, keys + (k - j) / 16 * key_units);
        }
    }
    if (call.paths == nullptr) return;
    score_each(call, block, in_order);
}

// ------------------------------------------------------------------------------------------------------------- values

// Numbers from one query's sums of values to the next one's.
int64_t sum_stride(int64_t width) { return round_up(width, 16); }

// Adds the weighted values at positions first .. end - 1 to the sums of Q queries that see all of them, for 16 V columns. values: of these
// positions, `width` numbers each; mask: of the columns if V is 1; sums: [Q, stride]
template <int Q, int V>
void add_columns(const Query* queries, int64_t first, int64_t end, const uint16_t* values, int64_t width, Mask16 mask, float* sums) {
    const int64_t stride = sum_stride(width);
    const float* weights[Q];
    for (int q = 0; q < Q; q++) weights[q] = queries[q].scores + first;
    F32x16 s[Q][V];
#pragma GCC unroll 8
    for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) s[q][v] = load_ps(sums + q * stride + 16 * v);
    for (int64_t j = 0; j < end - first; j++, values += width) {
        fetch_ahead(values, 16 * V);
        F32x16 value[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) value[v] = load_bf16(values + 16 * v, V > 1 ? 0xffff : mask);
#pragma GCC unroll 8
        for (int q = 0; q < Q; q++) {
            const F32x16 w = set1_ps(weights[q][j]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) s[q][v] = fmadd_ps(w, value[v], s[q][v]);
        }
    }
#pragma GCC unroll 8
    for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) store_ps(sums + q * stride + 16 * v, s[q][v]);
}

template <int Q>
void add_tile(const Query* queries, int64_t first, int64_t end, const uint16_t* values, int64_t width, float* sums) {
    int64_t column = 0;
    for (; column + 16 * SUM_COLUMNS <= width; column += 16 * SUM_COLUMNS)
        add_columns<Q, SUM_COLUMNS>(queries, first, end, values + column, width, 0xffff, sums + column);
    for (; column < width; column += 16)
        add_columns<Q, 1>(queries, first, end, values + column, width, lanes(width - column), sums + column);
}

template <int Q = SUM_TILE>
void add_any_tile(int count, const Query* queries, int64_t first, int64_t end, const uint16_t* values, int64_t width, float* sums) {
    if (count >= Q) return add_tile<Q>(queries, first, end, values, width, sums);
    if constexpr (Q > 1) add_any_tile<Q - 1>(count, queries, first, end, values, width, sums);
}

// Adds to each query's sums the weighted values that it sees at positions first .. end - 1. Those seen by all are added as a tile.
void add_values(const Query* queries, int count, int64_t first, int64_t end, const uint16_t* values, int64_t width, float* sums) {
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
            if (begin < last) add_tile<1>(queries + q, begin, last, values + begin * width, width, sums + q * sum_stride(width));
        }
    };
    add_seen(first, seen_from);
    if (seen_from < seen_to) add_any_tile(count, queries, seen_from, seen_to, values + seen_from * width, width, sums);
    add_seen(seen_to, end);
}

// sums: a buffer for the sums of all queries
void weigh_values(const AttentionCall& call, const QueryBlock& block, float* sums) {
    const int64_t in_order = num_in_order(call, block.num_keys), width = call.value_dim, stride = sum_stride(width);
    const TilesOfQueries tiles(block.count, SUM_TILE);
    std::fill_n(sums, block.count * stride, 0.0f);
    for (int64_t first = block.earliest; first < in_order; first += VALUES) {
        const int64_t end = std::min(first + VALUES, in_order);
        for (int64_t tile = 0; tile < tiles.count; tile++) {
            const int64_t begin = tiles.begin(tile), count = tiles.end(tile) - begin;
            add_values(block.queries + begin, (int)count, first, end, block.values, width, sums + begin * stride);
        }
    }
    for (int64_t i = 0; i < block.count && call.paths != nullptr; i++) {
        const Query& query = block.queries[i];
        for (int64_t j = std::max(in_order, query.earliest); j <= query.position; j++)
            add_tile<1>(&query, j, j + 1, block.values + slot_of(call, query, j) * width, width, sums + i * stride);
    }
    for (int64_t i = 0; i < block.count; i++)
        for (int64_t column = 0; column < width; column += 16)
            store_output(call, block.queries[i], column, load_ps(sums + i * stride + column));
}

// ------------------------------------------------------------------------------------------------------------- blocks

void attend_queries(const AttentionCall& call, const QueryBlock& block) {
    const int64_t units = num_steps(call.key_dim) * PARTS, num_sums = block.count * sum_stride(call.value_dim);
    thread_local std::vector<float> memory;
    memory.resize((block.count + 16 * SCORE_KEYS) * units + num_sums + ALIGN);
    float* sums = (float*)round_up((int64_t)memory.data(), ALIGN);
    Unit* keys = (Unit*)(sums + num_sums);
    if (block.count < WORTH_TILES) score_each(call, block, 0);
    else score_queries(call, block, keys + 16 * SCORE_KEYS * units, keys);
    for (int64_t i = 0; i < block.count; i++) exponentiate(call, block.queries[i]);
    weigh_values(call, block, sums);
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
    const int64_t tile = by_tiles ? TILED_QUERIES : SUM_TILE;
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
    else attend_queries(call, block);
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
