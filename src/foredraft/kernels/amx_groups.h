// Products of many rows with weights in groups of inputs, with AMX.
//
// The sums of a group leave their tile as integers, and are scaled and added as in the AVX-512 loops, so that both give the same bits.
// Codes are decoded to signed bytes once for all rows, so no correction for the zero code is needed.

#pragma once

#include <memory>

#include "amx_tiles.h"
#include "groups.h"

namespace {

constexpr int64_t LEAST_GROUPED_ROWS = 40;   // for fewer the AVX-512 loops are as fast
constexpr int64_t LEAST_DEPTH = 32;          // inputs of a tile

bool groups_fit_tiles(const Matrix& m) { return m.group % LEAST_DEPTH == 0; }

// The inputs of a tile, all of one group.
int64_t depth_of(const Matrix& m) { return m.group % TILE_BYTES == 0 ? TILE_BYTES : LEAST_DEPTH; }

// Tile 0 holds sums, tile 1 rows, tile 2 weights.
void shape_for_groups(const Matrix& m, int num_rows) {
    TileShapes shapes;
    const int64_t depth = depth_of(m);
    shapes.set(0, num_rows);
    shapes.set(1, num_rows, depth);
    shapes.set(2, depth / INT8_UNIT);
    shapes.load();
}

// Decodes the codes of a matrix to int8 numbers.
class Decoder {
    const int kind_;
    const I512 zero_, table_, low_bits_ = _mm512_set1_epi8(15);

public:
    explicit Decoder(const Matrix& m)
        : kind_(m.kind), zero_(_mm512_set1_epi8((char)zero_code(m))),
          table_(m.kind == LEVEL_GROUPS ? _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)m.levels)) : _mm512_setzero_si512()) {}

    I512 eight_bits(I512 codes) const { return _mm512_sub_epi8(codes, zero_); }

    // Decodes the four low bits of each byte.
    I512 four_bits(I512 codes) const {
        const I512 low = _mm512_and_si512(codes, low_bits_);
        return kind_ == LEVEL_GROUPS ? _mm512_shuffle_epi8(table_, low) : _mm512_sub_epi8(low, zero_);
    }
};

struct alignas(ALIGN) TileRow {
    int8_t numbers[TILE_BYTES];
};

// Two tiles of sums. Those of missing rows stay 0.
struct alignas(ALIGN) GroupSums {
    int32_t of[2][TILE_ROWS][16] = {};
};

// The decoded weights of the 64 outputs that were multiplied last: [4 times sixteen outputs, inputs / 4], each a row of a tile.
class GroupedWeights {
    const char* decoded_ = nullptr;
    std::unique_ptr<TileRow[]> rows_;
    std::unique_ptr<GroupSums> sums_;
    std::unique_ptr<float[]> constants_;
    int64_t num_blocks_ = 0;   // for which constants_ is filled

    void decode(const Matrix& m, const Groups& g, const char* from, Prefetch ahead) {
        const int64_t num_rows = m.k / INT8_UNIT, heads = block_bytes(m) - unit_of(m) * BESIDE * g.steps;
        if (rows_ == nullptr) rows_.reset(new TileRow[4 * num_rows]), sums_.reset(new GroupSums);
        const Decoder decoder(m);
        for (int part = 0; part < 4; part += 2) {
            TileRow* to[2] = {rows_.get() + part * num_rows, rows_.get() + (part + 1) * num_rows};
            for (int64_t group = 0; group < g.count; group++) {
                from += heads;
                for (int64_t step = 0; step < g.steps; step++, from += unit_of(m) * BESIDE) {
                    for (int half = 0; half < 2; half++) {
                        const I512 codes = load_si512(from + half * TILE_BYTES);
                        ahead.has_read(TILE_BYTES);
                        if (m.kind == INT8_GROUPS) {
                            _mm512_store_si512(to[half]++, decoder.eight_bits(codes));
                        } else {
                            _mm512_store_si512(to[half]++, decoder.four_bits(codes));
                            _mm512_store_si512(to[half]++, decoder.four_bits(_mm512_srli_epi16(codes, 4)));
                        }
                    }
                }
            }
        }
        finish_stores();
    }

    // The constants of the rows of a block, transposed: [2, groups, 16], scales and scaled sums; 0 for missing rows. They do not depend
    // on the weights.
    const float* constants_of(const Groups& g, const char* in, int64_t stride, int num_rows, int64_t block, int64_t num_blocks) {
        const int64_t count = 2 * g.count * TILE_ROWS;
        if (constants_ == nullptr) constants_.reset(new float[num_blocks * count]());
        float* to = constants_.get() + block * count;
        if (num_blocks_ > block) return to;
        num_blocks_ = block + 1;
        for (int r = 0; r < num_rows; r++) {
            const float* from = (const float*)(in + r * stride + g.constants_at) + g.count;
            for (int64_t i = 0; i < 2 * g.count; i++) to[i * TILE_ROWS + r] = from[i];
        }
        return to;
    }

    // Multiplies by sixteen outputs. scales: of the first group. constants: see constants_of
    void multiply_part(const Matrix& m, const Groups& g, const TileRow* weights, const char* scales, const char* in, int64_t stride,
                       const float* constants, Prefetch& ahead, float (*out)[GROUP]) const {
        auto& sums = sums_->of;
        const int64_t depth = depth_of(m), block = block_bytes(m), head = BESIDE * g.scale_bytes;
        const float* scaled_sums = constants + g.count * TILE_ROWS;
        F32x16 totals[TILE_ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < TILE_ROWS; r++) totals[r] = setzero_ps();
        for (int64_t group = 0; group <= g.count; group++) {
            if (group < g.count) {
                _tile_zero(0);
                for (int64_t i = 0; i < m.group; i += depth, in += depth, weights += depth / INT8_UNIT) {
                    _tile_loadd(1, in, stride);
                    _tile_loadd(2, weights, TILE_BYTES);
                    _tile_dpbssd(0, 1, 2);
                }
                _tile_stored(0, sums[group % 2], TILE_BYTES);
                ahead.will_read(block / 2);
            }
            if (group == 0) continue;  // below, the sums of the group before are added, while this group's are being stored
            const F32x16 scale = load_sixteen_scales(scales, g.scale_bytes);
            const auto& ready = sums[(group - 1) % 2];
#pragma GCC unroll 16
            for (int r = 0; r < TILE_ROWS; r++) {
                const F32x16 scaled = mul_ps(cvtepi32_ps(load_si512(ready[r])), scale);
                totals[r] = fmadd_ps(scaled, set1_ps(constants[r]), totals[r]);
            }
            if (g.has_offsets) {
                const F32x16 offset = load_sixteen_scales(scales + head, g.scale_bytes);
#pragma GCC unroll 16
                for (int r = 0; r < TILE_ROWS; r++) totals[r] = fmadd_ps(set1_ps(scaled_sums[r]), offset, totals[r]);
            }
            scales += block, constants += TILE_ROWS, scaled_sums += TILE_ROWS;
        }
#pragma GCC unroll 16
        for (int r = 0; r < TILE_ROWS; r++) store_ps(out[r], totals[r]);
    }

public:
    // For at most sixteen rows; all sixteen rows of out are written.
    void multiply(const Matrix& m, const char* weights, const char* in, int64_t stride, Prefetch ahead, float (*out)[GROUP], int num_rows,
                  int64_t block, int64_t num_blocks) {
        const Groups g = groups_of(m);
        Prefetch while_multiplying = ahead;
        if (weights != decoded_) {
            decode(m, g, weights, ahead);
            decoded_ = weights, while_multiplying.bytes_per_line = 0;
        }
        const float* constants = constants_of(g, in, stride, num_rows, block, num_blocks);
        for (int part = 0; part < 4; part++) {
            const char* scales = weights + part / 2 * g.count * block_bytes(m) + part % 2 * 16 * g.scale_bytes;
            multiply_part(m, g, rows_.get() + part * m.k / INT8_UNIT, scales, in, stride, constants, while_multiplying,
                          (float(*)[GROUP])(out[0] + 16 * part));
        }
    }
};

}  // namespace
