// What a core can multiply at most: nothing but independent multiplications and additions in registers.

#include <cstdint>
#include <immintrin.h>

namespace {

constexpr int CHAINS = 12;  // more than an instruction's latency times its throughput

#ifdef __AVX512F__
using Floats = __m512;
using Integers = __m512i;
constexpr int64_t FLOAT_PAIRS = 32, INT8_PAIRS = 64, INT4_PAIRS = 64;  // of an instruction
Floats multiply(Floats sum, Integers x) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)x); }
template <int BITS>
Integers multiply(Integers sum, Integers x) { return _mm512_dpbusd_epi32(sum, x, x); }
#else
using Floats = __m256;
using Integers = __m256i;
constexpr int64_t FLOAT_PAIRS = 8, INT8_PAIRS = 16, INT4_PAIRS = 32;
Floats multiply(Floats sum, Integers x) { return _mm256_fmadd_ps(_mm256_castsi256_ps(x), _mm256_castsi256_ps(x), sum); }
template <int BITS>
Integers multiply(Integers sum, Integers x) {
    return BITS == 8 ? _mm256_add_epi32(sum, _mm256_madd_epi16(sum, x)) : _mm256_add_epi16(sum, _mm256_maddubs_epi16(sum, x));
}
#endif

template <class Sum, Sum (*MULTIPLY)(Sum, Integers)>
void run(int64_t steps) {
    Sum sums[CHAINS] = {};
    Integers x = {};
#pragma GCC unroll 12
    for (int c = 0; c < CHAINS; c++) asm volatile("" : "+x"(sums[c]));  // else the compiler sees that all are the same
    for (int64_t i = 0; i < steps; i++) {
        asm volatile("" : "+x"(x));
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) sums[c] = MULTIPLY(sums[c], x);
    }
#pragma GCC unroll 12
    for (int c = 0; c < CHAINS; c++) asm volatile("" ::"x"(sums[c]));
}

}  // namespace

extern "C" {

// -> pairs of numbers that were multiplied, by all threads together
int64_t multiply_floats(int64_t steps, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads)
    run<Floats, multiply>(steps);
    return steps * CHAINS * FLOAT_PAIRS * num_threads;
}

int64_t multiply_int8(int64_t steps, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads)
    run<Integers, multiply<8>>(steps);
    return steps * CHAINS * INT8_PAIRS * num_threads;
}

int64_t multiply_int4(int64_t steps, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads)
    run<Integers, multiply<4>>(steps);
    return steps * CHAINS * INT4_PAIRS * num_threads;
}

}
