// Functions of sixteen numbers, and the inner loops of products and attention, for AVX-512 with BF16 and VNNI.

#pragma once

#include "base.h"
#include "structs.h"

namespace {

using F32x16 = __m512;
using F64x8 = __m512d;
using I512 = __m512i;             // integers of any width
using Whole = uint8_t;            // a row's number for an int8 product, with OFFSET added to it
using Short = uint16_t;           // a row's number for a bfloat16 product

constexpr int INT8_UNIT = 4;      // adjacent inputs of one output in a packed int8 matrix; two in a bfloat16 matrix
constexpr int OFFSET = 128;       // the instruction multiplies unsigned by signed numbers

// ------------------------------------------------------------------------------------------------------- instructions

F32x16 setzero_ps() { return _mm512_setzero_ps(); }
F32x16 set1_ps(float x) { return _mm512_set1_ps(x); }
F32x16 load_ps(const float* from) { return _mm512_load_ps(from); }
F32x16 loadu_ps(const float* from) { return _mm512_loadu_ps(from); }
F32x16 maskz_loadu_ps(Mask16 mask, const float* from) { return _mm512_maskz_loadu_ps(mask, from); }
F32x16 mask_loadu_ps(F32x16 other, Mask16 mask, const float* from) { return _mm512_mask_loadu_ps(other, mask, from); }
void store_ps(float* to, F32x16 x) { _mm512_store_ps(to, x); }
void storeu_ps(float* to, F32x16 x) { _mm512_storeu_ps(to, x); }
void mask_storeu_ps(float* to, Mask16 mask, F32x16 x) { _mm512_mask_storeu_ps(to, mask, x); }
F32x16 add_ps(F32x16 a, F32x16 b) { return _mm512_add_ps(a, b); }
F32x16 sub_ps(F32x16 a, F32x16 b) { return _mm512_sub_ps(a, b); }
F32x16 mul_ps(F32x16 a, F32x16 b) { return _mm512_mul_ps(a, b); }
F32x16 div_ps(F32x16 a, F32x16 b) { return _mm512_div_ps(a, b); }
F32x16 min_ps(F32x16 a, F32x16 b) { return _mm512_min_ps(a, b); }
F32x16 max_ps(F32x16 a, F32x16 b) { return _mm512_max_ps(a, b); }
F32x16 abs_ps(F32x16 x) { return _mm512_abs_ps(x); }
F32x16 round_ps(F32x16 x) { return _mm512_roundscale_ps(x, 8); }
F32x16 fmadd_ps(F32x16 a, F32x16 b, F32x16 c) { return _mm512_fmadd_ps(a, b, c); }
F32x16 fnmadd_ps(F32x16 a, F32x16 b, F32x16 c) { return _mm512_fnmadd_ps(a, b, c); }
F32x16 fmsub_ps(F32x16 a, F32x16 b, F32x16 c) { return _mm512_fmsub_ps(a, b, c); }
F32x16 scalef_ps(F32x16 x, F32x16 power) { return _mm512_scalef_ps(x, power); }
F32x16 mask_mov_ps(F32x16 other, Mask16 mask, F32x16 x) { return _mm512_mask_mov_ps(other, mask, x); }
F32x16 maskz_mov_ps(Mask16 mask, F32x16 x) { return _mm512_maskz_mov_ps(mask, x); }
F32x16 mask_add_ps(F32x16 other, Mask16 mask, F32x16 a, F32x16 b) { return _mm512_mask_add_ps(other, mask, a, b); }
float first_lane(F32x16 x) { return _mm512_cvtss_f32(x); }
float reduce_add_ps(F32x16 x) { return _mm512_reduce_add_ps(x); }
float reduce_max_ps(F32x16 x) { return _mm512_reduce_max_ps(x); }
Mask16 at_least(F32x16 a, F32x16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
Mask16 equal(F32x16 a, F32x16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
Mask16 is_nan_ps(F32x16 x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }

// y where x is at least `least` or NaN (y is then NaN too), else 0
F32x16 zero_below(F32x16 y, F32x16 x, F32x16 least) { return maskz_mov_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), y); }

I512 set1_epi32(int32_t x) { return _mm512_set1_epi32(x); }
I512 setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h, int i, int j, int k, int l, int m, int n, int o, int p) {
    return _mm512_setr_epi32(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p);
}
I512 load_si512(const void* from) { return _mm512_load_si512(from); }
I512 maskz_loadu_epi32(Mask16 mask, const int32_t* from) { return _mm512_maskz_loadu_epi32(mask, from); }
I512 add_epi32(I512 a, I512 b) { return _mm512_add_epi32(a, b); }
I512 max_epi32(I512 a, I512 b) { return _mm512_max_epi32(a, b); }
I512 mullo_epi32(I512 a, I512 b) { return _mm512_mullo_epi32(a, b); }
int32_t reduce_max_epi32(I512 x) { return _mm512_reduce_max_epi32(x); }
void mask_storeu_epi32(int32_t* to, Mask16 mask, I512 x) { _mm512_mask_storeu_epi32(to, mask, x); }
I512 bits_of(F32x16 x) { return _mm512_castps_si512(x); }
F32x16 as_ps(I512 bits) { return _mm512_castsi512_ps(bits); }
I512 sub_epi32(I512 a, I512 b) { return _mm512_sub_epi32(a, b); }
Mask16 cmple_epi32_mask(I512 a, I512 b) { return _mm512_cmple_epi32_mask(a, b); }
Mask16 cmpge_epi32_mask(I512 a, I512 b) { return _mm512_cmpge_epi32_mask(a, b); }
F32x16 cvtepi32_ps(I512 x) { return _mm512_cvtepi32_ps(x); }
I512 cvtps_epi32(F32x16 x) { return _mm512_cvtps_epi32(x); }

F64x8 setzero_pd() { return _mm512_setzero_pd(); }
F64x8 set1_pd(double x) { return _mm512_set1_pd(x); }
void store_pd(double* to, F64x8 x) { _mm512_store_pd(to, x); }
F64x8 add_pd(F64x8 a, F64x8 b) { return _mm512_add_pd(a, b); }
F64x8 mul_pd(F64x8 a, F64x8 b) { return _mm512_mul_pd(a, b); }
F64x8 fnmadd_pd(F64x8 a, F64x8 b, F64x8 c) { return _mm512_fnmadd_pd(a, b, c); }
double reduce_add_pd(F64x8 x) { return _mm512_reduce_add_pd(x); }
Mask8 at_least(F64x8 a, F64x8 b) { return _mm512_cmp_pd_mask(a, b, _CMP_GE_OQ); }

I512 set1_epi64(int64_t x) { return _mm512_set1_epi64(x); }
I512 setr_epi64(int64_t a, int64_t b, int64_t c, int64_t d, int64_t e, int64_t f, int64_t g, int64_t h) {
    return _mm512_setr_epi64(a, b, c, d, e, f, g, h);
}
I512 maskz_loadu_epi64(Mask8 mask, const int64_t* from) { return _mm512_maskz_loadu_epi64(mask, from); }
I512 add_epi64(I512 a, I512 b) { return _mm512_add_epi64(a, b); }
I512 mullo_epi64(I512 a, I512 b) { return _mm512_mullo_epi64(a, b); }
I512 xor_si512(I512 a, I512 b) { return _mm512_xor_si512(a, b); }
template <int BITS>
I512 srli_epi64(I512 x) { return _mm512_srli_epi64(x, BITS); }
F64x8 cvtepu52_pd(I512 x) { return _mm512_cvtepu64_pd(x); }  // integers below 2^52

// Has x computed here: otherwise GCC 12 moves additions down, and keeps their operands in memory.
INLINE void pin(F32x16& x) { asm volatile("" : "+v"(x)); }

// ------------------------------------------------------------------------------------------------ reading and writing

F32x16 widen(__m256i bf16) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16)); }

F32x16 load_bf16(const uint16_t* from, Mask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, from)); }

F32x16 load_bf16_or_least(const uint16_t* from, Mask16 mask) {  // -inf where the mask is 0
    return widen(_mm256_mask_loadu_epi16(_mm256_set1_epi16((short)0xff80), mask, from));
}

void store_bf16(uint16_t* to, Mask16 mask, F32x16 x) { _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(x)); }

void store_short(Short* to, F32x16 x) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(x)); }

void store_whole(Whole* to, I512 x) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(add_epi32(x, set1_epi32(OFFSET)))); }

void store_whole(int8_t* to, I512 x) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(x)); }

Mask16 nonzero_bytes(Mask16 mask, const uint8_t* from) {
    return _mm_test_epi8_mask(_mm_maskz_loadu_epi8(mask, from), _mm_set1_epi8(-1));
}

F64x8 load_as_pd(Mask8 mask, const float* from) { return _mm512_cvtps_pd(_mm256_maskz_loadu_ps(mask, from)); }

F32x16 gather_ps(Mask16 mask, const float* from, const int64_t* places) {
    const I512 first = maskz_loadu_epi64((Mask8)mask, places), second = maskz_loadu_epi64((Mask8)(mask >> 8), places + 8);
    const __m256 low = _mm512_mask_i64gather_ps(_mm256_setzero_ps(), (Mask8)mask, first, from, 4);
    const __m256 high = _mm512_mask_i64gather_ps(_mm256_setzero_ps(), (Mask8)(mask >> 8), second, from, 4);
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}

// -------------------------------------------------------------------------------------------------------- inner loops

// The place in a packed group of the `step`-th unit of inputs of output j.
int64_t packed_place(int64_t j, int64_t step, int64_t) { return step * GROUP + j; }

// A group is multiplied as a whole: its outputs are stored side by side.
int parts_of_group(int64_t) { return 1; }

// How memory is fetched. Zen 4, which has no tiles, reads a stream by itself while products without groups of inputs read it: if every
// line is fetched as well, three to six rows take up to 1.4 times as long. One line in four, two pages ahead, only helps it across the
// ends of pages. With groups, it needs every line.
#ifdef __AMX_TILE__
constexpr bool SPARSE = false;
constexpr int PREFETCH = 12288;   // bytes ahead: past the end of the page, at which the hardware's prefetcher stops
#else
constexpr bool SPARSE = true;
constexpr int PREFETCH = 8192;
#endif

INLINE void has_read_lines(Prefetch& ahead, int64_t lines, bool is_sparse) {
    if (is_sparse) return ahead.has_read(64 * lines);
#pragma GCC unroll 4
    for (int64_t line = 0; line < lines; line++) ahead.has_read(64);
}

// Sums of R rows for the 64 outputs of a group. The loops over them are unrolled by pragmas: otherwise GCC 12 keeps the sums in
// memory, at half the speed. Sums take 24 of the 32 registers.

template <int R>
void tile_int8(int64_t k, int, const char* weights, const char* in, int64_t stride, Prefetch ahead, float (*out)[GROUP]) {
    I512 sums[R][4];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < 4; p++) sums[r][p] = _mm512_setzero_si512();
    for (int64_t i = 0; i < k; i += 4, weights += 4 * GROUP) {
        I512 w[4];
#pragma GCC unroll 8
        for (int p = 0; p < 4; p++) w[p] = load_si512(weights + p * 64);
        has_read_lines(ahead, 4, ahead.is_sparse);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            int32_t four;
            memcpy(&four, in + r * stride + i, 4);
            const I512 spread = set1_epi32(four);
#pragma GCC unroll 8
            for (int p = 0; p < 4; p++) sums[r][p] = _mm512_dpbusd_epi32(sums[r][p], spread, w[p]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < 4; p++) _mm512_store_si512(out[r] + 16 * p, sums[r][p]);
}

template <int R>
void tile_bf16(int64_t k, int, const char* weights, const char* in, int64_t stride, Prefetch ahead, float (*out)[GROUP]) {
    F32x16 sums[R][4];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < 4; p++) sums[r][p] = setzero_ps();
    for (int64_t i = 0; i < k; i += 2, weights += 4 * GROUP) {
        __m512bh w[4];
#pragma GCC unroll 8
        for (int p = 0; p < 4; p++) w[p] = (__m512bh)load_si512(weights + p * 64);
        has_read_lines(ahead, 4, ahead.is_sparse);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            int32_t two;
            memcpy(&two, in + r * stride + 2 * i, 4);
            const __m512bh spread = (__m512bh)set1_epi32(two);
#pragma GCC unroll 8
            for (int p = 0; p < 4; p++) sums[r][p] = _mm512_dpbf16_ps(sums[r][p], spread, w[p]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < 4; p++) store_ps(out[r] + 16 * p, sums[r][p]);
}

// Products with weights that have a scale for each group of inputs: unsigned weights by signed rows. A vector is sixteen outputs, with
// four adjacent inputs of each; a line is 32 outputs. The sums of a group take at most 24 of the 32 registers. Those of all groups are in
// registers too for up to six rows, and in memory for more.

using GroupWhole4 = int8_t;             // a row's number for weights of four bits
using GroupWhole8 = int8_t;             // for weights of eight bits
constexpr int GROUPED_ROWS = 12;        // the most rows of a tile
constexpr int BESIDE = 32;              // outputs that are stored together: all their inputs come before those of the next outputs
constexpr int EIGHT_BIT_ZERO = 128;     // the code of 0 among packed codes of eight bits, and among levels

I512 spread_four(const char* from) {
    int32_t four;
    memcpy(&four, from, 4);
    return set1_epi32(four);
}

F32x16 spread_float(const char* from) { return _mm512_castsi512_ps(spread_four(from)); }

F32x16 load_sixteen_scales(const char* from, int64_t scale_bytes) {
    return scale_bytes == 2 ? _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)) : loadu_ps((const float*)from);
}

// The integer with the bits of the float 1.5 * 2^23. Small sums start with it, so that their bits are those of the float 1.5 * 2^23 + sum,
// and no conversion is needed.
constexpr int32_t START = 0x4b400000;
constexpr float START_AS_FLOAT = 12582912.0f;

// Whether the sums of so many inputs are below 2^22.
bool has_small_sums(int64_t num_inputs) {
    constexpr int64_t MOST_PRODUCT = 127 * 128;
    return num_inputs * MOST_PRODUCT < 1 << 22;
}

// Exact for a float16 scale, whose significand has 11 bits. Then one operation gives scale * sum: scale * (START_AS_FLOAT + sum) minus this.
F32x16 scaled_start_of(F32x16 scale) { return mul_ps(scale, set1_ps(START_AS_FLOAT)); }

// A line has at most eight inputs of an output.
bool starts_as_float(const Groups& g) { return g.scale_bytes == 2 && has_small_sums(g.steps * 2 * INT8_UNIT); }

// The integers that the sums of sixteen groups start from: the corrections for the zero code.
I512 start_of_sums(const Groups& g, I512 correction) { return starts_as_float(g) ? add_epi32(correction, set1_epi32(START)) : correction; }

// in: R rows of int8. out: the sums of all groups, each times its scales, plus the offsets times the sums of the rows.
template <int R, int KIND>
void tile_groups(const Groups& g, int, const char* weights, const char* in, int64_t stride, Prefetch ahead, float (*out)[GROUP]) {
    const int64_t head = BESIDE * g.scale_bytes, heads = head * (g.has_offsets ? 2 : 1), stream = g.count * (heads + 4 * BESIDE * g.steps);
    constexpr bool is_sparse = SPARSE && KIND == INT8_GROUPS && R == 1;  // measured: a gain of a fifth for this case alone
    const bool are_floats = starts_as_float(g);
    const I512 low_bits = _mm512_set1_epi8(15);
    const __m128i levels = KIND == LEVEL_GROUPS ? _mm_xor_si128(_mm_loadu_si128((const __m128i*)g.levels), _mm_set1_epi8((char)EIGHT_BIT_ZERO)) : _mm_setzero_si128();
    const I512 table = _mm512_broadcast_i32x4(levels);
    for (int first = 0; first < GROUP; first += BESIDE, weights += stream) {
        const char *at = weights, *x = in, *constants = in + g.constants_at;
        F32x16 totals[R][2];
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) totals[r][0] = totals[r][1] = setzero_ps();
        for (int64_t group = 0; group < g.count; group++, constants += 4) {
            const char* scales = at;
            has_read_lines(ahead, heads / 64, false);
            at += heads;
            I512 sums[R][2];
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = spread_four(constants + r * stride);
            for (int64_t step = 0; step < g.steps; step++, at += 4 * BESIDE, x += KIND == INT8_GROUPS ? 4 : 8) {
                has_read_lines(ahead, 2, is_sparse);
                I512 low[2] = {load_si512(at), load_si512(at + 64)}, high[2];
                if (KIND != INT8_GROUPS) {
#pragma GCC unroll 2
                    for (int v = 0; v < 2; v++) {
                        high[v] = _mm512_and_si512(_mm512_srli_epi16(low[v], 4), low_bits);
                        low[v] = _mm512_and_si512(low[v], low_bits);
                        if (KIND == LEVEL_GROUPS) {
                            high[v] = _mm512_shuffle_epi8(table, high[v]);
                            low[v] = _mm512_shuffle_epi8(table, low[v]);
                        }
                    }
                }
#pragma GCC unroll 12
                for (int r = 0; r < R; r++) {
                    const I512 a = spread_four(x + r * stride);
                    sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], low[0], a);
                    sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], low[1], a);
                    if (KIND == INT8_GROUPS) continue;
                    const I512 b = spread_four(x + r * stride + 4);
                    sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], high[0], b);
                    sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], high[1], b);
                }
            }
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) {
                const char* at_scales = scales + 16 * v * g.scale_bytes;
                const F32x16 scale = load_sixteen_scales(at_scales, g.scale_bytes), scaled_start = scaled_start_of(scale);
#pragma GCC unroll 12
                for (int r = 0; r < R; r++) {
                    const F32x16 scaled = are_floats ? fmsub_ps(as_ps(sums[r][v]), scale, scaled_start) : mul_ps(cvtepi32_ps(sums[r][v]), scale);
                    totals[r][v] = fmadd_ps(scaled, spread_float(constants + r * stride + 4 * g.count), totals[r][v]);
                }
                if (!g.has_offsets) continue;
                const F32x16 offset = load_sixteen_scales(at_scales + head, g.scale_bytes);
#pragma GCC unroll 12
                for (int r = 0; r < R; r++)
                    totals[r][v] = fmadd_ps(spread_float(constants + r * stride + 8 * g.count), offset, totals[r][v]);
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            store_ps(out[r] + first, totals[r][0]);
            store_ps(out[r] + first + 16, totals[r][1]);
        }
    }
}

// 16 vectors of 16 numbers -> each vector's numbers put together by `add`, in the order of a fixed tree
template <class Add>
INLINE F32x16 reduced(const F32x16* x, const Add& add) {
    F32x16 a[8], b[4], c[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) a[i] = add(_mm512_unpacklo_ps(x[i], x[i + 8]), _mm512_unpackhi_ps(x[i], x[i + 8]));
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) b[i] = add(_mm512_unpacklo_ps(a[i], a[i + 4]), _mm512_unpackhi_ps(a[i], a[i + 4]));
#pragma GCC unroll 8
    for (int i = 0; i < 2; i++)
        c[i] = add(_mm512_shuffle_f32x4(b[i], b[i + 2], 0x88), _mm512_shuffle_f32x4(b[i], b[i + 2], 0xdd));
    const F32x16 d = add(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
    // lane 4 q + j now holds the total of key (0, 2, 1, 3)[q] + 4 j
    const I512 order = setr_epi32(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15);
    return _mm512_permutexvar_ps(order, d);
}

// 16 vectors of 16 partial sums -> the 16 totals, added by a fixed tree
F32x16 totals(const F32x16* x) { return reduced(x, add_ps); }

// scores of one query with 16 keys
F32x16 score_block(const uint16_t* query, const uint16_t* keys, int64_t dim) {
    F32x16 sums[16];
    for (int j = 0; j < 16; j++) sums[j] = setzero_ps();
    for (int64_t i = 0; i < dim; i += 32) {
        const __mmask32 mask = dim - i >= 32 ? 0xffffffffu : (1u << (dim - i)) - 1;
        const __m512bh q = (__m512bh)_mm512_maskz_loadu_epi16(mask, query + i);
        for (int j = 0; j < 16; j++)
            sums[j] = _mm512_dpbf16_ps(sums[j], q, (__m512bh)_mm512_maskz_loadu_epi16(mask, keys + j * dim + i));
    }
    return totals(sums);
}

// The same scores for many queries: each lane of a register holds another key, so that no register is added up across its lanes. A
// score is still PARTS sums, one for each lane of `score_block`, added by the same tree. Unit t PARTS + l is the t-th pair of part l.

using Unit = int32_t;
constexpr int PARTS = 16;
constexpr int PART_ORDER[PARTS] = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};  // the order in which a balanced tree adds them as `totals` does
constexpr int SCORE_QUERIES = 2, SCORE_KEYS = 2;  // of a tile of scores: the queries, and how many times sixteen keys
constexpr int SUM_TILE = 6, SUM_COLUMNS = 4;  // queries to whose sums values are added together, and by how many times sixteen columns

constexpr int64_t num_steps(int64_t dim) { return round_up(dim, 32) / 32; }

F32x16 score_step(F32x16 sum, const Unit* query, const Unit* keys) {
    return _mm512_dpbf16_ps(sum, (__m512bh)set1_epi32(*query), (__m512bh)load_si512(keys));
}

// 32 numbers from the i-th on; 0 past the end
I512 load_pairs(const uint16_t* from, int64_t i, int64_t dim) {
    return _mm512_maskz_loadu_epi16(dim - i >= 32 ? 0xffffffffu : (1u << (dim - i)) - 1, from + i);
}

// to: [num_steps, PARTS]
void unpack_query(const uint16_t* from, int64_t dim, Unit* to) {
    for (int64_t i = 0; i < dim; i += 32) _mm512_store_si512(to + i / 2, load_pairs(from, i, dim));
}

void transpose(I512* x) {  // 16 x 16
    I512 a[16], b[16];
    for (int i = 0; i < 16; i += 2) a[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]), a[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
            b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) {  // column 4 L + i lies in quarter L of b[i], b[4 + i], b[8 + i] and b[12 + i]
        const I512 even = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88), odd = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
        const I512 later_even = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88), later_odd = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
        x[i] = _mm512_shuffle_i32x4(even, later_even, 0x88);
        x[4 + i] = _mm512_shuffle_i32x4(odd, later_odd, 0x88);
        x[8 + i] = _mm512_shuffle_i32x4(even, later_even, 0xdd);
        x[12 + i] = _mm512_shuffle_i32x4(odd, later_odd, 0xdd);
    }
}

// 16 keys. to: [num_steps, PARTS, 16]
void unpack_keys(const uint16_t* const* keys, int64_t dim, Unit* to) {
    for (int64_t i = 0; i < dim; i += 32) {
        I512 pairs[16];
        for (int j = 0; j < 16; j++) pairs[j] = load_pairs(keys[j], i, dim);
        transpose(pairs);
        for (int l = 0; l < PARTS; l++) _mm512_store_si512(to + (i / 2 + l) * 16, pairs[l]);
    }
}

}  // namespace
