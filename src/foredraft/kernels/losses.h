// The losses of training: softmax, divergences and their gradients, row by row.

#pragma once

#include "sampling.h"

namespace {

struct Sums {
    double total = 0;
    F32x16 part = setzero_ps();
    void add(F32x16 x) { part = add_ps(part, x); }
    void close() {                // called every STRETCH numbers, so that long rows lose no digits
        total += reduce_add_ps(part);
        part = setzero_ps();
    }
};

// The unnormalised probabilities softmax(row / temperature): exp(y), to be divided by their total, where y = (x - shift) * factor.
struct Exponentials {
    Logits row;
    float shift, factor, total;
    F32x16 exponent(int64_t i, Mask16 mask) const {
        // an infinite distance times 0 would be NaN
        return max_ps(set1_ps(-FLT_MAX), mul_ps(sub_ps(row.load(i, mask), set1_ps(shift)), set1_ps(factor)));
    }
};

// terms: [width], the exponentials. largest: the index of the first largest logit.
Exponentials exponentials_of(const Logits& row, int64_t width, float temperature, float* terms, int64_t* largest) {
    *largest = argmax_of(row, width);
    Exponentials e = {row, row.at(*largest), 1.0f / temperature, 0};
    Sums sum;
    for (int64_t first = 0; first < width; first += STRETCH) {
        for (int64_t i = first; i < std::min(width, first + STRETCH); i += 16) {
            const Mask16 mask = lanes(width - i);
            const F32x16 term = maskz_mov_ps(mask, exp_nonpositive(e.exponent(i, mask)));
            mask_storeu_ps(terms + i, mask, term);
            sum.add(term);
        }
        sum.close();
    }
    e.total = (float)sum.total;
    return e;
}

// probs: [width]. -> the sum of p log p
double softmax_of(const Logits& row, int64_t width, float temperature, float* probs, int64_t* largest) {
    const Exponentials e = exponentials_of(row, width, temperature, probs, largest);
    const F32x16 inverse = set1_ps(1.0f / e.total);
    Sums sum, mass;
    for (int64_t first = 0; first < width; first += STRETCH) {
        for (int64_t i = first; i < std::min(width, first + STRETCH); i += 16) {
            const Mask16 mask = lanes(width - i);
            const F32x16 p = mul_ps(maskz_loadu_ps(mask, probs + i), inverse);
            mask_storeu_ps(probs + i, mask, p);
            sum.add(maskz_mov_ps(mask, mul_ps(p, e.exponent(i, mask))));
            mass.add(p);
        }
        sum.close();
        mass.close();
    }
    return sum.total - mass.total * std::log((double)e.total);
}

struct Gradient {
    void* to;
    bool is_float;
    void store(int64_t i, Mask16 mask, F32x16 x) const {
        if (is_float) return mask_storeu_ps((float*)to + i, mask, x);
        store_bf16((uint16_t*)to + i, mask, x);
    }
};

// The distance of q = softmax(row / temperature) from p: kl_share * KL(p, q) + (1 - kl_share) * TV(p, q), and its gradient for the row.
// negative_entropy: the sum of p log p. likeliest: p's. terms: [width], scratch. sums: the loss, the sum of min(p, q), and whether
// p and q have the same likeliest id.
void distill_row(const Logits& row, int64_t width, float temperature, const float* p, double negative_entropy, int64_t likeliest,
                 double kl_share, float* terms, const Gradient& gradient, double* sums) {
    int64_t largest;
    const Exponentials e = exponentials_of(row, width, temperature, terms, &largest);
    const F32x16 inverse = set1_ps(1.0f / e.total), zero = setzero_ps();
    Sums overlap, cross, mass, below;  // below: the sum of q where q < p
    for (int64_t first = 0; first < width; first += STRETCH) {
        for (int64_t i = first; i < std::min(width, first + STRETCH); i += 16) {
            const Mask16 mask = lanes(width - i);
            const F32x16 q = mul_ps(maskz_loadu_ps(mask, terms + i), inverse), target = maskz_loadu_ps(mask, p + i);
            mask_storeu_ps(terms + i, mask, q);
            overlap.add(min_ps(target, q));
            cross.add(maskz_mov_ps(mask, mul_ps(target, e.exponent(i, mask))));
            mass.add(target);
            below.add(mask_mov_ps(q, at_least(q, target), zero));
        }
        for (Sums* each : {&overlap, &cross, &mass, &below}) each->close();
    }
    sums[0] = kl_share * (negative_entropy - cross.total + mass.total * std::log((double)e.total)) + (1 - kl_share) * (1 - overlap.total);
    sums[1] = overlap.total;
    sums[2] = largest == likeliest;
    // d TV / d q is -1 where q < p; backward through the softmax, q times (that - its mean under q)
    const F32x16 kl = set1_ps((float)(kl_share * e.factor)), tv = set1_ps((float)((1 - kl_share) * e.factor)), mean = set1_ps((float)below.total);
    for (int64_t i = 0; i < width; i += 16) {
        const Mask16 mask = lanes(width - i);
        const F32x16 q = maskz_loadu_ps(mask, terms + i), target = maskz_loadu_ps(mask, p + i);
        const F32x16 one_if_below = mask_mov_ps(set1_ps(1.0f), at_least(q, target), zero);
        const F32x16 slope = mul_ps(mul_ps(q, sub_ps(mean, one_if_below)), tv);
        gradient.store(i, mask, fmadd_ps(sub_ps(q, target), kl, slope));
    }
}

}  // namespace
