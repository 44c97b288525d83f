// Products of many rows with weights in groups of inputs, with AMX.
//
// The sums of a group leave their tile as integers, and are scaled and added as in the AVX-512 loops, so that both give the same bits.
// Codes are decoded to signed bytes once for all rows, so no correction for the zero code is needed. While the sums of one group are
// scaled, those of the next are in another tile.

#pragma once

#include <memory>

#include "amx_tiles.h"
#include "groups.h"

namespace {

constexpr int64_t LEAST_GROUPED_ROWS = 40;   // for fewer the AVX-512 loops are as fast
constexpr int64_t LEAST_DEPTH = 32;          // inputs of a tile

bool groups_fit_tiles(const Matrix& m) { return m.group % LEAST_DEPTH == 0 && has_small_sums(m.group); }

// The inputs of a tile, all of one group.
int64_t depth_of(const Matrix& m) { return m.group % TILE_BYTES == 0 ? TILE_BYTES : LEAST_DEPTH; }

// Tiles 0 and 3 hold sums, tiles 1 and 4 rows, tiles 2 and 5 weights.
void shape_for_groups(const Matrix& m, int num_rows) {
    TileShapes shapes;
    const int64_t depth = depth_of(m);
    for (int tile : {0, 3}) {
        shapes.set(tile, num_rows);
        shapes.set(tile + 1, num_rows, depth);
        shapes.set(tile + 2, depth / INT8_UNIT);
    }
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

// Tiles of sums, in memory. Those of missing rows stay at the start.
struct alignas(ALIGN) GroupSums {
    int32_t start[TILE_ROWS][16], stored[2][TILE_ROWS][16];
    GroupSums() { std::fill(start[0], stored[0][0], START), std::fill(stored[0][0], stored[2][0], START); }
};

// The sums of one group after another, in two tiles in turn.
class SumsInTurn {
    const int64_t depth_, steps_, stride_;
    const TileRow* weights_;
    const char* in_;
    GroupSums& sums_;

public:
    SumsInTurn(const Matrix& m, const TileRow* weights, const char* in, int64_t stride, GroupSums& sums)
        : depth_(depth_of(m)), steps_(m.group / depth_), stride_(stride), weights_(weights), in_(in), sums_(sums) {}

    // Multiplies the next group. An instruction names its tiles by literals, so the two turns are written out.
    template <int TURN>
    void multiply() {
        if constexpr (TURN == 0) _tile_loadd(0, sums_.start, TILE_BYTES);
        else _tile_loadd(3, sums_.start, TILE_BYTES);
        for (int64_t step = 0; step < steps_; step++, in_ += depth_, weights_ += depth_ / INT8_UNIT) {
            if constexpr (TURN == 0) {
                _tile_loadd(1, in_, stride_);
                _tile_loadd(2, weights_, TILE_BYTES);
                _tile_dpbssd(0, 1, 2);
            } else {
                _tile_loadd(4, in_, stride_);
                _tile_loadd(5, weights_, TILE_BYTES);
                _tile_dpbssd(3, 4, 5);
            }
        }
    }

    template <int TURN>
    void store() {
        if constexpr (TURN == 0) _tile_stored(0, sums_.stored[0], TILE_BYTES);
        else _tile_stored(3, sums_.stored[1], TILE_BYTES);
        finish_stores();
    }
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
    template <int SCALE_BYTES>
    void multiply_part(const Matrix& m, const Groups& g, const TileRow* weights, const char* scales, const char* in, int64_t stride,
                       const float* constants, Prefetch& ahead, float (*out)[GROUP]) const {
        const int64_t block = block_bytes(m);
        const float* scaled_sums = constants + g.count * TILE_ROWS;
        F32x16 totals[TILE_ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < TILE_ROWS; r++) totals[r] = setzero_ps();
        const auto add = [&](const int32_t(*sums)[16]) __attribute__((always_inline)) {
            const F32x16 scale = load_sixteen_scales(scales, SCALE_BYTES), start = set1_ps(START_AS_FLOAT);
            const F32x16 scaled_start = scaled_start_of(scale);
#pragma GCC unroll 16
            for (int r = 0; r < TILE_ROWS; r++) {
                const F32x16 sum = load_ps((const float*)sums[r]);
                const F32x16 scaled = SCALE_BYTES == 2 ? fmsub_ps(sum, scale, scaled_start) : mul_ps(sub_ps(sum, start), scale);
                totals[r] = fmadd_ps(scaled, set1_ps(constants[r]), totals[r]);
            }
            if (g.has_offsets) {
                const F32x16 offset = load_sixteen_scales(scales + BESIDE * SCALE_BYTES, SCALE_BYTES);
#pragma GCC unroll 16
                for (int r = 0; r < TILE_ROWS; r++) totals[r] = fmadd_ps(set1_ps(scaled_sums[r]), offset, totals[r]);
            }
            scales += block, constants += TILE_ROWS, scaled_sums += TILE_ROWS;
            ahead.will_read(block / 2);
        };
        SumsInTurn sums(m, weights, in, stride, *sums_);
        sums.multiply<0>();
        for (int64_t group = 0; group < g.count; group += 2) {
            if (group + 1 < g.count) sums.multiply<1>();
            sums.store<0>();
            if (group > 0) add(sums_->stored[1]);
            if (group + 2 < g.count) sums.multiply<0>();
            if (group + 1 < g.count) sums.store<1>();
            add(sums_->stored[0]);
        }
        if (g.count % 2 == 0) add(sums_->stored[1]);
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
            const TileRow* decoded = rows_.get() + part * m.k / INT8_UNIT;
            const auto to = (float(*)[GROUP])(out[0] + 16 * part);
            if (g.scale_bytes == 2) multiply_part<2>(m, g, decoded, scales, in, stride, constants, while_multiplying, to);
            else multiply_part<4>(m, g, decoded, scales, in, stride, constants, while_multiplying, to);
        }
    }
};

}  // namespace
