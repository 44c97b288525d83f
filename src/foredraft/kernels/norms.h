// The norms of a decoder: RMS norm (arXiv:1910.07467) and layer norm (arXiv:1607.06450).

#pragma once

#include "products.h"

namespace {

struct ReadCentered {
    const float *from, *weight, *bias;  // bias: or null
    F32x16 mean, factor;
    F32x16 operator()(int64_t i, Mask16 mask) const {
        const F32x16 x = mul_ps(sub_ps(maskz_loadu_ps(mask, from + i), mean), factor);
        const F32x16 scaled = mul_ps(x, maskz_loadu_ps(mask, weight + i));
        return bias == nullptr ? scaled : add_ps(scaled, maskz_loadu_ps(mask, bias + i));
    }
};

ReadCentered centered(const float* from, const Norm& norm, int64_t k, float epsilon) {
    F32x16 sum = setzero_ps(), squares = setzero_ps();
    for (int64_t i = 0; i < k; i += 16) sum = add_ps(sum, maskz_loadu_ps(lanes(k - i), from + i));
    const F32x16 mean = set1_ps(reduce_add_ps(sum) / (float)k);
    for (int64_t i = 0; i < k; i += 16) {
        const F32x16 x = maskz_mov_ps(lanes(k - i), sub_ps(maskz_loadu_ps(lanes(k - i), from + i), mean));
        squares = fmadd_ps(x, x, squares);
    }
    return {from, norm.weight, norm.bias, mean, set1_ps(1.0f / sqrtf(reduce_add_ps(squares) / (float)k + epsilon))};
}

// Calls use with a reader of the k numbers at `from`, normed.
template <class Use>
void with_norm(const Stack& s, const Norm& norm, const float* from, int64_t k, const Use& use) {
    if (norm.weight == nullptr) return use(ReadFloat{from});
    if (s.norm_kind == LAYER_NORM) return use(centered(from, norm, k, s.epsilon));
    use(normed(from, norm.weight, k, s.epsilon));
}

// to += scale * norm(from)
void add_normed(const Stack& s, const Norm& norm, const float* from, float* to, int64_t k) {
    with_norm(s, norm, from, k, [&](const auto& read) {
        for (int64_t i = 0; i < k; i += 16) {
            const Mask16 mask = lanes(k - i);
            const F32x16 x = mul_ps(read(i, mask), set1_ps(s.residual_scale));
            mask_storeu_ps(to + i, mask, add_ps(maskz_loadu_ps(mask, to + i), x));
        }
    });
}

}  // namespace
