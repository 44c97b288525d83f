// Products of more than a few rows with weights in groups of inputs, with AMX.
//
// Each group of 32 outputs passes through four stages. Its codes are decoded to signed bytes, so no correction for the zero code is
// needed; they are multiplied; the sums leave their tiles as integers; and these are scaled and added as in the AVX-512 loops, so that
// both give the same bits. The stages work on different groups at the same time, so that none waits for another. Later blocks of rows
// multiply the weights that the first one decoded.

#pragma once

#include <memory>

#include "amx_tiles.h"
#include "groups.h"

namespace {

constexpr int64_t LEAST_DEPTH = 32;          // inputs of a tile

// Up to twelve rows, or twice eleven, the AVX-512 loops are as fast.
bool fill_tiles(int64_t num_rows) { return num_rows > 22 || (num_rows > 12 && num_rows <= TILE_ROWS); }

bool groups_fit_tiles(const Matrix& m) { return m.group % LEAST_DEPTH == 0 && has_small_sums(m.group); }

// The inputs of a tile, all of one group.
int64_t depth_of(const Matrix& m) { return m.group % TILE_BYTES == 0 ? TILE_BYTES : LEAST_DEPTH; }

// Groups take turns. Tiles 0 and 1 hold the sums of even ones and tile 4 their rows, tiles 2, 3 and 7 those of odd ones; 5 and 6 hold
// weights.
void shape_for_groups(const Matrix& m, int num_rows) {
    TileShapes shapes;
    const int64_t depth = depth_of(m);
    for (int tile : {0, 1, 2, 3}) shapes.set(tile, num_rows);
    for (int tile : {4, 7}) shapes.set(tile, num_rows, depth);
    for (int tile : {5, 6}) shapes.set(tile, depth / INT8_UNIT);
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

// Tiles of sums in memory, of an even and an odd group. Those of missing rows stay at the start.
struct alignas(ALIGN) GroupSums {
    int32_t start[16], stored[2][2][TILE_ROWS][16];
    GroupSums() { std::fill_n(start, 16, START), std::fill_n(stored[0][0][0], sizeof stored / sizeof(int32_t), START); }
};

// The constants of a block of rows, transposed: [groups, 16], 0 for missing rows.
struct RowConstants {
    const float *scales, *scaled_sums;
};

// The product of all rows with 64 outputs after another. num_blocks: of rows, which take turns at each 64 outputs.
class GroupedProduct {
    const Matrix& m_;
    const Groups g_ = groups_of(m_);
    const Decoder decoder_{m_};
    const int64_t block_bytes_ = block_bytes(m_), line_bytes_ = unit_of(m_) * BESIDE, heads_ = block_bytes_ - line_bytes_ * g_.steps;
    const int64_t depth_ = depth_of(m_), tiles_per_group_ = m_.group / depth_, rows_per_group_ = m_.group / INT8_UNIT;
    const int64_t num_kept_, kept_bits_;        // decoded groups: all, or two if there is one block of rows; bits of their places
    std::unique_ptr<TileRow[]> decoded_{new TileRow[4 * num_kept_ * rows_per_group_]};
    std::unique_ptr<float[]> constants_;
    std::unique_ptr<GroupSums> sums_{new GroupSums};
    int64_t num_prepared_ = 0;                  // blocks of rows for which constants_ is filled

    // The decoded weights of a group for sixteen outputs.
    TileRow* decoded(int part, int64_t group) const {
        return decoded_.get() + (part * num_kept_ + (group & kept_bits_)) * rows_per_group_;
    }

    RowConstants constants_of(const char* in, int64_t stride, int num_rows, int64_t block) {
        const int64_t count = g_.count * TILE_ROWS;
        float* to = constants_.get() + 2 * block * count;
        for (; num_prepared_ <= block; num_prepared_++)
            for (int r = 0; r < num_rows; r++) {
                const float* from = (const float*)(in + r * stride + g_.constants_at) + g_.count;
                for (int64_t i = 0; i < 2 * g_.count; i++) to[i * TILE_ROWS + r] = from[i];
            }
        return {to, to + count};
    }

    INLINE void decode(const char* from, TileRow* first, TileRow* second, Prefetch& ahead) const {
        from += heads_;
        has_read_lines(ahead, heads_ / TILE_BYTES, false);
        for (int64_t step = 0; step < g_.steps; step++, from += line_bytes_) {
            has_read_lines(ahead, line_bytes_ / TILE_BYTES, false);
            const I512 a = load_si512(from), b = load_si512(from + TILE_BYTES);
            if (m_.kind == INT8_GROUPS) {
                _mm512_store_si512(first++, decoder_.eight_bits(a));
                _mm512_store_si512(second++, decoder_.eight_bits(b));
            } else {
                _mm512_store_si512(first++, decoder_.four_bits(a));
                _mm512_store_si512(first++, decoder_.four_bits(_mm512_srli_epi16(a, 4)));
                _mm512_store_si512(second++, decoder_.four_bits(b));
                _mm512_store_si512(second++, decoder_.four_bits(_mm512_srli_epi16(b, 4)));
            }
        }
        finish_stores();
    }

    // An instruction names its tiles by literals, so the two turns are written out.
    template <int TURN>
    INLINE void multiply(const char* in, int64_t stride, const TileRow* first, const TileRow* second) const {
        if constexpr (TURN == 0) {
            _tile_loadd(0, sums_->start, 0);
            _tile_loadd(1, sums_->start, 0);
        } else {
            _tile_loadd(2, sums_->start, 0);
            _tile_loadd(3, sums_->start, 0);
        }
        for (int64_t i = 0; i < tiles_per_group_; i++, in += depth_, first += depth_ / INT8_UNIT, second += depth_ / INT8_UNIT) {
            if constexpr (TURN == 0) {
                _tile_loadd(4, in, stride);
                _tile_loadd(5, first, TILE_BYTES);
                _tile_dpbssd(0, 4, 5);
                _tile_loadd(6, second, TILE_BYTES);
                _tile_dpbssd(1, 4, 6);
            } else {
                _tile_loadd(7, in, stride);
                _tile_loadd(5, first, TILE_BYTES);
                _tile_dpbssd(2, 7, 5);
                _tile_loadd(6, second, TILE_BYTES);
                _tile_dpbssd(3, 7, 6);
            }
        }
    }

    template <int TURN>
    INLINE void store() const {
        if constexpr (TURN == 0) {
            _tile_stored(0, sums_->stored[0][0], TILE_BYTES);
            _tile_stored(1, sums_->stored[0][1], TILE_BYTES);
        } else {
            _tile_stored(2, sums_->stored[1][0], TILE_BYTES);
            _tile_stored(3, sums_->stored[1][1], TILE_BYTES);
        }
        finish_stores();
    }

    template <int ROWS, int SCALE_BYTES>
    INLINE void scale(const int32_t (*sums)[TILE_ROWS][16], const char* scales, const RowConstants& rows, F32x16 (*totals)[ROWS]) const {
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++, scales += 16 * SCALE_BYTES) {
            const F32x16 scale = load_sixteen_scales(scales, SCALE_BYTES), start = set1_ps(START_AS_FLOAT), scaled_start = scaled_start_of(scale);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                const F32x16 sum = load_ps((const float*)sums[v][r]);
                const F32x16 scaled = SCALE_BYTES == 2 ? fmsub_ps(sum, scale, scaled_start) : mul_ps(sub_ps(sum, start), scale);
                totals[v][r] = fmadd_ps(scaled, set1_ps(rows.scales[r]), totals[v][r]);
            }
            if (!g_.has_offsets) continue;
            const F32x16 offset = load_sixteen_scales(scales + BESIDE * SCALE_BYTES, SCALE_BYTES);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) totals[v][r] = fmadd_ps(set1_ps(rows.scaled_sums[r]), offset, totals[v][r]);
        }
    }

    // Multiplies up to ROWS rows by 32 outputs. part: the first of their two parts; are_decoded: whether a block before decoded them
    template <int ROWS, int SCALE_BYTES>
    void multiply_parts(const char* weights, int part, bool are_decoded, const char* in, int64_t stride, const RowConstants& rows,
                        Prefetch& ahead, float (*out)[GROUP]) const {
        F32x16 totals[2][ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) totals[0][r] = totals[1][r] = setzero_ps();
        const auto step = [&](auto turn, int64_t group) __attribute__((always_inline)) {
            constexpr int TURN = turn.value;  // of group, which is scaled
            const int64_t to_decode = group + 3, to_multiply = group + 2, to_store = group + 1;
            const auto exists = [&](int64_t group) { return group >= 0 && group < g_.count; };
            if (exists(to_decode)) {
                if (are_decoded) ahead.will_read(block_bytes_);
                else decode(weights + to_decode * block_bytes_, decoded(part, to_decode), decoded(part + 1, to_decode), ahead);
            }
            if (exists(to_multiply)) multiply<TURN>(in + to_multiply * m_.group, stride, decoded(part, to_multiply), decoded(part + 1, to_multiply));
            if (exists(to_store)) store<1 - TURN>();
            if (!exists(group)) return;
            scale<ROWS, SCALE_BYTES>(sums_->stored[TURN], weights + group * block_bytes_,
                                     {rows.scales + group * TILE_ROWS, rows.scaled_sums + group * TILE_ROWS}, totals);
        };
        for (int64_t group = -3; group < g_.count; group += 2) {
            step(std::integral_constant<int, 1>{}, group);
            step(std::integral_constant<int, 0>{}, group + 1);
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) store_ps(out[r], totals[0][r]), store_ps(out[r] + 16, totals[1][r]);
    }

    template <int ROWS>
    void multiply_rows(const char* weights, bool are_decoded, const char* in, int64_t stride, const RowConstants& rows, Prefetch ahead,
                       float (*out)[GROUP]) const {
        for (int part = 0; part < 4; part += 2, weights += g_.count * block_bytes_) {
            const auto to = (float(*)[GROUP])(out[0] + 16 * part);
            if (g_.scale_bytes == 2) multiply_parts<ROWS, 2>(weights, part, are_decoded, in, stride, rows, ahead, to);
            else multiply_parts<ROWS, 4>(weights, part, are_decoded, in, stride, rows, ahead, to);
        }
    }

public:
    GroupedProduct(const Matrix& m, int64_t num_blocks)
        : m_(m), num_kept_(num_blocks > 1 ? g_.count : 2), kept_bits_(num_blocks > 1 ? -1 : 1),
          constants_(new float[2 * num_blocks * g_.count * TILE_ROWS]()) {}

    // For at most sixteen rows; all sixteen rows of out may be written.
    void multiply(const char* weights, const char* in, int64_t stride, const Prefetch& ahead, float (*out)[GROUP], int num_rows, int64_t block) {
        constexpr int FEW = 3 * TILE_ROWS / 4;
        const RowConstants rows = constants_of(in, stride, num_rows, block);
        if (num_rows <= FEW) multiply_rows<FEW>(weights, block > 0, in, stride, rows, ahead, out);
        else multiply_rows<TILE_ROWS>(weights, block > 0, in, stride, rows, ahead, out);
    }
};

}  // namespace
