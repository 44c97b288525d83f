// From logits to probabilities and tokens: softmax, truncation, and the draw.

#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "structs.h"
#include "vector_math.h"

namespace {

constexpr int64_t BLOCK = 64;           // numbers that share one stored maximum
constexpr int64_t WORTH_A_TEAM = 65536; // for fewer numbers one thread is faster

// One row of logits, bfloat16 or float32: the same arithmetic for both.
struct Logits {
    const void* from;
    bool is_float;
    F32x16 load(int64_t i, Mask16 mask) const {
        if (is_float) return mask_loadu_ps(set1_ps(-INFINITY), mask, (const float*)from + i);
        return load_bf16_or_least((const uint16_t*)from + i, mask);
    }
    F32x16 gather(const int64_t* places, Mask16 mask) const {
        if (is_float) return gather_ps(mask, (const float*)from, places);
        alignas(ALIGN) float some[16] = {};
        for (int64_t i = 0; i < 16; i++)
            if (mask >> i & 1) some[i] = at(places[i]);
        return load_ps(some);
    }
    float at(int64_t i) const {
        if (is_float) return ((const float*)from)[i];
        const uint32_t bits = (uint32_t)((const uint16_t*)from)[i] << 16;
        float x;
        memcpy(&x, &bits, 4);
        return x;
    }
};

Logits row_of(const void* logits, int64_t is_float, int64_t stride, int64_t r) {
    return {(const char*)logits + r * stride * (is_float ? 4 : 2), is_float != 0};
}

// The first index of the largest number; the first NaN if there is one.
int64_t argmax_of(const Logits& row, int64_t width) {
    F32x16 best = set1_ps(-INFINITY);
    Mask16 nan = 0;
    for (int64_t i = 0; i < width; i += 16) {
        const F32x16 x = row.load(i, lanes(width - i));
        nan |= is_nan_ps(x);
        best = max_ps(x, best);
    }
    const F32x16 most = set1_ps(reduce_max_ps(best));
    for (int64_t i = 0; i < width; i += 16) {
        const Mask16 mask = lanes(width - i);
        const F32x16 x = row.load(i, mask);
        const Mask16 found = (nan ? is_nan_ps(x) : equal(x, most)) & mask;
        if (found) return i + __builtin_ctz(found);
    }
    return 0;
}

// Finite, so that 0 times it is 0.
F32x16 inverse_temperature(float temperature) { return set1_ps(std::min(1.0f / temperature, 3e38f)); }

// Probabilities of the `count` most likely ids under softmax(row / temperature), most likely first, for equal logits the lower id
// first; and their logits, because two different ones may have the same probability in float32.
void top_of(const Logits& row, int64_t width, float temperature, int64_t count, float* probs, float* values, int64_t* ids) {
    const int64_t blocks = (width + BLOCK - 1) / BLOCK;
    std::vector<float> most(blocks), sorted;
    Mask16 nan = 0;
    float largest = -INFINITY;
    for (int64_t b = 0; b < blocks; b++) {
        F32x16 best = set1_ps(-INFINITY);
        for (int64_t i = b * BLOCK; i < (b + 1) * BLOCK && i < width; i += 16) {
            const F32x16 x = row.load(i, lanes(width - i));
            nan |= is_nan_ps(x);
            best = max_ps(x, best);
        }
        most[b] = reduce_max_ps(best);
        largest = std::max(largest, most[b]);
    }
    const F32x16 shift = set1_ps(largest);
    const F32x16 factor = inverse_temperature(temperature);
    const F32x16 least = set1_ps(-87.0f);
    const auto term = [&](int64_t i, Mask16 mask) {
        const F32x16 x = mul_ps(sub_ps(row.load(i, mask), shift), factor);
        return exp_above(max_ps(x, least));  // smaller terms count as 1e-38, in a sum of at least 1
    };
    F32x16 even = setzero_ps(), odd = even;
    int64_t at = 0;
    for (; at + 32 <= width; at += 32) {
        even = add_ps(even, term(at, 0xffff));
        odd = add_ps(odd, term(at + 16, 0xffff));
    }
    for (; at < width; at += 16) even = mask_add_ps(even, lanes(width - at), even, term(at, lanes(width - at)));
    const float total = nan ? NAN : reduce_add_ps(add_ps(even, odd));
    // the count-th largest of the blocks' maxima is a lower bound of the count-th largest number
    float bound = -INFINITY;
    if (blocks > count) {
        sorted = most;
        std::nth_element(sorted.begin(), sorted.begin() + (count - 1), sorted.end(), std::greater<float>());
        bound = sorted[count - 1];
    }
    std::vector<std::pair<float, int64_t>> found;
    for (int64_t b = 0; b < blocks; b++) {
        if (most[b] < bound) continue;
        for (int64_t i = b * BLOCK; i < (b + 1) * BLOCK && i < width; i++) {
            const float x = row.at(i);
            if (x >= bound) found.push_back({-x, i});
        }
    }
    const int64_t kept = std::min<int64_t>(count, found.size());
    std::partial_sort(found.begin(), found.begin() + kept, found.end());
    alignas(ALIGN) float few[16];
    for (int64_t i = 0; i < count; i += 16) {
        for (int64_t j = 0; j < 16; j++) few[j] = i + j < kept ? -found[i + j].first : -INFINITY;
        mask_storeu_ps(values + i, lanes(count - i), load_ps(few));
        F32x16 p = exp_nonpositive(mul_ps(sub_ps(load_ps(few), shift), factor));
        p = div_ps(p, set1_ps(total));
        mask_storeu_ps(probs + i, lanes(count - i), p);
    }
    for (int64_t i = 0; i < count; i++) ids[i] = i < kept ? found[i].second : 0;
}

// -------------------------------------------------------------------------------------------------------------- tokens

struct Noise {
    const double* uniforms;                // in [0, 1)
    const int64_t* keys;
};

constexpr int64_t STRETCH = 256;  // numbers that are summed together

int64_t num_stretches(int64_t count) { return (count + STRETCH - 1) / STRETCH; }

// softmax(row / temperature). If a logit is NaN, or none is finite, probabilities are NaN, including the first.
void softmax_of(const Logits& row, int64_t width, float temperature, float* probs) {
    F32x16 best = set1_ps(-INFINITY);
    for (int64_t i = 0; i < width; i += 16) best = max_ps(row.load(i, lanes(width - i)), best);
    const F32x16 shift = set1_ps(reduce_max_ps(best));
    const F32x16 factor = inverse_temperature(temperature);
    double all = 0;
    for (int64_t first = 0; first < width; first += STRETCH) {
        F32x16 sum = setzero_ps();
        for (int64_t i = first; i < std::min(width, first + STRETCH); i += 16) {
            const Mask16 mask = lanes(width - i);
            const F32x16 e = exp_nonpositive(mul_ps(sub_ps(row.load(i, mask), shift), factor));
            sum = mask_add_ps(sum, mask, sum, e);
            mask_storeu_ps(probs + i, mask, e);
        }
        all += reduce_add_ps(sum);
    }
    const F32x16 total = set1_ps((float)all);
    for (int64_t i = 0; i < width; i += 16) {
        const Mask16 mask = lanes(width - i);
        mask_storeu_ps(probs + i, mask, div_ps(maskz_loadu_ps(mask, probs + i), total));
    }
}

bool truncates(const DrawSpec& spec) { return spec.top_k > 0 || spec.top_p < 1 || spec.min_p > 0; }

constexpr double TOP_P_FACTOR = 1 - 1e-6;  // on top_p: otherwise rounding could keep one id too many where equal logits reach it exactly

// Softmax over the ids that truncation keeps, likeliest first. Of the ids with at least min_p of the top probability, keep the
// top_k (and all ties of the last); of these, the fewest that hold top_p of their mass (of equal logits, the lower ids).
// The same rule as in sampling/token_probs.py. probs, ids: resized as needed. -> how many ids are kept; 0 if there is a NaN
int64_t truncated_softmax(const Logits& row, int64_t width, const DrawSpec& spec, std::vector<float>& probs, std::vector<int64_t>& ids) {
    for (int64_t count = std::min<int64_t>(width, std::max<int64_t>(spec.top_k + 16, 64));; count = std::min(width, 8 * count)) {
        thread_local std::vector<float> values;
        if ((int64_t)probs.size() < count) { probs.resize(count); ids.resize(count); }
        if ((int64_t)values.size() < count) values.resize(count);
        top_of(row, width, spec.temperature, count, probs.data(), values.data(), ids.data());
        if (std::isnan(probs[0])) return 0;
        int64_t kept = count;
        bool bounded = false, complete = count == width;
        const auto cut_below = [&](const std::vector<float>& of, float bound) {
            kept = std::lower_bound(of.begin(), of.begin() + kept, bound, std::greater_equal<float>()) - of.begin();
            complete |= of[count - 1] < bound;
            bounded = true;
        };
        if (spec.min_p > 0) cut_below(probs, spec.min_p * probs[0]);
        if (0 < spec.top_k && spec.top_k <= count) cut_below(values, std::max(values[spec.top_k - 1], -FLT_MAX));  // masked ids are never kept
        if (spec.top_p < 1) {
            double mass = 0;
            for (int64_t i = 0; i < kept; i++) mass += probs[i];
            // without min-p and top-k the mass is 1; otherwise it is that of the ids they left
            const double wanted = TOP_P_FACTOR * spec.top_p * (bounded ? mass : 1.0);
            if (!bounded) complete |= mass >= wanted;
            double reached = 0;
            for (int64_t i = 0; i < kept; i++) {
                if (i > 0 && reached >= wanted) kept = i;
                reached += probs[i];
            }
        }
        if (!complete) continue;
        double total = 0;
        for (int64_t i = 0; i < kept; i++) total += probs[i];
        for (int64_t i = 0; i < kept; i++) probs[i] /= (float)total;
        return kept;
    }
}

double stretch_total(const float* weights, int64_t count) {
    F64x8 sum = setzero_pd();
    for (int64_t i = 0; i < count; i += 8) sum = add_pd(sum, load_as_pd((Mask8)lanes(count - i), weights + i));
    return reduce_add_pd(sum);
}

// Draws an index with probability proportional to its weight, by inversion; an index of weight 0 is never drawn. totals: of the weights
// of each stretch. stretch(s): the weights of one.
template <class Stretch>
int64_t draw_index(const double* totals, int64_t count, double uniform, const Stretch& stretch) {
    const int64_t stretches = num_stretches(count);
    const double total = std::accumulate(totals, totals + stretches, 0.0), at = std::min(uniform * total, std::nextafter(total, 0.0));
    double sum = 0;
    int64_t s = 0;
    while (s < stretches && sum + totals[s] <= at) sum += totals[s++];
    if (s == stretches) return count - 1;
    const float* weights = stretch(s);
    int64_t index = 0;
    for (int64_t i = 0; i < std::min(count - s * STRETCH, STRETCH) && sum <= at; i++) {
        if (weights[i] > 0) index = i;  // stays at the last one if this sum, added in another order, falls short of the total
        sum += weights[i];
    }
    return s * STRETCH + index;
}

int64_t draw_index(const float* weights, int64_t count, double uniform) {
    std::vector<double> totals;
    for (int64_t at = 0; at < count; at += STRETCH) totals.push_back(stretch_total(weights + at, std::min(count - at, STRETCH)));
    return draw_index(totals.data(), count, uniform, [&](int64_t s) { return weights + s * STRETCH; });
}

I512 mixed(I512 z) {
    z = mullo_epi64(xor_si512(z, srli_epi64<30>(z)), set1_epi64((int64_t)0xBF58476D1CE4E5B9ull));
    z = mullo_epi64(xor_si512(z, srli_epi64<27>(z)), set1_epi64((int64_t)0x94D049BB133111EBull));
    return xor_si512(z, srli_epi64<31>(z));
}

// The best `room` of the offered scores, best first; ties in the order offered.
struct Best {
    int64_t room;
    std::vector<std::pair<double, int64_t>> kept;   // scores and their indices
    explicit Best(int64_t room) : room(room) { kept.reserve(room + 1); }
    double bound() const { return (int64_t)kept.size() < room ? -INFINITY : kept.back().first; }
    void offer(double score, int64_t index) {
        if (!(score > bound())) return;
        auto at = kept.end();
        while (at != kept.begin() && std::prev(at)->first < score) --at;
        kept.insert(at, {score, index});
        if ((int64_t)kept.size() > room) kept.pop_back();
    }
};

// The indices of the largest finite numbers; none if any number is NaN.
void largest_of(const Logits& row, int64_t width, Best& best) {
    Mask16 nan = 0;
    for (int64_t first = 0; first < width; first += BLOCK) {
        const int64_t end = std::min(width, first + BLOCK);
        F32x16 most = set1_ps(-INFINITY);
        for (int64_t i = first; i < end; i += 16) {
            const F32x16 x = row.load(i, lanes(end - i));
            nan |= is_nan_ps(x);
            most = max_ps(x, most);
        }
        if (!(reduce_max_ps(most) > best.bound())) continue;
        for (int64_t i = first; i < end; i++) best.offer(row.at(i), i);
    }
    if (nan) best.kept.clear();
}

// The indices of the largest positive probs / Exp(1), where the noise is a hash of key and id (the Gumbel-max trick). ids: null if
// indices are ids
void gumbel_best(const float* probs, const int64_t* ids, int64_t count, int64_t key, Best& best) {
    const I512 counting = setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
    double bound = INFINITY;
    for (int64_t i = 0; i < count; i += 8) {
        const Mask8 mask = (Mask8)lanes(count - i);
        const I512 each = ids ? maskz_loadu_epi64(mask, ids + i) : add_epi64(counting, set1_epi64(i));
        const I512 step = mullo_epi64(each, set1_epi64((int64_t)0x9E3779B97F4A7C15ull));
        const I512 z = srli_epi64<12>(mixed(add_epi64(set1_epi64(key), step)));
        const F64x8 u = mul_pd(add_pd(cvtepu52_pd(z), set1_pd(0.5)), set1_pd(0x1p-52));
        const F64x8 p = load_as_pd(mask, probs + i);
        // p / -log(u) > b requires u > exp(-p / b) >= 1 - p / b, so few logarithms are needed
        const F64x8 least = fnmadd_pd(p, set1_pd(bound), set1_pd(1 - 1e-12));
        Mask8 left = at_least(u, bound == INFINITY ? setzero_pd() : least) & mask;
        if (!left) continue;
        alignas(ALIGN) double us[8], ps[8];
        store_pd(us, u);
        store_pd(ps, p);
        for (; left; left &= left - 1) {
            const int lane = __builtin_ctz(left);
            if (ps[lane] > 0) best.offer(ps[lane] / -std::log(us[lane]), i + lane);
        }
        if (best.bound() > 0) bound = 1 / best.bound();
    }
}

int64_t gumbel_argmax(const float* probs, const int64_t* ids, int64_t count, int64_t key) {
    Best best(1);
    gumbel_best(probs, ids, count, key, best);
    return best.kept.front().second;
}

// Chooses the `step`-th token of a spec; -1 if the row has a NaN, or if its columns have ids, of which none may be chosen. column_ids: the id
// of each column; null: columns are ids. token_probs: receives the distribution of a drawn token; null if it is not needed.
int64_t choose_token(const Logits& row, int64_t width, const int64_t* column_ids, const DrawSpec& spec, const Noise& noise, int64_t step,
                     const TokenProbs* token_probs) {
    if (spec.kind == GREEDY) {
        const int64_t column = argmax_of(row, width);
        if (std::isnan(row.at(column)) || (column_ids && row.at(column) == -INFINITY)) return -1;
        return column_ids ? column_ids[column] : column;
    }
    thread_local std::vector<float> probs;
    thread_local std::vector<int64_t> ids;
    const bool is_cut = truncates(spec), is_drawn = spec.kind == DRAWN;
    const int64_t at = spec.first_prob_row + step;
    float* weights = nullptr;
    int64_t count = width;
    if (is_cut) {
        count = truncated_softmax(row, width, spec, probs, ids);
        if (count == 0) return -1;
        weights = probs.data();
        for (int64_t i = 0; column_ids && i < count; i++) ids[i] = column_ids[ids[i]];
    } else {
        if ((int64_t)probs.size() < width) { probs.resize(width); ids.resize(width); }
        weights = token_probs && is_drawn ? token_probs->probs + at * token_probs->width : probs.data();
        softmax_of(row, width, spec.temperature, weights);
        if (std::isnan(weights[0])) return -1;
    }
    const int64_t* names = is_cut ? ids.data() : column_ids;
    if (token_probs && is_drawn) {
        token_probs->kept[at] = count;
        if (is_cut) std::copy_n(weights, count, token_probs->probs + at * token_probs->width);
        else std::fill(weights + width, weights + token_probs->width, 0.0f);
        int64_t* named = token_probs->ids ? token_probs->ids + at * token_probs->width : nullptr;
        if (named && names) std::copy_n(names, count, named);
        else if (named) std::iota(named, named + count, 0);
    }
    const int64_t index = is_drawn ? draw_index(weights, count, noise.uniforms[spec.first_noise + step])
                                   : gumbel_argmax(weights, names, count, noise.keys[spec.first_noise + step]);
    return names ? names[index] : index;
}

// Writes the best columns of a row for a spec, greedily or with shared noise, into `best`; none if the row has a NaN.
// column_ids: the id of each column; null: columns are ids. key: of the noise
void choose_best(const Logits& row, int64_t width, const int64_t* column_ids, const DrawSpec& spec, int64_t key, Best& best) {
    if (spec.kind == GREEDY) {
        largest_of(row, width, best);
        return;
    }
    thread_local std::vector<float> probs, kept_probs;
    thread_local std::vector<int64_t> columns, ids;
    if (!truncates(spec)) {
        if ((int64_t)probs.size() < width) probs.resize(width);
        softmax_of(row, width, spec.temperature, probs.data());
        if (!std::isnan(probs[0])) gumbel_best(probs.data(), column_ids, width, key, best);
        return;
    }
    const int64_t count = truncated_softmax(row, width, spec, kept_probs, columns);
    ids.resize(count);
    for (int64_t i = 0; i < count; i++) ids[i] = column_ids ? column_ids[columns[i]] : columns[i];
    gumbel_best(kept_probs.data(), ids.data(), count, key, best);
    for (auto& [_, index] : best.kept) index = columns[index];
}

}  // namespace
