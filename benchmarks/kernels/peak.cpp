// What a core can multiply at most: nothing but independent multiplications and additions in registers.

#include <cstdint>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

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

#ifdef __AMX_TILE__

// Four products of whole tiles, each with sums of its own.
template <bool IS_FLOAT>
int64_t run_tiles(int64_t steps) {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16};
    } shapes;
    _tile_loadconfig(&shapes);
    for (int64_t i = 0; i < steps; i++) {
        if constexpr (IS_FLOAT) {
            _tile_dpbf16ps(0, 4, 5);
            _tile_dpbf16ps(1, 4, 5);
            _tile_dpbf16ps(2, 4, 5);
            _tile_dpbf16ps(3, 4, 5);
        } else {
            _tile_dpbusd(0, 4, 5);
            _tile_dpbusd(1, 4, 5);
            _tile_dpbusd(2, 4, 5);
            _tile_dpbusd(3, 4, 5);
        }
    }
    _tile_release();
    return steps * 4 * 16 * 16 * (IS_FLOAT ? 32 : 64);
}

template <bool IS_FLOAT>
int64_t multiply_tiles(int64_t steps, int64_t num_threads) {
    syscall(SYS_arch_prctl, 0x1023, 18);  // asks for the tiles' registers
    int64_t pairs = 0;
#pragma omp parallel num_threads(num_threads) reduction(+ : pairs)
    pairs = run_tiles<IS_FLOAT>(steps / 4);
    return pairs;
}

#endif

}  // namespace

extern "C" {

#ifdef __AMX_TILE__

// -> pairs of numbers that were multiplied, by all threads together
int64_t multiply_floats(int64_t steps, int64_t num_threads) { return multiply_tiles<true>(steps, num_threads); }

int64_t multiply_int8(int64_t steps, int64_t num_threads) { return multiply_tiles<false>(steps, num_threads); }

int64_t multiply_int4(int64_t steps, int64_t num_threads) { return multiply_tiles<false>(steps, num_threads); }

#else

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

#endif

}
