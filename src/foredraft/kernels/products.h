// Products of a few rows with a packed matrix, and the preparation of each row for them.

#pragma once

#include <algorithm>
#include <cmath>

#include "groups.h"
#include "structs.h"
#include "team.h"
#include "vector_math.h"
#ifdef __AMX_TILE__
#include "amx.h"
#else
#include "no_tiles.h"
#endif

namespace {

constexpr int ROWS = 6;           // the most rows of a tile, except for matrices with groups: GROUPED_ROWS
constexpr int64_t IN_CACHE = 384 << 10;  // the most bytes of weights for which the next ones fit into the second-level cache too
constexpr int BLOCKS_AT_ONCE = 8;        // of rows, which multiply a part of a group in turn

int64_t group_bytes(const Matrix& m) {
    if (has_groups(m)) return GROUP / BESIDE * groups_of(m).count * block_bytes(m);
    return GROUP * (m.kind == INT8 ? round_up(m.k, INT8_UNIT) : 2 * round_up(m.k, 2));
}

// The left side of a product, as the inner loops read it: bfloat16 rows, or int8 rows with a scale each. For a matrix with groups of
// inputs, three numbers for each group follow the row.
struct Rows {
    char* data;
    float* scales;
    int64_t stride;             // bytes
    void* row(int64_t r) const { return data + r * stride; }
};

// Enough for every kind of matrix: groups have at least 8 inputs.
int64_t row_bytes(int64_t k) {
    const int64_t grouped = round_up(sizeof(GroupWhole8) * (k + OVERHANG), ALIGN) + 3 * k / 8 * 4;
    return round_up(std::max((int64_t)sizeof(Short) * k, grouped), ALIGN) + ALIGN;
}

// Bytes for num_rows rows of k numbers.
int64_t rows_bytes(int64_t num_rows, int64_t k) { return num_rows * row_bytes(k) + round_up(4 * num_rows, ALIGN); }

Rows rows_in(char* memory, int64_t num_rows, int64_t k) {
    Arena arena{memory};
    char* data = arena.take<char>(num_rows * row_bytes(k));
    return {data, arena.take<float>(num_rows), row_bytes(k)};
}

constexpr int64_t STEPS = 127, FINE_STEPS = 32 * STEPS;
constexpr int64_t MOST_FINE_INPUTS = 4096;  // of a group, whose sum must fit 32 bits: 4096 * 4064 * 128 < 2^31

// The numbers of a row are rounded to integers from -steps to steps: finer ones if the inner loops multiply 16 bits anyway.
int64_t steps_of_row(const Matrix& m) {
    return m.kind == INT8_GROUPS && sizeof(GroupWhole8) > 1 && m.group <= MOST_FINE_INPUTS ? FINE_STEPS : STEPS;
}

// The scale of numbers that are rounded together is their largest magnitude over `steps`. A number that is not finite makes the scale
// NaN, so that no NaN is lost.

// The bits of the largest magnitude of k numbers, in sixteen parts. As integers, the bits of infinity are larger than those of all
// finite numbers, and those of NaN are larger still.
template <class Read>
I512 largest_bits(int64_t k, const Read& read) {
    I512 largest = set1_epi32(0);
    for (int64_t i = 0; i < k; i += 16) largest = max_epi32(largest, bits_of(abs_ps(read(i, lanes(k - i)))));
    return largest;
}

F32x16 larger_bits(F32x16 a, F32x16 b) { return as_ps(max_epi32(bits_of(a), bits_of(b))); }
F32x16 add_bits(F32x16 a, F32x16 b) { return as_ps(add_epi32(bits_of(a), bits_of(b))); }

// Sixteen scales, and the factors by which numbers are multiplied before they are rounded.
struct Rounding {
    F32x16 scale, inverse;
};

Rounding rounding_of(I512 largest, float steps) {
    const F32x16 magnitude = as_ps(largest), zero = setzero_ps();
    const F32x16 most = mask_mov_ps(magnitude, cmpge_epi32_mask(largest, bits_of(set1_ps(INFINITY))), set1_ps(NAN));
    const Mask16 positive = (Mask16)(at_least(most, zero) & ~equal(most, zero));
    return {div_ps(most, set1_ps(steps)), maskz_mov_ps(positive, div_ps(set1_ps(steps), most))};
}

// Rounds k numbers to integers, and returns the sum of those in sixteen parts.
template <class Number, class Read>
I512 round_to_whole(int64_t k, float inverse, Number* to, const Read& read) {
    I512 sum = set1_epi32(0);
    for (int64_t i = 0; i < k; i += 16) {
        const I512 whole = cvtps_epi32(mul_ps(read(i, lanes(k - i)), set1_ps(inverse)));
        store_whole(to + i, whole);
        sum = add_epi32(sum, whole);
    }
    return sum;
}

template <class Read>
void quantise_row(const Matrix& m, Whole* to, float* scale, const Read& read) {
    const Rounding rounding = rounding_of(set1_epi32(reduce_max_epi32(largest_bits(m.k, read))), (float)STEPS);
    *scale = first_lane(rounding.scale);
    round_to_whole(m.k, first_lane(rounding.inverse), to, read);
}

// A scale for each group: in rows with outliers, one scale would leave only a few steps for the other inputs. Three numbers of each
// group follow the row: the start of its sums, int32 (see start_of_sums); its scale, float; its sum times its scale, float.
template <class Number, class Read>
void quantise_groups(const Matrix& m, const Groups& g, char* row, const Read& read) {
    constexpr int AT_ONCE = 16;
    Number* to = (Number*)row;
    char* constants = row + g.constants_at;
    const float steps = (float)steps_of_row(m);
    for (int64_t i = 0; i < g.count; i += AT_ONCE) {
        const int count = (int)std::min<int64_t>(AT_ONCE, g.count - i);
        const auto reader = [&](int group) {
            return [&read, first = (i + group) * m.group](int64_t at, Mask16 mask) { return read(first + at, mask); };
        };
        F32x16 parts[AT_ONCE];
        for (int group = 0; group < AT_ONCE; group++) parts[group] = group < count ? as_ps(largest_bits(m.group, reader(group))) : setzero_ps();
        const Rounding rounding = rounding_of(bits_of(reduced(parts, larger_bits)), steps);
        alignas(64) float inverse[AT_ONCE];
        store_ps(inverse, rounding.inverse);
        for (int group = 0; group < count; group++)
            parts[group] = as_ps(round_to_whole(m.group, inverse[group], to + (i + group) * m.group, reader(group)));
        const I512 sums = bits_of(reduced(parts, add_bits));
        const Mask16 mask = lanes(count);
        mask_storeu_epi32((int32_t*)constants + i, mask, start_of_sums(g, mullo_epi32(sums, set1_epi32(-zero_code(m)))));
        mask_storeu_ps((float*)constants + g.count + i, mask, rounding.scale);
        mask_storeu_ps((float*)constants + 2 * g.count + i, mask, mul_ps(cvtepi32_ps(sums), rounding.scale));
    }
}

template <class Read>
void prepare_row(const Matrix& m, const Rows& rows, int64_t r, const Read& read) {
    if (m.kind == INT8_GROUPS) return quantise_groups<GroupWhole8>(m, groups_of(m), (char*)rows.row(r), read);
    if (has_groups(m)) return quantise_groups<GroupWhole4>(m, groups_of(m), (char*)rows.row(r), read);
    if (m.kind == INT8) {
        quantise_row(m, (Whole*)rows.row(r), rows.scales + r, read);
        return;
    }
    Short* to = (Short*)rows.row(r);
    for (int64_t i = 0; i < m.k; i += 16) store_short(to + i, read(i, lanes(m.k - i)));
}

struct ReadFloat {
    const float* from;
    F32x16 operator()(int64_t i, Mask16 mask) const { return maskz_loadu_ps(mask, from + i); }
};

struct ReadBf16 {
    const uint16_t* from;
    F32x16 operator()(int64_t i, Mask16 mask) const { return load_bf16(from + i, mask); }
};

struct ReadNormed {
    const float *from, *weight;
    F32x16 factor;
    F32x16 operator()(int64_t i, Mask16 mask) const {
        const F32x16 x = mul_ps(maskz_loadu_ps(mask, from + i), factor);
        return mul_ps(x, maskz_loadu_ps(mask, weight + i));
    }
};

ReadNormed normed(const float* from, const float* weight, int64_t k, float epsilon) {
    F32x16 sum = setzero_ps();
    for (int64_t i = 0; i < k; i += 16) {
        const F32x16 x = maskz_loadu_ps(lanes(k - i), from + i);
        sum = fmadd_ps(x, x, sum);
    }
    return {from, weight, set1_ps(1.0f / sqrtf(reduce_add_ps(sum) / (float)k + epsilon))};
}

// ----------------------------------------------------------------------------------------------------------- products

// Scales integer sums to numbers, in place.
void rescale(const Matrix& m, const Rows& x, int64_t row, int64_t num_rows, int64_t first, float (*out)[GROUP]) {
    for (int p = 0; p < 4; p++) {
        const int64_t o = first + 16 * p;
        const Mask16 mask = o < m.n ? lanes(m.n - o) : 0;
        const I512 correction = maskz_loadu_epi32(mask, m.corrections + o);
        const F32x16 scale = maskz_loadu_ps(mask, m.scales + o);
        for (int64_t r = 0; r < num_rows; r++) {
            const F32x16 product = cvtepi32_ps(sub_epi32(load_si512(out[r] + 16 * p), correction));
            const F32x16 both = mul_ps(scale, set1_ps(x.scales[row + r]));
            store_ps(out[r] + 16 * p, mul_ps(product, both));
        }
    }
}

// Which of the blocks of rows that multiply the same weights in turn.
struct Turn {
    int64_t block, num_blocks;
};

// The first block of rows reads its weights from memory, later blocks read them from the cache. To keep the memory busy meanwhile, every
// block fetches its part of the next weights; if they do not fit beside these, the first block fetches its own. bytes: of these weights
Prefetch prefetch_for(const char* weights, int64_t bytes, const Turn& turn) {
    if (turn.num_blocks > 1 && bytes <= IN_CACHE)
        return {weights + bytes + bytes * turn.block / turn.num_blocks, (64 + turn.num_blocks - 1) / turn.num_blocks, false};
    if (turn.block > 0) return {weights, 0, false};
    return {weights + PREFETCH, 64, SPARSE};
}

template <int R>
void tile_of_kind(const Matrix& m, int outputs, const char* weights, const char* in, int64_t stride, const Prefetch& ahead, float (*out)[GROUP]) {
    if constexpr (R <= ROWS) {
        if (m.kind == BF16) return tile_bf16<R>(m.k, outputs, weights, in, stride, ahead, out);
        if (m.kind == INT8) return tile_int8<R>(m.k, outputs, weights, in, stride, ahead, out);
    }
    switch (m.kind) {
        case INT4_GROUPS: return tile_groups<R, INT4_GROUPS>(groups_of(m), outputs, weights, in, stride, ahead, out);
        case LEVEL_GROUPS: return tile_groups<R, LEVEL_GROUPS>(groups_of(m), outputs, weights, in, stride, ahead, out);
        default: return tile_groups<R, INT8_GROUPS>(groups_of(m), outputs, weights, in, stride, ahead, out);
    }
}

// Scales and corrections are stored apart from the weights: without a fetch, each group would wait for them.
void fetch_scales(const Matrix& m, int64_t first) {
    for (int64_t o = first; o < first + GROUP; o += 16) {
        _mm_prefetch((const char*)(m.scales + o), _MM_HINT_T0);
        _mm_prefetch((const char*)(m.corrections + o), _MM_HINT_T0);
    }
}

template <int R = GROUPED_ROWS>
void any_tile(const Matrix& m, int outputs, const char* weights, const char* in, int64_t stride, const Prefetch& ahead, float (*out)[GROUP], int num_rows) {
    if (num_rows >= R) return tile_of_kind<R>(m, outputs, weights, in, stride, ahead, out);
    if constexpr (R > 1) any_tile<R - 1>(m, outputs, weights, in, stride, ahead, out, num_rows);
}

void add_bias(const Matrix& m, int64_t num_rows, int64_t first, float (*out)[GROUP]) {
    for (int p = 0; p < 4; p++) {
        const int64_t o = first + 16 * p;
        const F32x16 bias = maskz_loadu_ps(o < m.n ? lanes(m.n - o) : 0, m.bias + o);
        for (int64_t r = 0; r < num_rows; r++) store_ps(out[r] + 16 * p, add_ps(load_ps(out[r] + 16 * p), bias));
    }
}

// The rows of a product, divided into blocks of nearly the same size.
struct Blocks {
    int64_t num_rows, count;
    int64_t first_row(int64_t block) const { return num_rows * block / count; }
};

// Multiplies the rows of blocks first .. last - 1 by a group of weights. They take turns at each part of the group, which therefore stays
// in the cache. tiles: null: without tiles
void multiply(const Matrix& m, int64_t group, int parts, const Rows& x, const Blocks& blocks, int64_t first, int64_t last, Tiles* tiles,
              float (*out)[GROUP]) {
    const int64_t bytes = group_bytes(m) / parts;
    const int outputs = GROUP / parts;
    for (int part = 0; part < parts; part++)
        for (int64_t block = first; block < last; block++) {
            const int64_t row = blocks.first_row(block);
            const int num_rows = (int)(blocks.first_row(block + 1) - row);
            const Turn turn = parts > 1 ? Turn{block - first, last - first} : Turn{block, blocks.count};
            const char *weights = (const char*)m.weights + (group * parts + part) * bytes, *in = (const char*)x.row(row);
            const Prefetch ahead = prefetch_for(weights, bytes, turn);
            float (*sums)[GROUP] = (float (*)[GROUP])(out[row - blocks.first_row(first)] + outputs * part);
            if (tiles != nullptr) tiles->multiply(m, weights, in, x.stride, ahead, sums, num_rows, turn.block, turn.num_blocks);
            else any_tile(m, outputs, weights, in, x.stride, ahead, sums, num_rows);
        }
}

// Computes the thread's share of a product's groups; finish(row, first output, how many, 64 sums) receives each row of a group.
template <class Finish>
void product(const Matrix& m, const Rows& x, int64_t num_rows, const Team& team, const Finish& finish) {
    alignas(ALIGN) float out[std::max(GROUPED_ROWS * BLOCKS_AT_ONCE, MOST_TILED_ROWS)][GROUP];
    int64_t first, last;
    team.share((m.n + GROUP - 1) / GROUP, first, last);
    Tiles tiles(m);
    const bool by_tiles = uses_tiles(m, num_rows);
    const int64_t most_rows = by_tiles ? most_tiled_rows(m) : has_groups(m) ? GROUPED_ROWS : ROWS;
    const Blocks blocks{num_rows, (num_rows + most_rows - 1) / most_rows};
    const int parts = by_tiles || blocks.count == 1 ? 1 : parts_of_group(group_bytes(m));
    const int64_t at_once = parts == 1 ? 1 : BLOCKS_AT_ONCE;
    for (int64_t group = first; group < last; group++) {
        const int64_t o = group * GROUP, count = m.n - o < GROUP ? m.n - o : GROUP;
        for (int64_t block = 0; block < blocks.count; block += at_once) {
            const int64_t end_block = std::min(blocks.count, block + at_once);
            const int64_t begin = blocks.first_row(block), end = blocks.first_row(end_block);
            if (m.kind == INT8) fetch_scales(m, o);
            multiply(m, group, parts, x, blocks, block, end_block, by_tiles ? &tiles : nullptr, out);
            if (m.kind == INT8) rescale(m, x, begin, end - begin, o, out);
            if (m.bias != nullptr) add_bias(m, end - begin, o, out);
            for (int64_t r = begin; r < end; r++) finish(r, o, count, out[r - begin]);
        }
    }
}

struct StoreBf16 {
    uint16_t* to;
    int64_t stride;
    void operator()(int64_t r, int64_t o, int64_t count, const float* sums) const {
        for (int64_t i = 0; i < count; i += 16) store_bf16(to + r * stride + o + i, lanes(count - i), load_ps(sums + i));
    }
};

struct StoreFloat {
    float* to;
    int64_t stride;
    void operator()(int64_t r, int64_t o, int64_t count, const float* sums) const {
        for (int64_t i = 0; i < count; i += 16) mask_storeu_ps(to + r * stride + o + i, lanes(count - i), load_ps(sums + i));
    }
};

}  // namespace
