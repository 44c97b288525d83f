// Products of many rows with AMX: an instruction multiplies sixteen rows by sixteen outputs over 64 bytes of inputs.
//
// Matrices are packed as the AVX-512 loops read them, so a tile of weights is every fourth line of a packed group. Integer sums equal
// those of these loops. bfloat16 is summed in another order, which an AVX-512 loop for one or two rows reproduces.

#pragma once

#include <utility>

#include "amx_groups.h"
#include "amx_tiles.h"

namespace {

constexpr int MOST_TILED_ROWS = 2 * TILE_ROWS;    // of one call
constexpr int LEAST_WHOLE_ROWS = 7;               // for fewer rows of integers the AVX-512 loops are as fast
constexpr int LEAST_TILED_ROWS = 3;               // of bfloat16: products of fewer rows are limited by memory, which tiles read more slowly
constexpr int64_t LINE = 4 * GROUP;               // bytes from one row of a tile of weights to the next

bool has_tiles(const Matrix& m) { return (m.kind == BF16 && m.k % 32 == 0) || (m.kind == INT8 && m.k % TILE_BYTES == 0); }

bool uses_tiles(const Matrix& m, int64_t num_rows) {
    if (has_groups(m)) return groups_fit_tiles(m) && fill_tiles(num_rows);
    return has_tiles(m) && (m.kind == BF16 || num_rows >= LEAST_WHOLE_ROWS);
}

// The most rows of one call.
int64_t most_tiled_rows(const Matrix& m) { return has_groups(m) ? TILE_ROWS : MOST_TILED_ROWS; }

// Tiles 0 to 3 hold sums. Up to sixteen rows: 4 holds rows, 5 and 6 weights; more rows: 4 and 5 hold rows, 6 and 7 weights.
TileShapes shapes_for(int num_rows) {
    TileShapes shapes;
    const bool are_few = num_rows <= TILE_ROWS;
    const int first_rows = are_few ? num_rows : TILE_ROWS, later_rows = are_few ? TILE_ROWS : num_rows - TILE_ROWS;
    for (int tile : {0, 1, 4}) shapes.set(tile, first_rows);
    for (int tile : {2, 3}) shapes.set(tile, are_few ? num_rows : later_rows);
    for (int tile : {6, 7}) shapes.set(tile, TILE_ROWS);
    shapes.set(5, later_rows);
    return shapes;
}

void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// sums[tile] += rows[tile] by weights[tile]
#define MULTIPLY(sums, rows, weights) \
    if constexpr (KIND == BF16) { \
        _tile_dpbf16ps(sums, rows, weights); \
    } else { \
        _tile_dpbusd(sums, rows, weights); \
    }

// Up to sixteen rows by 64 outputs. steps: of 64 bytes of a row.
template <int KIND>
void multiply_few(int64_t steps, const char* weights, const char* in, int64_t stride, Prefetch ahead, float (*out)[GROUP]) {
    constexpr int64_t QUARTER = TILE_ROWS * LINE / 4;  // fetched before each tile: fetching all at once would delay the tile's own lines
    zero_sums();
    for (int64_t step = 0; step < steps; step++, in += TILE_BYTES, weights += TILE_ROWS * LINE) {
        _tile_loadd(4, in, stride);
        ahead.will_read(QUARTER);
        _tile_loadd(5, weights, LINE);
        MULTIPLY(0, 4, 5);
        ahead.will_read(QUARTER);
        _tile_loadd(6, weights + TILE_BYTES, LINE);
        MULTIPLY(1, 4, 6);
        ahead.will_read(QUARTER);
        _tile_loadd(5, weights + 2 * TILE_BYTES, LINE);
        MULTIPLY(2, 4, 5);
        ahead.will_read(QUARTER);
        _tile_loadd(6, weights + 3 * TILE_BYTES, LINE);
        MULTIPLY(3, 4, 6);
    }
    _tile_stored(0, out[0], sizeof *out);
    _tile_stored(1, out[0] + 16, sizeof *out);
    _tile_stored(2, out[0] + 32, sizeof *out);
    _tile_stored(3, out[0] + 48, sizeof *out);
}

// More than sixteen rows by 64 outputs, 32 outputs at a time: each loaded tile is multiplied twice.
template <int KIND>
void multiply_many(int64_t steps, const char* weights, const char* in, int64_t stride, Prefetch ahead, float (*out)[GROUP]) {
    for (int half = 0; half < 2; half++) {
        const char *w = weights + half * 2 * TILE_BYTES, *first = in, *later = in + TILE_ROWS * stride;
        zero_sums();
        for (int64_t step = 0; step < steps; step++, first += TILE_BYTES, later += TILE_BYTES, w += TILE_ROWS * LINE) {
            ahead.will_read(TILE_ROWS * LINE / 2);
            _tile_loadd(4, first, stride);
            _tile_loadd(6, w, LINE);
            MULTIPLY(0, 4, 6);
            _tile_loadd(7, w + TILE_BYTES, LINE);
            MULTIPLY(1, 4, 7);
            _tile_loadd(5, later, stride);
            MULTIPLY(2, 5, 6);
            MULTIPLY(3, 5, 7);
        }
        float* to = out[0] + half * 32;
        _tile_stored(0, to, sizeof *out);
        _tile_stored(1, to + 16, sizeof *out);
        _tile_stored(2, to + TILE_ROWS * GROUP, sizeof *out);
        _tile_stored(3, to + TILE_ROWS * GROUP + 16, sizeof *out);
    }
}

#undef MULTIPLY

// Sums in the order of the tile instruction: of each 32 inputs, those at even and those at odd places are summed separately; then the
// two are added, and their sum is added to the total.
template <int R>
void multiply_pairs(int64_t steps, const char* weights, const char* in, int64_t stride, Prefetch ahead, float (*out)[GROUP]) {
    F32x16 sums[R][4];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < 4; p++) sums[r][p] = setzero_ps();
    for (int64_t step = 0; step < steps; step++) {
        F32x16 even[R][4], odd[R][4];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int p = 0; p < 4; p++) even[r][p] = odd[r][p] = setzero_ps();
        for (int pair = 0; pair < TILE_BYTES; pair += 4, weights += LINE) {
#pragma GCC unroll 8
            for (int p = 0; p < 4; p++) {
                const I512 both = load_si512(weights + p * 64);
                ahead.has_read(64);
                const F32x16 first = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
                const F32x16 second = _mm512_castsi512_ps(_mm512_and_si512(both, set1_epi32((int)0xffff0000)));
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    uint32_t two;
                    memcpy(&two, in + r * stride + step * TILE_BYTES + pair, 4);
                    even[r][p] = fmadd_ps(_mm512_castsi512_ps(set1_epi32((int)(two << 16))), first, even[r][p]);
                    odd[r][p] = fmadd_ps(_mm512_castsi512_ps(set1_epi32((int)(two & 0xffff0000))), second, odd[r][p]);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int p = 0; p < 4; p++) sums[r][p] = add_ps(sums[r][p], add_ps(even[r][p], odd[r][p]));
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < 4; p++) store_ps(out[r] + 16 * p, sums[r][p]);
}

// The tiles of a thread. They are configured for a number of rows, and released at the end, so that a context switch has none to save.
class Tiles {
    int num_rows_ = 0;
    const WithoutDenormals without_;
    std::unique_ptr<GroupedProduct> grouped_;

    void shape(int num_rows) {
        if (num_rows == num_rows_) return;
        num_rows_ = num_rows;
        const TileShapes shapes = shapes_for(num_rows);
        shapes.load();
    }

    template <int KIND>
    void multiply(int64_t steps, const char* weights, const char* in, int64_t stride, const Prefetch& ahead, float (*out)[GROUP],
                  int num_rows) {
        shape(num_rows);
        if (num_rows <= TILE_ROWS) multiply_few<KIND>(steps, weights, in, stride, ahead, out);
        else multiply_many<KIND>(steps, weights, in, stride, ahead, out);
    }

public:
    explicit Tiles(const Matrix& m) : without_(m.kind == BF16) {}

    ~Tiles() {
        if (num_rows_ > 0) _tile_release();
    }

    // out: the sums of at most MOST_TILED_ROWS rows; sums of integers stay integers
    void multiply(const Matrix& m, const char* weights, const char* in, int64_t stride, const Prefetch& ahead, float (*out)[GROUP],
                  int num_rows, int64_t block, int64_t num_blocks) {
        if (has_groups(m)) {
            if (std::exchange(num_rows_, num_rows) != num_rows) shape_for_groups(m, num_rows);
            if (grouped_ == nullptr) grouped_.reset(new GroupedProduct(m, num_blocks));
            return grouped_->multiply(weights, in, stride, ahead, out, num_rows, block);
        }
        if (m.kind == INT8) return multiply<INT8>(m.k / TILE_BYTES, weights, in, stride, ahead, out, num_rows);
        const int64_t steps = m.k / (TILE_BYTES / 2);
        if (num_rows == 1) return multiply_pairs<1>(steps, weights, in, stride, ahead, out);
        if (num_rows < LEAST_TILED_ROWS) return multiply_pairs<2>(steps, weights, in, stride, ahead, out);
        multiply<BF16>(steps, weights, in, stride, ahead, out, num_rows);
    }
};

}  // namespace
