// Functions of sixteen numbers, and the inner loops of products and attention, for AVX2 with FMA: two registers of eight.

#pragma once

#include <algorithm>

#include "base.h"
#include "structs.h"

namespace {

struct F32x16 { __m256 low, high; };
struct F64x8 { __m256d low, high; };
struct I512 { __m256i low, high; };  // integers of any width
using Whole = int16_t;               // a row's number for an int8 product
using Short = float;                 // a row's number for a bfloat16 product, rounded to bfloat16

constexpr int INT8_UNIT = 2;         // adjacent inputs of one output in a packed int8 matrix, and in a bfloat16 matrix
constexpr int OFFSET = 0;
constexpr bool SPARSE = false;              // see Prefetch
constexpr int PREFETCH = 4096;              // bytes ahead: past the end of the page, at which the hardware's prefetcher stops

// ------------------------------------------------------------------------------------------------------- instructions

// expands each lane's bit to all bits of the lane
__m256i lane_mask(Mask8 mask) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(mask), bits), bits);
}

Mask16 joined(int low, int high) { return (Mask16)(low | high << 8); }

__m256 masked_load(Mask8 mask, const float* from) {
    return mask == 0xff ? _mm256_loadu_ps(from) : _mm256_maskload_ps(from, lane_mask(mask));
}

void masked_store(float* to, Mask8 mask, __m256 x) {
    if (mask == 0xff) _mm256_storeu_ps(to, x); else _mm256_maskstore_ps(to, lane_mask(mask), x);
}

__m256 blend(__m256 other, Mask8 mask, __m256 x) { return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(lane_mask(mask))); }

F32x16 setzero_ps() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
F32x16 set1_ps(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
F32x16 load_ps(const float* from) { return {_mm256_load_ps(from), _mm256_load_ps(from + 8)}; }
F32x16 loadu_ps(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
F32x16 maskz_loadu_ps(Mask16 mask, const float* from) { return {masked_load((Mask8)mask, from), masked_load(mask >> 8, from + 8)}; }
void store_ps(float* to, F32x16 x) { _mm256_store_ps(to, x.low); _mm256_store_ps(to + 8, x.high); }
void storeu_ps(float* to, F32x16 x) { _mm256_storeu_ps(to, x.low); _mm256_storeu_ps(to + 8, x.high); }
void mask_storeu_ps(float* to, Mask16 mask, F32x16 x) { masked_store(to, (Mask8)mask, x.low); masked_store(to + 8, mask >> 8, x.high); }
F32x16 add_ps(F32x16 a, F32x16 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
F32x16 sub_ps(F32x16 a, F32x16 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
F32x16 mul_ps(F32x16 a, F32x16 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
F32x16 div_ps(F32x16 a, F32x16 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
F32x16 min_ps(F32x16 a, F32x16 b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
F32x16 max_ps(F32x16 a, F32x16 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
F32x16 fmadd_ps(F32x16 a, F32x16 b, F32x16 c) { return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)}; }
F32x16 fnmadd_ps(F32x16 a, F32x16 b, F32x16 c) { return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)}; }
F32x16 fmsub_ps(F32x16 a, F32x16 b, F32x16 c) { return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)}; }

F32x16 abs_ps(F32x16 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}

F32x16 round_ps(F32x16 x) {
    return {_mm256_round_ps(x.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), _mm256_round_ps(x.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

F32x16 mask_mov_ps(F32x16 other, Mask16 mask, F32x16 x) { return {blend(other.low, (Mask8)mask, x.low), blend(other.high, mask >> 8, x.high)}; }
F32x16 maskz_mov_ps(Mask16 mask, F32x16 x) { return mask_mov_ps(setzero_ps(), mask, x); }
F32x16 mask_add_ps(F32x16 other, Mask16 mask, F32x16 a, F32x16 b) { return mask_mov_ps(other, mask, add_ps(a, b)); }
F32x16 mask_loadu_ps(F32x16 other, Mask16 mask, const float* from) {
    return mask == 0xffff ? loadu_ps(from) : mask_mov_ps(other, mask, maskz_loadu_ps(mask, from));
}

float first_lane(F32x16 x) { return _mm256_cvtss_f32(x.low); }

float reduce_add_ps(F32x16 x) {
    const __m256 eight = _mm256_add_ps(x.low, x.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

float reduce_max_ps(F32x16 x) {
    const __m256 eight = _mm256_max_ps(x.low, x.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

template <int PREDICATE>
Mask16 compared(F32x16 a, F32x16 b) {
    return joined(_mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, PREDICATE)), _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, PREDICATE)));
}

Mask16 at_least(F32x16 a, F32x16 b) { return compared<_CMP_GE_OQ>(a, b); }
Mask16 equal(F32x16 a, F32x16 b) { return compared<_CMP_EQ_OQ>(a, b); }
Mask16 is_nan_ps(F32x16 x) { return compared<_CMP_UNORD_Q>(x, x); }

// y where x is at least `least` or NaN (y is then NaN too), else 0
__m256 zero_below(__m256 y, __m256 x, __m256 least) { return _mm256_and_ps(y, _mm256_cmp_ps(x, least, _CMP_NLT_UQ)); }

F32x16 zero_below(F32x16 y, F32x16 x, F32x16 least) { return {zero_below(y.low, x.low, least.low), zero_below(y.high, x.high, least.high)}; }

I512 set1_epi32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
I512 setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h, int i, int j, int k, int l, int m, int n, int o, int p) {
    return {_mm256_setr_epi32(a, b, c, d, e, f, g, h), _mm256_setr_epi32(i, j, k, l, m, n, o, p)};
}
I512 load_si512(const void* from) { return {_mm256_load_si256((const __m256i*)from), _mm256_load_si256((const __m256i*)from + 1)}; }
I512 maskz_loadu_epi32(Mask16 mask, const int32_t* from) {
    return {_mm256_maskload_epi32(from, lane_mask((Mask8)mask)), _mm256_maskload_epi32(from + 8, lane_mask(mask >> 8))};
}
I512 add_epi32(I512 a, I512 b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }

I512 max_epi32(I512 a, I512 b) { return {_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)}; }
I512 mullo_epi32(I512 a, I512 b) { return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)}; }

int32_t reduce_max_epi32(I512 x) {
    const __m256i eight = _mm256_max_epi32(x.low, x.high);
    const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
    return std::max(_mm_cvtsi128_si32(two), _mm_extract_epi32(two, 1));
}

void mask_storeu_epi32(int32_t* to, Mask16 mask, I512 x) {
    _mm256_maskstore_epi32(to, lane_mask((Mask8)mask), x.low);
    _mm256_maskstore_epi32(to + 8, lane_mask(mask >> 8), x.high);
}

I512 bits_of(F32x16 x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }
F32x16 as_ps(I512 bits) { return {_mm256_castsi256_ps(bits.low), _mm256_castsi256_ps(bits.high)}; }

I512 sub_epi32(I512 a, I512 b) { return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)}; }
Mask16 cmpge_epi32_mask(I512 a, I512 b) {
    const __m256i low = _mm256_cmpgt_epi32(b.low, a.low), high = _mm256_cmpgt_epi32(b.high, a.high);
    return (Mask16)~joined(_mm256_movemask_ps(_mm256_castsi256_ps(low)), _mm256_movemask_ps(_mm256_castsi256_ps(high)));
}
Mask16 cmple_epi32_mask(I512 a, I512 b) { return cmpge_epi32_mask(b, a); }
F32x16 cvtepi32_ps(I512 x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
I512 cvtps_epi32(F32x16 x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }

// x times 2 to an integer power from -126 to 127
F32x16 scalef_ps(F32x16 x, F32x16 power) {
    const I512 exponent = add_epi32(cvtps_epi32(power), set1_epi32(127));
    const F32x16 scale = {_mm256_castsi256_ps(_mm256_slli_epi32(exponent.low, 23)), _mm256_castsi256_ps(_mm256_slli_epi32(exponent.high, 23))};
    return mul_ps(x, scale);
}

F64x8 setzero_pd() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }
F64x8 set1_pd(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
void store_pd(double* to, F64x8 x) { _mm256_store_pd(to, x.low); _mm256_store_pd(to + 4, x.high); }
F64x8 add_pd(F64x8 a, F64x8 b) { return {_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)}; }
F64x8 mul_pd(F64x8 a, F64x8 b) { return {_mm256_mul_pd(a.low, b.low), _mm256_mul_pd(a.high, b.high)}; }
F64x8 fnmadd_pd(F64x8 a, F64x8 b, F64x8 c) { return {_mm256_fnmadd_pd(a.low, b.low, c.low), _mm256_fnmadd_pd(a.high, b.high, c.high)}; }

double reduce_add_pd(F64x8 x) {
    const __m256d four = _mm256_add_pd(x.low, x.high);
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

Mask8 at_least(F64x8 a, F64x8 b) {
    const int low = _mm256_movemask_pd(_mm256_cmp_pd(a.low, b.low, _CMP_GE_OQ)), high = _mm256_movemask_pd(_mm256_cmp_pd(a.high, b.high, _CMP_GE_OQ));
    return (Mask8)(low | high << 4);
}

I512 set1_epi64(int64_t x) { return {_mm256_set1_epi64x(x), _mm256_set1_epi64x(x)}; }
I512 setr_epi64(int64_t a, int64_t b, int64_t c, int64_t d, int64_t e, int64_t f, int64_t g, int64_t h) {
    return {_mm256_setr_epi64x(a, b, c, d), _mm256_setr_epi64x(e, f, g, h)};
}
I512 maskz_loadu_epi64(Mask8 mask, const int64_t* from) {
    const __m256i bits = _mm256_setr_epi64x(1, 2, 4, 8), low = _mm256_set1_epi64x(mask), high = _mm256_set1_epi64x(mask >> 4);
    const long long* at = (const long long*)from;
    return {_mm256_maskload_epi64(at, _mm256_cmpeq_epi64(_mm256_and_si256(low, bits), bits)),
            _mm256_maskload_epi64(at + 4, _mm256_cmpeq_epi64(_mm256_and_si256(high, bits), bits))};
}
I512 add_epi64(I512 a, I512 b) { return {_mm256_add_epi64(a.low, b.low), _mm256_add_epi64(a.high, b.high)}; }
I512 xor_si512(I512 a, I512 b) { return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)}; }
template <int BITS>
I512 srli_epi64(I512 x) { return {_mm256_srli_epi64(x.low, BITS), _mm256_srli_epi64(x.high, BITS)}; }

__m256i mullo_four(__m256i a, __m256i b) {  // from the products of their halves; that of the upper halves does not reach the low 64 bits
    const __m256i crossed = _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(a, 32), b), _mm256_mul_epu32(a, _mm256_srli_epi64(b, 32)));
    return _mm256_add_epi64(_mm256_mul_epu32(a, b), _mm256_slli_epi64(crossed, 32));
}
I512 mullo_epi64(I512 a, I512 b) { return {mullo_four(a.low, b.low), mullo_four(a.high, b.high)}; }

F64x8 cvtepu52_pd(I512 x) {  // integers below 2^52, as the fraction of a number between 2^52 and 2^53
    const __m256d first = _mm256_set1_pd(0x1p52);
    const __m256i bits = _mm256_castpd_si256(first);
    return {_mm256_sub_pd(_mm256_castsi256_pd(_mm256_or_si256(x.low, bits)), first), _mm256_sub_pd(_mm256_castsi256_pd(_mm256_or_si256(x.high, bits)), first)};
}

// Has x computed here: otherwise GCC 12 moves additions down, and keeps their operands in memory.
INLINE void pin(F32x16& x) { asm volatile("" : "+x"(x.low), "+x"(x.high)); }

// ------------------------------------------------------------------------------------------------ reading and writing

F32x16 widen(__m256i bf16) {
    const __m256i low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(bf16)), high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(bf16, 1));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
}

F32x16 load_bf16(const uint16_t* from, Mask16 mask, uint16_t other = 0) {
    if (mask == 0xffff) return widen(_mm256_loadu_si256((const __m256i*)from));
    alignas(32) uint16_t each[16];
    for (int i = 0; i < 16; i++) each[i] = mask >> i & 1 ? from[i] : other;
    return widen(_mm256_load_si256((const __m256i*)each));
}

F32x16 load_bf16_or_least(const uint16_t* from, Mask16 mask) { return load_bf16(from, mask, 0xff80); }  // -inf where the mask is 0

// the bits of the nearest bfloat16, ties to even, in the upper half of each lane; NaN stays NaN
__m256i rounded(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i near = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(near, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), nan);
}

void store_bf16(uint16_t* to, Mask16 mask, F32x16 x) {
    const __m256i low = _mm256_srli_epi32(rounded(x.low), 16), high = _mm256_srli_epi32(rounded(x.high), 16);
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
    if (mask == 0xffff) return _mm256_storeu_si256((__m256i*)to, both);
    alignas(32) uint16_t each[16];
    _mm256_store_si256((__m256i*)each, both);
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) to[i] = each[i];
}

void store_short(Short* to, F32x16 x) {
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
    _mm256_storeu_ps(to, _mm256_castsi256_ps(_mm256_and_si256(rounded(x.low), upper)));
    _mm256_storeu_ps(to + 8, _mm256_castsi256_ps(_mm256_and_si256(rounded(x.high), upper)));
}

__m256i lowest_byte(__m256i x) { return _mm256_srai_epi32(_mm256_slli_epi32(x, 24), 24); }

__m256i lower_half(__m256i x) { return _mm256_srai_epi32(_mm256_slli_epi32(x, 16), 16); }

// Numbers too large to be integers, from infinity times a row's smallest numbers, are stored as 0.
void store_whole(int16_t* to, I512 x) {
    const __m256i both = _mm256_packs_epi32(lower_half(x.low), lower_half(x.high));
    _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(both, 0xd8));
}

void store_whole(int8_t* to, I512 x) {
    const __m256i shorts = _mm256_packs_epi32(lowest_byte(x.low), lowest_byte(x.high));
    const __m256i bytes = _mm256_packs_epi16(_mm256_permute4x64_epi64(shorts, 0xd8), _mm256_setzero_si256());
    _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(bytes, 0xd8)));
}

Mask16 nonzero_bytes(Mask16 mask, const uint8_t* from) {
    if (mask == 0xffff) {
        const __m128i bytes = _mm_loadu_si128((const __m128i*)from);
        return (Mask16)~_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_setzero_si128()));
    }
    Mask16 found = 0;
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1 && from[i]) found |= (Mask16)(1u << i);
    return found;
}

F64x8 load_as_pd(Mask8 mask, const float* from) {
    const __m256 x = masked_load(mask, from);
    return {_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))};
}

F32x16 gather_ps(Mask16 mask, const float* from, const int64_t* places) {
    alignas(32) float each[16] = {};
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) each[i] = from[places[i]];
    return load_ps(each);
}

// -------------------------------------------------------------------------------------------------------- inner loops

constexpr int BESIDE = 16;              // outputs that are stored together: all their inputs come before those of the next outputs

// The place in a packed group of the `step`-th unit of inputs of output j.
int64_t packed_place(int64_t j, int64_t step, int64_t num_steps) { return (j / BESIDE * num_steps + step) * BESIDE + j % BESIDE; }

constexpr int64_t PART_LIMIT = 192 << 10;  // two such parts fit into a second-level cache of 512 KB

// The number of parts in which blocks of rows multiply a group of weights of so many bytes in turn.
int parts_of_group(int64_t bytes) { return bytes > PART_LIMIT ? GROUP / BESIDE : 1; }

// Sums of R rows for the outputs of a group, or of a part, V vectors of eight outputs at a time: always four to twelve sums, which hide
// the latency of additions and leave registers for the weights.

constexpr int VECTORS_OF_SIXTEEN = 2;

// The address of vector v of a tile that begins at `at`. sixteen: bytes from 16 outputs to the next 16; vector: from 8 to the next 8
INLINE const char* vector_at(const char* at, int64_t sixteen, int64_t vector, int v) {
    return at + v / VECTORS_OF_SIXTEEN * sixteen + v % VECTORS_OF_SIXTEEN * vector;
}

// If loops of several kinds are inlined into one function, their addresses are spilled to memory.
#define NOINLINE __attribute__((noinline))

// Keeps integer sums in order and in registers: GCC 12 would add products first, and then keep sums in memory.
INLINE __m256i pinned(__m256i x) {
    asm volatile("" : "+x"(x));
    return x;
}

__m256i spread_four(const char* from) {
    int32_t four;
    memcpy(&four, from, 4);
    return _mm256_set1_epi32(four);
}

// Multiplies two inputs of int8 weights by those of 16-bit rows.
template <int R, int V>
INLINE void add_pairs(const char* at, int64_t sixteen, const char* in, int64_t stride, __m256i (*sums)[V]) {
    __m256i w[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) w[v] = _mm256_cvtepi8_epi16(_mm_load_si128((const __m128i*)vector_at(at, sixteen, 16, v)));
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const __m256i x = spread_four(in + r * stride);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sums[r][v] = pinned(_mm256_add_epi32(sums[r][v], _mm256_madd_epi16(x, w[v])));
    }
}

// Whether each line is fetched ahead at once, not in two halves. Measured: a gain of 8 % for these R, and a loss for others.
template <int R>
constexpr bool FETCHES_LINES = R == 4 || R == 5;

// Whether weights are fetched ahead a page at a time. Products of few rows are limited by memory; the hardware's prefetcher stops at
// every page, and reads fastest if no other fetches compete with it.
template <int R>
constexpr bool FETCHES_PAGES = R <= 2;

template <int R>
NOINLINE void tile_int8(int64_t k, int outputs, const char* weights, const char* in, int64_t stride, Prefetch ahead, float (*out)[GROUP]) {
    constexpr int V = 2;
    const int64_t sixteen = round_up(k, 2) * 16;
    for (int first = 0; first < outputs / 8; first += V) {
        const char *at = vector_at(weights, sixteen, 16, first), *x = in;
        __m256i sums[R][V];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sums[r][v] = _mm256_setzero_si256();
        int64_t i = 0;
        for (; FETCHES_PAGES<R> && i < k;) {
            const int64_t last = std::min(k, i + PAGE / 16);
            ahead.will_read(16 * (last - i));
            for (; i + 2 < last; i += 4, at += 64, x += 8) {
                add_pairs<R, V>(at, sixteen, x, stride, sums);
                add_pairs<R, V>(at + 32, sixteen, x + 4, stride, sums);
            }
            for (; i < last; i += 2, at += 32, x += 4) add_pairs<R, V>(at, sixteen, x, stride, sums);
        }
        for (; FETCHES_LINES<R> && i + 2 < k; i += 4, at += 64, x += 8) {
            ahead.has_read(64);
            add_pairs<R, V>(at, sixteen, x, stride, sums);
            add_pairs<R, V>(at + 32, sixteen, x + 4, stride, sums);
        }
        for (; i < k; i += 2, at += 32, x += 4) {
            ahead.has_read(16 * V);
            add_pairs<R, V>(at, sixteen, x, stride, sums);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) _mm256_store_si256((__m256i*)(out[r] + 8 * (first + v)), sums[r][v]);
    }
}

template <int R>
NOINLINE void tile_bf16(int64_t k, int outputs, const char* weights, const char* in, int64_t stride, Prefetch ahead, float (*out)[GROUP]) {
    constexpr int V = R == 1 ? 8 : R == 2 ? 4 : 2;
    const int64_t sixteen = round_up(k, 2) * 32;
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
    for (int first = 0; first < outputs / 8; first += V) {
        const char* at = vector_at(weights, sixteen, 32, first);
        __m256 sums[R][V];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sums[r][v] = _mm256_setzero_ps();
        for (int64_t i = 0; i < k; i += 2, at += 64) {
#pragma GCC unroll 8
            for (int v = 0; v < V; v += 2) {
                ahead.has_read(64);
                __m256i both[2];
#pragma GCC unroll 2
                for (int t = 0; t < 2; t++) both[t] = _mm256_load_si256((const __m256i*)vector_at(at, sixteen, 32, v + t));
#pragma GCC unroll 2
                for (int odd = 0; odd < 2; odd++) {
                    __m256 w[2];
#pragma GCC unroll 2
                    for (int t = 0; t < 2; t++)
                        w[t] = _mm256_castsi256_ps(odd ? _mm256_and_si256(both[t], upper) : _mm256_slli_epi32(both[t], 16));
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) {  // one load for two vectors: otherwise loads are the bottleneck
                        const __m256 spread = _mm256_broadcast_ss((const float*)(in + r * stride) + i + odd);
#pragma GCC unroll 2
                        for (int t = 0; t < 2; t++) sums[r][v + t] = _mm256_fmadd_ps(spread, w[t], sums[r][v + t]);
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) _mm256_store_ps(out[r] + 8 * (first + v), sums[r][v]);
    }
}

// Products with weights that have a scale for each group of inputs. A vector is eight outputs, with four adjacent inputs of each, or
// two of eight bits; a line is 16 outputs.

using GroupWhole4 = int8_t;             // a row's number for weights of four bits
using GroupWhole8 = int16_t;            // for weights of eight bits
constexpr int GROUPED_ROWS = 6;         // the most rows of a tile
constexpr int EIGHT_BIT_ZERO = 0;       // the code of 0 among packed codes of eight bits, and among levels

// Sums of up to eight pairs of products of codes 0 .. 15 fit 16 bits.
constexpr int LINES_OF_SHORT_SUMS = 4;

bool has_short_sums(const Groups& g) { return g.steps <= LINES_OF_SHORT_SUMS; }

// The integers that the sums of sixteen groups start from: the corrections for the zero code. A short sum is in two lanes of 16 bits,
// and each starts from half, so its magnitude is at most 4 * 16 * 127 + (15 - 4) * 16 * 127, which is below 2^15.
I512 start_of_sums(const Groups& g, I512 correction) {
    if (!has_short_sums(g)) return correction;
    const auto halves = [](__m256i x) {
        const __m256i half = _mm256_srai_epi32(x, 1);
        return _mm256_blend_epi16(half, _mm256_slli_epi32(half, 16), 0xaa);
    };
    return {halves(correction.low), halves(correction.high)};
}

// Adds a line of codes 0 .. 15 to sums of 16 bits.
template <int R, int V>
INLINE void add_nibbles(const char* at, int64_t sixteen, const char* in, int64_t stride, Prefetch& ahead, __m256i (*sums)[V]) {
    const __m256i low_bits = _mm256_set1_epi8(15);
    __m256i low[V], high[V];
    ahead.has_read(32 * V);
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
        const __m256i both = _mm256_load_si256((const __m256i*)vector_at(at, sixteen, 32, v));
        low[v] = pinned(_mm256_and_si256(both, low_bits));
        high[v] = pinned(_mm256_and_si256(_mm256_srli_epi16(both, 4), low_bits));
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const __m256i x = spread_four(in + r * stride), y = spread_four(in + r * stride + 4);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sums[r][v] = pinned(_mm256_add_epi16(sums[r][v], _mm256_maddubs_epi16(low[v], x)));
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sums[r][v] = pinned(_mm256_add_epi16(sums[r][v], _mm256_maddubs_epi16(high[v], y)));
    }
}

// The sums of a group of four-bit codes. start: of the sums of each row
template <int R, int V>
INLINE void sum_nibbles(const Groups& g, const char* at, int64_t sixteen, const char* in, int64_t stride, const char* start, Prefetch& ahead,
                        __m256i (*sums)[V]) {
    constexpr int LINE = 4 * BESIDE, INPUTS = 8;
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sums[r][v] = spread_four(start + r * stride);
    if (has_short_sums(g)) {
        if (R <= 2 && g.steps == LINES_OF_SHORT_SUMS) {  // more rows are faster in a loop
#pragma GCC unroll 4
            for (int line = 0; line < LINES_OF_SHORT_SUMS; line++) add_nibbles<R, V>(at + LINE * line, sixteen, in + INPUTS * line, stride, ahead, sums);
        } else {
            for (int64_t line = 0; line < g.steps; line++, at += LINE, in += INPUTS) add_nibbles<R, V>(at, sixteen, in, stride, ahead, sums);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sums[r][v] = _mm256_madd_epi16(sums[r][v], ones);
        return;
    }
    for (int64_t line = 0; line < g.steps;) {
        __m256i part[R][V];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) part[r][v] = _mm256_setzero_si256();
        for (const int64_t end = std::min(g.steps, line + LINES_OF_SHORT_SUMS); line < end; line++, at += LINE, in += INPUTS)
            add_nibbles<R, V>(at, sixteen, in, stride, ahead, part);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sums[r][v] = _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(part[r][v], ones));
    }
}

// Adds products of signed weights: their magnitudes times rows multiplied by their signs; 2 * 128 * 127 is still below 2^15.
template <int R, int V>
INLINE void add_signed(const __m256i* weights, const char* in, int64_t stride, __m256i (*sums)[V]) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i magnitudes[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) magnitudes[v] = _mm256_abs_epi8(weights[v]);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const __m256i x = spread_four(in + r * stride);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            const __m256i pairs = _mm256_maddubs_epi16(magnitudes[v], _mm256_sign_epi8(x, weights[v]));
            sums[r][v] = pinned(_mm256_add_epi32(sums[r][v], _mm256_madd_epi16(pairs, ones)));
        }
    }
}

template <int R, int V>
INLINE void add_levels(__m256i table, const char* at, int64_t sixteen, const char* in, int64_t stride,
                                                      __m256i (*sums)[V]) {
    const __m256i low_bits = _mm256_set1_epi8(15);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        __m256i levels[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            const __m256i both = _mm256_load_si256((const __m256i*)vector_at(at, sixteen, 32, v));
            levels[v] = _mm256_shuffle_epi8(table, _mm256_and_si256(half ? _mm256_srli_epi16(both, 4) : both, low_bits));
        }
        add_signed<R, V>(levels, in + 4 * half, stride, sums);
    }
}

// The integer sums of one group.
template <int R, int V, int KIND>
INLINE void sum_group(const Groups& g, __m256i table, const char* at, int64_t sixteen, const char* in, int64_t stride, const char* start,
                      Prefetch& ahead, __m256i (*sums)[V]) {
    if (KIND == INT4_GROUPS) return sum_nibbles<R, V>(g, at, sixteen, in, stride, start, ahead, sums);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sums[r][v] = _mm256_setzero_si256();
    for (int64_t step = 0; step < g.steps; step++) {
        if (KIND == INT8_GROUPS) {
            ahead.has_read(16 * V);
            add_pairs<R, V>(at + 2 * BESIDE * step, sixteen, in + 4 * step, stride, sums);
        } else {
            ahead.has_read(32 * V);
            add_levels<R, V>(table, at + 4 * BESIDE * step, sixteen, in + 8 * step, stride, sums);
        }
    }
}

__m256 load_eight_scales(const char* from, int64_t scale_bytes) {
    return scale_bytes == 2 ? _mm256_cvtph_ps(_mm_load_si128((const __m128i*)from)) : _mm256_load_ps((const float*)from);
}

// in: R rows of integers. out: the sums of all groups, each times its scales, plus the offsets times the sums of the rows.
template <int R, int KIND>
NOINLINE void tile_groups(const Groups& g, int outputs, const char* weights, const char* in, int64_t stride, Prefetch ahead, float (*out)[GROUP]) {
    constexpr int V = 2, VECTOR = KIND == INT8_GROUPS ? 16 : 32;  // bytes of eight outputs in a line
    const int64_t head = BESIDE * g.scale_bytes, heads = head * (g.has_offsets ? 2 : 1), lines = 2 * VECTOR * g.steps;
    const int64_t sixteen = g.count * (heads + lines), inputs = KIND == INT4_GROUPS || KIND == LEVEL_GROUPS ? 8 * g.steps : 4 * g.steps;
    const __m256i table = KIND == LEVEL_GROUPS ? _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)g.levels)) : _mm256_setzero_si256();
    for (int first = 0; first < outputs / 8; first += V) {
        const char *at = vector_at(weights, sixteen, VECTOR, first), *x = in, *constants = in + g.constants_at;
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) _mm256_store_ps(out[r] + 8 * (first + v), _mm256_setzero_ps());
        for (int64_t group = 0; group < g.count; group++, constants += 4, at += heads + lines, x += inputs) {
            __m256i sums[R][V];
            ahead.has_read(heads * V / 2);
            sum_group<R, V, KIND>(g, table, at + heads, sixteen, x, stride, constants, ahead, sums);
            __m256 scale[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) scale[v] = load_eight_scales(vector_at(at, sixteen, 8 * g.scale_bytes, v), g.scale_bytes);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const __m256 row_scale = _mm256_broadcast_ss((const float*)(constants + r * stride) + g.count);
#pragma GCC unroll 8
                for (int v = 0; v < V; v++) {
                    const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[r][v]), scale[v]);
                    float* total = out[r] + 8 * (first + v);
                    _mm256_store_ps(total, _mm256_fmadd_ps(scaled, row_scale, _mm256_load_ps(total)));
                }
            }
            if (g.has_offsets) {
                __m256 offset[V];
#pragma GCC unroll 8
                for (int v = 0; v < V; v++) offset[v] = load_eight_scales(vector_at(at, sixteen, 8 * g.scale_bytes, v) + head, g.scale_bytes);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    const __m256 sum = _mm256_broadcast_ss((const float*)(constants + r * stride) + 2 * g.count);
#pragma GCC unroll 8
                    for (int v = 0; v < V; v++) {
                        float* total = out[r] + 8 * (first + v);
                        _mm256_store_ps(total, _mm256_fmadd_ps(sum, offset[v], _mm256_load_ps(total)));
                    }
                }
            }
            asm volatile("" ::: "memory");  // keep the totals in memory: registers are for the integer sums of a group
        }
    }
}

// 8 vectors of 8 partial sums -> the 8 totals, added by a fixed tree
__m256 totals(const __m256* x) {
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

__m256 low_pairs(__m256 a, __m256 b) { return _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(a), _mm256_castps_pd(b))); }
__m256 high_pairs(__m256 a, __m256 b) { return _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(a), _mm256_castps_pd(b))); }
F32x16 low_pairs(F32x16 a, F32x16 b) { return {low_pairs(a.low, b.low), low_pairs(a.high, b.high)}; }
F32x16 high_pairs(F32x16 a, F32x16 b) { return {high_pairs(a.low, b.low), high_pairs(a.high, b.high)}; }
template <int WHICH>
F32x16 halves(F32x16 a, F32x16 b) { return {_mm256_permute2f128_ps(a.low, b.low, WHICH), _mm256_permute2f128_ps(a.high, b.high, WHICH)}; }

// 16 vectors of 16 numbers -> each vector's numbers put together by `add`
template <class Add>
INLINE F32x16 reduced(const F32x16* x, const Add& add) {
    __m256 a[8], b[8];
    F32x16 found;
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        // the halves of x[i] and of x[i + 8] are one vector each, which are reduced side by side
        const F32x16 both = add(F32x16{x[i].low, x[i + 8].low}, F32x16{x[i].high, x[i + 8].high});
        a[i] = both.low, b[i] = both.high;
    }
    F32x16 pairs[4], fours[2];
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++)
        pairs[i] = add(F32x16{_mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm256_unpacklo_ps(b[2 * i], b[2 * i + 1])},
                       F32x16{_mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]), _mm256_unpackhi_ps(b[2 * i], b[2 * i + 1])});
#pragma GCC unroll 8
    for (int i = 0; i < 2; i++)
        fours[i] = add(low_pairs(pairs[2 * i], pairs[2 * i + 1]), high_pairs(pairs[2 * i], pairs[2 * i + 1]));
    return add(halves<0x20>(fours[0], fours[1]), halves<0x31>(fours[0], fours[1]));
}

// scores of one query with 8 keys
__m256 score_eight(const uint16_t* query, const uint16_t* keys, int64_t dim) {
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
    __m256 sums[8];
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) sums[j] = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 16 <= dim; i += 16) {
        const __m256i q = _mm256_loadu_si256((const __m256i*)(query + i));
        const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(q, 16)), odd = _mm256_castsi256_ps(_mm256_and_si256(q, upper));
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            const __m256i key = _mm256_loadu_si256((const __m256i*)(keys + j * dim + i));
            sums[j] = _mm256_fmadd_ps(even, _mm256_castsi256_ps(_mm256_slli_epi32(key, 16)), sums[j]);
            sums[j] = _mm256_fmadd_ps(odd, _mm256_castsi256_ps(_mm256_and_si256(key, upper)), sums[j]);
        }
    }
    if (i < dim) {
        const Mask16 mask = lanes(dim - i);
        const F32x16 q = load_bf16(query + i, mask);
        for (int j = 0; j < 8; j++) {
            const F32x16 key = load_bf16(keys + j * dim + i, mask);
            sums[j] = _mm256_fmadd_ps(q.high, key.high, _mm256_fmadd_ps(q.low, key.low, sums[j]));
        }
    }
    return totals(sums);
}

// scores of one query with 16 keys
F32x16 score_block(const uint16_t* query, const uint16_t* keys, int64_t dim) {
    return {score_eight(query, keys, dim), score_eight(query, keys + 8 * dim, dim)};
}

// The same scores for many queries: each lane of a register holds another key, so that no register is added up across its lanes. A
// score is still PARTS sums, one for each lane of `score_eight`, added by the same tree. Unit t PARTS + l is the t-th number of part l.

using Unit = float;
constexpr int PARTS = 8;
constexpr int PART_ORDER[PARTS] = {0, 1, 2, 3, 4, 5, 6, 7};  // the order in which a balanced tree adds them as `totals` does
constexpr int SCORE_QUERIES = 6, SCORE_KEYS = 1;  // of a tile of scores: the queries, and how many times sixteen keys
constexpr int SUM_TILE = 6, SUM_COLUMNS = 1;  // queries to whose sums values are added together, and by how many times sixteen columns

constexpr int64_t num_steps(int64_t dim) { return round_up(dim, 16) / 8; }

F32x16 score_step(F32x16 sum, const Unit* query, const Unit* keys) { return fmadd_ps(set1_ps(*query), load_ps(keys), sum); }

// 16 numbers from the i-th on; lane l holds the two that lane l of `score_eight` adds; 0 past the end
INLINE __m256i load_pairs(const uint16_t* from, int64_t i, int64_t dim) {
    if (i + 16 <= dim) return _mm256_loadu_si256((const __m256i*)(from + i));
    alignas(32) uint16_t each[16] = {};
    for (int64_t j = 0; i + j < dim; j++) each[j % 8 * 2 + j / 8] = from[i + j];
    return _mm256_load_si256((const __m256i*)each);
}

INLINE void store_pairs(__m256i pairs, Unit* first, Unit* second) {
    _mm256_store_ps(first, _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)));
    _mm256_store_ps(second, _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000))));
}

// to: [num_steps, PARTS]
void unpack_query(const uint16_t* from, int64_t dim, Unit* to) {
    for (int64_t i = 0; i < dim; i += 16) store_pairs(load_pairs(from, i, dim), to + i, to + i + PARTS);
}

INLINE void transpose(__m256i* x) {  // 8 x 8
    __m256i a[8], b[8];
    for (int i = 0; i < 8; i += 2) a[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]), a[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = _mm256_unpacklo_epi64(a[i + j], a[i + j + 2]);
            b[i + 2 * j + 1] = _mm256_unpackhi_epi64(a[i + j], a[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) {
        x[i] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
        x[i + 4] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
    }
}

// 16 keys. to: [num_steps, PARTS, 16]
void unpack_keys(const uint16_t* const* keys, int64_t dim, Unit* to) {
    for (int first = 0; first < 16; first += 8)
        for (int64_t i = 0; i < dim; i += 16) {
            __m256i pairs[8];
            for (int j = 0; j < 8; j++) pairs[j] = load_pairs(keys[first + j], i, dim);
            transpose(pairs);
            Unit* at = to + i * 16 + first;
            for (int l = 0; l < PARTS; l++) store_pairs(pairs[l], at + l * 16, at + (PARTS + l) * 16);
        }
}

}  // namespace
