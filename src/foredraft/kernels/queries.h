// The queries of one sequence, and the processing of their scores.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "structs.h"
#include "vector_math.h"

namespace {

constexpr int WORTH_TILES = 6;                        // the fewest queries for which rearranging keys pays

struct Query {
    const uint16_t* from;
    float* scores;                                    // a buffer for all keys, rounded up to a multiple of 16
    const float* sink;
    const float* bias;                                // the bias for distance 0; those for other distances are around it
    int64_t earliest, position, row, head;            // earliest: the first key in the window; position: the last key that it sees
    int64_t place;                                    // its own position
    float inverse;                                    // 1 / sum of the weights
    bool sees(int64_t j, int64_t count) const { return j + count > earliest && j <= position; }  // any of some keys
    int64_t first_block() const { return earliest / 16 * 16; }
};

// Some queries that read the same keys. earliest: the first key that any of them sees.
struct QueryBlock {
    const uint16_t *keys, *values;
    Query* queries;
    int64_t count, num_keys, earliest;
};

// Positions below this one are in the slots of the same numbers, for all queries; later ones are in the slots of each query's path.
int64_t num_in_order(const AttentionCall& call, int64_t num_keys) { return call.paths == nullptr ? num_keys : std::min(call.start, num_keys); }

int64_t slot_of(const AttentionCall& call, const Query& query, int64_t position) {
    const bool is_in_order = call.paths == nullptr || position < call.start;
    return is_in_order ? position : call.paths[query.row * call.path_stride + position - call.start];
}

// ------------------------------------------------------------------------------------------------------------- scores

// The relative position biases of the sixteen keys from position j on (arXiv:1910.10683).
F32x16 biases(const AttentionCall& call, const Query& query, int64_t j) {
    const int64_t distance = j - query.place, most = call.farthest;
    if (distance + 15 <= -most) return set1_ps(query.bias[-most]);
    if (distance >= -most && distance + 15 <= most) return loadu_ps(query.bias + distance);
    alignas(ALIGN) float each[16];
    for (int64_t i = 0; i < 16; i++) each[i] = query.bias[std::clamp(distance + i, -most, most)];
    return load_ps(each);
}

// Scores with the sixteen keys from position j on, from their products: scaled, capped, biased, -inf for keys that are not seen.
F32x16 seen_scores(const AttentionCall& call, const Query& query, int64_t j, F32x16 products) {
    F32x16 s = mul_ps(products, set1_ps(call.scale));
    if (call.softcap > 0) s = soft_cap(s, call.softcap);
    if (query.bias != nullptr) s = add_ps(s, biases(call, query, j));
    if (j >= query.earliest && j + 15 <= query.position && call.mask == nullptr) return s;
    const I512 places = setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const I512 at = add_epi32(places, set1_epi32((int32_t)j));
    Mask16 seen = cmple_epi32_mask(at, set1_epi32((int32_t)query.position));
    seen &= cmpge_epi32_mask(at, set1_epi32((int32_t)query.earliest));
    if (call.mask != nullptr)
        seen &= nonzero_bytes(lanes(call.mask_keys - j), call.mask + query.row * call.mask_keys + j);
    return mask_mov_ps(set1_ps(-INFINITY), seen, s);
}

// A copy of the sixteen keys from position `first` on, taken along a query's path. Valid until the next call.
const uint16_t* collect_keys(const AttentionCall& call, const QueryBlock& block, const Query& query, int64_t first) {
    thread_local std::vector<uint16_t> copy;
    copy.assign(16 * call.key_dim, 0);
    for (int64_t j = first; j < std::min(first + 16, query.position + 1); j++)
        std::copy_n(block.keys + slot_of(call, query, j) * call.key_dim, call.key_dim, copy.begin() + (j - first) * call.key_dim);
    return copy.data();
}

// Unpacks the sixteen keys from position j on to the order in which many queries read them. to: [steps, PARTS, 16]
void unpack_sixteen_keys(const AttentionCall& call, const QueryBlock& block, int64_t j, Unit* to) {
    const uint16_t* rows[16];
    for (int64_t i = 0; i < 16; i++) rows[i] = block.keys + std::min(j + i, block.num_keys - 1) * call.key_dim;
    unpack_keys(rows, call.key_dim, to);
}

// The largest score of a query, its sink included.
float most_of(const Query& query, F32x16 largest) {
    float most = reduce_max_ps(largest);
    if (query.sink != nullptr && *query.sink > most) most = *query.sink;
    return most == -INFINITY ? 0 : most;  // no key is seen
}

// sum: of the weights of the keys
float inverse_of(const Query& query, float most, F32x16 sum) {
    float total = reduce_add_ps(sum);
    if (query.sink != nullptr) total += expf(*query.sink - most);
    return 1.0f / total;
}

// Whether a query's scores are only scaled products, among keys that are all seen.
bool only_scales(const AttentionCall& call, const Query& query) {
    return call.scale > 0 && call.softcap == 0 && query.bias == nullptr && call.mask == nullptr;
}

// Weights from products that are only scaled. Each score is rounded before the largest is subtracted, so the largest gives exactly 0. With
// the scale and log2(e) as one factor it would not: the difference would be wrong by the rounding error of a score.
class ScaledWeights {
    F32x16 scale_, most_;

public:
    ScaledWeights(float scale, float most) : scale_(set1_ps(scale)), most_(set1_ps(most)) {}
    INLINE F32x16 operator()(F32x16 products) const { return fast_exp_nonpositive(sub_ps(mul_ps(products, scale_), most_)); }
};

// Turns products into weights, in place. Only those in blocks that are not all seen, or not only scaled, become scores in between.
void exponentiate(const AttentionCall& call, Query& query) {
    const int64_t first = query.first_block(), end = query.position + 1;
    const int64_t scaled_from = only_scales(call, query) ? std::min(round_up(query.earliest, 16), end) : end;
    const int64_t scaled_to = std::max(scaled_from, end / 16 * 16);
    F32x16 largest = set1_ps(-INFINITY), largest_product = largest;
    const auto score = [&](int64_t from, int64_t to) {
        for (int64_t j = from; j < to; j += 16) {
            const F32x16 s = seen_scores(call, query, j, loadu_ps(query.scores + j));
            largest = max_ps(s, largest);
            storeu_ps(query.scores + j, s);
        }
    };
    score(first, scaled_from);
    for (int64_t j = scaled_from; j < scaled_to; j += 16) largest_product = max_ps(loadu_ps(query.scores + j), largest_product);
    score(scaled_to, end);
    if (scaled_from < scaled_to) largest = max_ps(mul_ps(largest_product, set1_ps(call.scale)), largest);
    const float most = most_of(query, largest);
    F32x16 sum = setzero_ps();
    const auto weigh = [&](int64_t from, int64_t to, const auto& weight) __attribute__((always_inline)) {
        for (int64_t j = from; j < to; j += 16) {
            const F32x16 w = weight(loadu_ps(query.scores + j));
            sum = add_ps(sum, w);
            storeu_ps(query.scores + j, w);
        }
    };
    const auto weight_of_score = [&](F32x16 s) __attribute__((always_inline)) { return exp_nonpositive(sub_ps(s, set1_ps(most))); };
    weigh(first, scaled_from, weight_of_score);
    weigh(scaled_from, scaled_to, ScaledWeights(call.scale, most));
    weigh(scaled_to, end, weight_of_score);
    query.inverse = inverse_of(query, most, sum);
}

void store_output(const AttentionCall& call, const Query& query, int64_t column, F32x16 sum) {
    uint16_t* to = call.output + (query.row * call.num_heads + query.head) * call.value_dim + column;
    store_bf16(to, lanes(call.value_dim - column), mul_ps(sum, set1_ps(query.inverse)));
}

}  // namespace
