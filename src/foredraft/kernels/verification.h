// Which sampled draft tokens are accepted, and the token after them.

#pragma once

#include "sampling.h"

namespace {

// A distribution over some ids; ids null: over all of them, in order.
struct Probs {
    const float* probs;
    const int64_t* ids;
    int64_t count;
    float of(int64_t id) const {
        if (ids == nullptr) return id < count ? probs[id] : 0.0f;
        for (int64_t i = 0; i < count; i++)
            if (ids[i] == id && probs[i] > 0) return probs[i];
        return 0.0f;
    }
};

// out = max(scale * p - q, 0) over the ids of p -> its sum. dense: [V] zeros, and zeros again afterwards; out may be null.
double residual(const Probs& p, const Probs& q, double scale, float* dense, float* out) {
    const F32x16 by = set1_ps((float)scale), zero = setzero_ps();
    const bool is_sparse = q.ids != nullptr;
    const float* other = is_sparse ? dense : q.probs;
    for (int64_t i = 0; is_sparse && i < q.count; i++)
        if (q.probs[i] > 0) dense[q.ids[i]] = q.probs[i];
    double total = 0;
    for (int64_t first = 0; first < p.count; first += STRETCH) {
        F32x16 sum = zero;
        for (int64_t i = first; i < std::min(p.count, first + STRETCH); i += 16) {
            const Mask16 mask = lanes(p.count - i);
            const F32x16 taken = p.ids == nullptr ? maskz_loadu_ps(mask, other + i) : gather_ps(mask, other, p.ids + i);
            const F32x16 left = max_ps(sub_ps(mul_ps(by, maskz_loadu_ps(mask, p.probs + i)), taken), zero);
            sum = mask_add_ps(sum, mask, sum, left);
            if (out) mask_storeu_ps(out + i, mask, left);
        }
        total += reduce_add_ps(sum);
    }
    for (int64_t i = 0; is_sparse && i < q.count; i++) dense[q.ids[i]] = 0;
    return total;
}

// Verifies sequence b by rejection sampling (arXiv:2211.17192) or block verification (arXiv:2403.10444), as block.py and
// rejection.py in foredraft/verify do. p: [lens[b] + 1], the target's distributions. stop: [lens[b] + 1], the probability of each
// number of accepted tokens. outcome: how many are accepted, and the next token.
void verify_one(const VerificationBatch& d, int64_t b, const std::vector<Probs>& p, std::vector<float>& dense, double* stop, int64_t* outcome) {
    const int64_t n = d.lens[b], at = d.places[b] * d.max_len;
    std::vector<Probs> q(n);
    std::vector<float> ones(1, 1.0f), weights(p[0].count);
    std::vector<double> scale(n + 1, 1.0), accept(n + 1, 1.0);
    const auto draft = [&](int64_t i) -> Probs {
        const int64_t row = d.prob_rows[at + i];
        if (row < 0) return {ones.data(), d.ids + at + i, 1};
        return {d.probs + row * d.probs_stride, d.kept_ids ? d.kept_ids + row * d.kept_stride : nullptr, d.columns};
    };
    const bool is_block = d.rules[b] == 1;
    double reached = 1;
    for (int64_t i = 0; i < n; i++) {
        q[i] = draft(i);
        const int64_t id = d.ids[at + i];
        const double drafted = q[i].of(id), ratio = drafted > 0 ? p[i].of(id) / drafted : 0;
        if (is_block) {
            scale[i + 1] = std::min(1.0, scale[i] * ratio);
        } else {
            stop[i] = reached * (1 - std::min(1.0, ratio));
            reached *= std::min(1.0, ratio);
        }
    }
    stop[n] = reached;
    if (is_block) {
        for (int64_t i = 1; i < n; i++) {
            const double mass = residual(p[i], q[i], scale[i], dense.data(), nullptr), whole = mass + 1 - scale[i];
            accept[i] = whole > 0 ? mass / whole : 1;
        }
        if (n > 0) accept[n] = scale[n];
        double missed = 1;
        for (int64_t i = n; i >= 0; missed *= 1 - accept[i--]) stop[i] = accept[i] * missed;
    }
    double total = 0, sum = 0;
    for (int64_t i = 0; i <= n; i++) total += stop[i];
    const double threshold = std::min(d.uniforms[2 * b] * total, std::nextafter(total, 0.0));
    int64_t num_accepted = 0;
    for (int64_t i = 0; i <= n && sum <= threshold; sum += stop[i++])
        if (stop[i] > 0) num_accepted = i;
    const Probs& last = p[num_accepted];
    const float* next_probs = last.probs;
    weights.resize(last.count);
    if (num_accepted < n && residual(last, q[num_accepted], is_block ? scale[num_accepted] : 1, dense.data(), weights.data()) > 0) next_probs = weights.data();
    const int64_t index = draw_index(next_probs, last.count, d.uniforms[2 * b + 1]);
    outcome[0] = num_accepted;
    outcome[1] = last.ids ? last.ids[index] : index;
}

}  // namespace
