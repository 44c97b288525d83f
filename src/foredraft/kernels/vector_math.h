// Functions of sixteen numbers, for the instruction set in use.

#pragma once

#ifdef __AVX512F__
#include "avx512.h"
#else
#include "avx2.h"
#endif

namespace {

// exp for -87 <= x <= 0. Polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2], error about 1e-7.
INLINE F32x16 exp_above(F32x16 x) {
    const F32x16 whole = round_ps(mul_ps(x, set1_ps(1.44269504f)));
    F32x16 rest = fnmadd_ps(whole, set1_ps(0.693359375f), x);
    rest = fnmadd_ps(whole, set1_ps(-2.12194440e-4f), rest);
    F32x16 sum = set1_ps(1.0f / 720);
    sum = fmadd_ps(sum, rest, set1_ps(1.0f / 120));
    sum = fmadd_ps(sum, rest, set1_ps(1.0f / 24));
    sum = fmadd_ps(sum, rest, set1_ps(1.0f / 6));
    sum = fmadd_ps(sum, rest, set1_ps(0.5f));
    sum = fmadd_ps(sum, rest, set1_ps(1.0f));
    sum = fmadd_ps(sum, rest, set1_ps(1.0f));
    return scalef_ps(sum, whole);
}

// exp for x <= 0; exactly 0 below -87; NaN stays NaN.
INLINE F32x16 exp_nonpositive(F32x16 x) {
    const F32x16 least = set1_ps(-87.0f);
    return zero_below(exp_above(max_ps(least, x)), x, least);  // if the second operand is NaN, so is the result
}

// exp for x <= 0, as a power of two: cheaper than exp_nonpositive, with an error that grows from 2e-7 near 0 to 1.4e-6 at -87. Exactly 0
// below -87; NaN stays NaN. Minimax polynomial of degree 5 for 2^r on [-1/2, 1/2].
INLINE F32x16 fast_exp_nonpositive(F32x16 x) {
    const F32x16 least = set1_ps(-87.0f), log2_e = set1_ps(1.44269504f), above = max_ps(least, x);
    const F32x16 whole = round_ps(mul_ps(above, log2_e)), rest = fmsub_ps(above, log2_e, whole);
    F32x16 sum = set1_ps(1.32764713e-3f);
    sum = fmadd_ps(sum, rest, set1_ps(9.67554096e-3f));
    sum = fmadd_ps(sum, rest, set1_ps(0.0555071309f));
    sum = fmadd_ps(sum, rest, set1_ps(0.240221202f));
    sum = fmadd_ps(sum, rest, set1_ps(0.693146944f));
    sum = fmadd_ps(sum, rest, set1_ps(1.00000012f));
    return zero_below(scalef_ps(sum, whole), x, least);
}

// factor * sigmoid(x), computed from exp(-|x|) so that nothing overflows
INLINE F32x16 sigmoid_times(F32x16 x, F32x16 factor) {
    const F32x16 one = set1_ps(1.0f);
    const F32x16 e = exp_nonpositive(sub_ps(setzero_ps(), abs_ps(x)));
    const Mask16 positive = at_least(x, setzero_ps());
    return div_ps(mul_ps(factor, mask_mov_ps(e, positive, one)), add_ps(one, e));
}

INLINE F32x16 silu(F32x16 x) { return sigmoid_times(x, x); }

// The tanh approximation of GELU (arXiv:1606.08415): 0.5 x (1 + tanh(u)) = x sigmoid(2 u)
INLINE F32x16 gelu_tanh(F32x16 x) {
    const F32x16 cubic = fmadd_ps(mul_ps(x, x), set1_ps(0.07135481627f), set1_ps(1.595769122f));
    return sigmoid_times(mul_ps(x, cubic), x);
}

// GELU: x times the normal CDF at x. The smaller tail is computed by formula 7.1.26 of Abramowitz and Stegun, to 8e-8
INLINE F32x16 gelu(F32x16 x) {
    const F32x16 one = set1_ps(1.0f), z = mul_ps(abs_ps(x), set1_ps(0.70710678f));
    const F32x16 t = div_ps(one, fmadd_ps(z, set1_ps(0.3275911f), one));
    F32x16 sum = set1_ps(0.5307027145f);
    sum = fmadd_ps(sum, t, set1_ps(-0.7265760135f));
    sum = fmadd_ps(sum, t, set1_ps(0.7107068705f));
    sum = fmadd_ps(sum, t, set1_ps(-0.142248368f));
    sum = fmadd_ps(sum, t, set1_ps(0.127414796f));
    const F32x16 tail = mul_ps(mul_ps(sum, t), exp_nonpositive(sub_ps(setzero_ps(), mul_ps(z, z))));
    return mul_ps(x, mask_mov_ps(tail, at_least(x, setzero_ps()), sub_ps(one, tail)));
}

INLINE F32x16 relu(F32x16 x) { return max_ps(setzero_ps(), x); }  // if the second operand is NaN, so is the result

// tanh(x), to a relative error of 2e-7. Below 0.625 a polynomial, a least squares fit of tanh(x) / x - 1 in x^2: a difference of
// exponentials would lose digits there. NaN stays NaN.
INLINE F32x16 tanh_ps(F32x16 x) {
    const F32x16 one = set1_ps(1.0f), size = abs_ps(x), square = mul_ps(x, x);
    F32x16 sum = set1_ps(-0.00605369752f);
    sum = fmadd_ps(sum, square, set1_ps(0.0209681871f));
    sum = fmadd_ps(sum, square, set1_ps(-0.053844989f));
    sum = fmadd_ps(sum, square, set1_ps(0.133327328f));
    sum = fmadd_ps(sum, square, set1_ps(-0.333333286f));
    const F32x16 small = fmadd_ps(mul_ps(x, square), sum, x);
    const F32x16 e = exp_nonpositive(mul_ps(size, set1_ps(-2.0f)));
    const F32x16 large = sub_ps(one, div_ps(add_ps(e, e), add_ps(one, e)));
    const F32x16 signed_large = mask_mov_ps(sub_ps(setzero_ps(), large), at_least(x, setzero_ps()), large);
    return mask_mov_ps(small, at_least(size, set1_ps(0.625f)), signed_large);
}

// cap * tanh(x / cap)
INLINE F32x16 soft_cap(F32x16 x, float cap) { return mul_ps(tanh_ps(div_ps(x, set1_ps(cap))), set1_ps(cap)); }

}  // namespace
