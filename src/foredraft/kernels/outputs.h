// How a decoder processes and stores the sums of its products.

#pragma once

#include "products.h"

namespace {

// The activations of an MLP, of a gate and the value that it gates.

struct Silu {
    F32x16 operator()(F32x16 gate, F32x16 up) const { return mul_ps(silu(gate), up); }
};

struct GeluTanh {
    F32x16 operator()(F32x16 gate, F32x16 up) const { return mul_ps(gelu_tanh(gate), up); }
};

struct Gelu {
    F32x16 operator()(F32x16 gate, F32x16 up) const { return mul_ps(gelu(gate), up); }
};

struct Relu {
    F32x16 operator()(F32x16 gate, F32x16 up) const { return mul_ps(relu(gate), up); }
};

struct ClampedSwiglu {          // gpt-oss's
    float alpha, limit;
    F32x16 operator()(F32x16 gate, F32x16 up) const {
        const F32x16 most = set1_ps(limit), least = set1_ps(-limit);
        gate = min_ps(most, gate);  // if the second operand is NaN, so is the result
        up = max_ps(least, min_ps(most, up));
        return mul_ps(sigmoid_times(mul_ps(gate, set1_ps(alpha)), gate), add_ps(up, set1_ps(1.0f)));
    }
};

template <class Use>
void with_activation(const Stack& s, const Use& use) {
    switch (s.activation) {
        case GELU_TANH: return use(GeluTanh{});
        case GELU: return use(Gelu{});
        case RELU: return use(Relu{});
        case CLAMPED_SWIGLU: return use(ClampedSwiglu{s.swiglu_alpha, s.swiglu_limit});
        default: return use(Silu{});
    }
}

// A group is 32 gates and the 32 values that they gate.
template <class Activation>
struct StoreGated {
    float* to;
    int64_t stride;
    Activation activation;
    void operator()(int64_t r, int64_t o, int64_t, const float* sums) const {
        for (int64_t i = 0; i < 32; i += 16) {
            const int64_t at = o / 2 + i;
            if (at >= stride) return;
            mask_storeu_ps(to + r * stride + at, lanes(stride - at), activation(load_ps(sums + i), load_ps(sums + 32 + i)));
        }
    }
};

template <class Activation>
struct StoreActivated {
    float* to;
    int64_t stride;
    Activation activation;
    void operator()(int64_t r, int64_t o, int64_t count, const float* sums) const {
        for (int64_t i = 0; i < count; i += 16)
            mask_storeu_ps(to + r * stride + o + i, lanes(count - i), activation(load_ps(sums + i), set1_ps(1.0f)));
    }
};

struct AddScaled {
    float* to;
    int64_t stride;
    float scale;
    void operator()(int64_t r, int64_t o, int64_t count, const float* sums) const {
        for (int64_t i = 0; i < count; i += 16) {
            float* at = to + r * stride + o + i;
            const Mask16 mask = lanes(count - i);
            mask_storeu_ps(at, mask, add_ps(maskz_loadu_ps(mask, at), mul_ps(load_ps(sums + i), set1_ps(scale))));
        }
    }
};

// Logits are float32: near 20, where large vocabularies have their likeliest tokens, bfloat16 numbers are 1/8 apart.
struct StoreLogits {
    float* to;
    int64_t stride;
    float scale, softcap;       // softcap 0: none
    void operator()(int64_t r, int64_t o, int64_t count, const float* sums) const {
        for (int64_t i = 0; i < count; i += 16) {
            F32x16 logits = mul_ps(load_ps(sums + i), set1_ps(scale));
            if (softcap > 0) logits = soft_cap(logits, softcap);
            mask_storeu_ps(to + r * stride + o + i, lanes(count - i), logits);
        }
    }
};

}  // namespace
