// Attention of a few rows over the keys and values of one sequence (arXiv:2305.13245).

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "structs.h"
#include "team.h"
#include "vector_math.h"

namespace {

constexpr int QUERIES = 8;        // query rows that share one reading of the keys

struct Query {
    const uint16_t* from;
    float* scores;              // room for all keys, a multiple of 16
    int64_t position, row;
    const float* sink;
};

// Positions below this one have their keys and values at the slot of that number.
int64_t num_contiguous(const AttentionCall& call, int64_t num_keys) {
    return call.slots == nullptr ? num_keys : std::min(call.start, num_keys);
}

// A copy of the sixteen keys from position `first` on, where slots are not in order of position. Valid until the next call.
const uint16_t* collect_keys(const AttentionCall& call, const uint16_t* keys, int64_t first, int64_t num_keys) {
    thread_local std::vector<uint16_t> block;
    block.assign(16 * call.key_dim, 0);
    for (int64_t j = first; j < std::min(first + 16, num_keys); j++) {
        const int64_t slot = j < call.start ? j : call.slots[j - call.start];
        std::copy_n(keys + slot * call.key_dim, call.key_dim, block.begin() + (j - first) * call.key_dim);
    }
    return block.data();
}

// scores, then weights in their place; returns 1 / sum
float softmax_scores(const AttentionCall& call, const Query& query, const uint16_t* keys, int64_t first_key, int64_t num_keys) {
    const I512 places = setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const F32x16 hidden = set1_ps(-INFINITY);
    const int64_t earliest = call.window ? query.position - call.window + 1 : 0;
    F32x16 largest = hidden;
    for (int64_t j = first_key; j < num_keys; j += 16) {
        const bool is_contiguous = call.slots == nullptr || j + 16 <= call.start;
        const uint16_t* block = is_contiguous ? keys + j * call.key_dim : collect_keys(call, keys, j, num_keys);
        F32x16 s = mul_ps(score_block(query.from, block, call.key_dim), set1_ps(call.scale));
        if (call.softcap > 0) {
            alignas(ALIGN) float each[16];
            store_ps(each, s);
            for (float& one : each) one = tanhf(one / call.softcap) * call.softcap;
            s = load_ps(each);
        }
        const I512 at = add_epi32(places, set1_epi32((int32_t)j));
        Mask16 seen = cmple_epi32_mask(at, set1_epi32((int32_t)query.position));
        seen &= cmpge_epi32_mask(at, set1_epi32((int32_t)earliest));
        if (call.mask != nullptr)
            seen &= nonzero_bytes(lanes(call.mask_keys - j), call.mask + query.row * call.mask_keys + j);
        s = mask_mov_ps(hidden, seen, s);
        largest = max_ps(s, largest);
        storeu_ps(query.scores + j, s);
    }
    float most = reduce_max_ps(largest);
    if (query.sink != nullptr && *query.sink > most) most = *query.sink;
    if (most == -INFINITY) most = 0;  // nothing is seen
    F32x16 sum = setzero_ps();
    for (int64_t j = first_key; j < num_keys; j += 16) {
        const F32x16 w = exp_nonpositive(sub_ps(loadu_ps(query.scores + j), set1_ps(most)));
        sum = add_ps(sum, w);
        storeu_ps(query.scores + j, w);
    }
    float total = reduce_add_ps(sum);
    if (query.sink != nullptr) total += expf(*query.sink - most);
    return 1.0f / total;
}

// The weighted sum of values for a few queries, 64 columns at a time, key after key.
template <int Q>
void weighted_sum(const AttentionCall& call, const Query* queries, const float* inverse, const uint16_t* values, int64_t first_key,
            int64_t num_keys, int64_t column, float (*out)[GROUP]) {
    F32x16 sums[Q][4];
    Mask16 masks[4];
    for (int p = 0; p < 4; p++) {
        const int64_t left = call.value_dim - column - 16 * p;
        masks[p] = left > 0 ? lanes(left) : 0;
        for (int q = 0; q < Q; q++) sums[q][p] = setzero_ps();
    }
    int64_t seen_by_all = num_keys;
    for (int q = 0; q < Q; q++) seen_by_all = std::min(seen_by_all, queries[q].position + 1);
    const auto add = [&](int64_t j, int64_t slot) __attribute__((always_inline)) {
        F32x16 v[4];
        for (int p = 0; p < 4; p++) v[p] = load_bf16(values + slot * call.value_dim + column + 16 * p, masks[p]);
        for (int q = 0; q < Q; q++) {
            // a weight of zero is not enough: a later row's value may be NaN
            if (j >= seen_by_all && j > queries[q].position) continue;
            const F32x16 w = set1_ps(queries[q].scores[j]);
            for (int p = 0; p < 4; p++) sums[q][p] = fmadd_ps(w, v[p], sums[q][p]);
        }
    };
    const int64_t contiguous = num_contiguous(call, num_keys);
    for (int64_t j = first_key; j < contiguous; j++) add(j, j);
    for (int64_t j = std::max(first_key, contiguous); j < num_keys; j++) add(j, call.slots[j - call.start]);
    for (int q = 0; q < Q; q++)
        for (int p = 0; p < 4; p++) store_ps(out[q] + 16 * p, mul_ps(sums[q][p], set1_ps(inverse[q])));
}

template <int Q = QUERIES_AT_ONCE>
void any_weighted_sum(int count, const AttentionCall& call, const Query* queries, const float* inverse, const uint16_t* values,
                int64_t first_key, int64_t num_keys, int64_t column, float (*out)[GROUP]) {
    if (count >= Q) return weighted_sum<Q>(call, queries, inverse, values, first_key, num_keys, column, out);
    if constexpr (Q > 1) any_weighted_sum<Q - 1>(count, call, queries, inverse, values, first_key, num_keys, column, out);
}

int64_t num_blocks(const AttentionCall& call) {
    const int64_t queries = call.num_rows * (call.num_heads / call.num_kv_heads);
    return call.num_kv_heads * ((queries + QUERIES - 1) / QUERIES);
}

// One block of queries that read the same keys. scores: room for QUERIES rows of all keys.
void attend_block(const AttentionCall& call, int64_t block, float* scores) {
    const int64_t groups = call.num_heads / call.num_kv_heads, num_queries = call.num_rows * groups;
    const int64_t per_head = (num_queries + QUERIES - 1) / QUERIES, head = block / per_head;
    const int64_t first = block % per_head * QUERIES;
    const int64_t count = num_queries - first < QUERIES ? num_queries - first : QUERIES;
    const int64_t last_position = call.start + (first + count - 1) / groups, first_position = call.start + first / groups;
    const int64_t num_keys = last_position + 1;
    int64_t first_key = call.window && first_position >= call.window ? (first_position - call.window + 1) / 16 * 16 : 0;
    const uint16_t* keys = call.keys + head * call.capacity * call.key_dim;
    const uint16_t* values = call.values + head * call.capacity * call.value_dim;
    const int64_t room = round_up(num_keys, 16);
    Query queries[QUERIES];
    float inverse[QUERIES];
    int64_t heads[QUERIES];
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = (first + i) / groups, h = head * groups + (first + i) % groups;
        heads[i] = h;
        queries[i] = {call.query + h * call.query_head + row * call.query_row, scores + i * room, call.start + row, row,
                      call.sinks ? call.sinks + h : nullptr};
        inverse[i] = softmax_scores(call, queries[i], keys, first_key, num_keys);
    }
    alignas(ALIGN) float out[QUERIES_AT_ONCE][GROUP];
    for (int64_t i = 0; i < count; i += QUERIES_AT_ONCE)
        for (int64_t column = 0; column < call.value_dim; column += GROUP) {
            const int some = (int)(count - i < QUERIES_AT_ONCE ? count - i : QUERIES_AT_ONCE);
            any_weighted_sum(some, call, queries + i, inverse + i, values, first_key, num_keys, column, out);
            for (int q = 0; q < some; q++) {
                uint16_t* to = call.output + (queries[i + q].row * call.num_heads + heads[i + q]) * call.value_dim + column;
                for (int64_t c = 0; c < GROUP && column + c < call.value_dim; c += 16)
                    store_bf16(to + c, lanes(call.value_dim - column - c), load_ps(out[q] + c));
            }
        }
}

// The thread's share of a call's blocks; turns go on from call to call.
void attend_shared(const AttentionCall& call, const Team& team, int64_t& next_block, float* scores) {
    const int64_t blocks = num_blocks(call);
    for (int64_t block = 0; block < blocks; block++)
        if (next_block++ % team.size == team.rank) attend_block(call, block, scores);
}

int64_t score_room(int64_t num_keys) { return QUERIES * round_up(num_keys, 16) * (int64_t)sizeof(float); }

}  // namespace
