// Attention with AMX: scores and weighted sums of values, a tile of queries at a time (see attention.h).
//
// Keys are read in chunks, twice: first for the largest score of each query, then for the weights and the sums of values. Scores are
// computed again the second time, which takes less time than to store those of all keys and to read them again. Then a block can have so
// many queries that rearranging keys and values for tiles takes little time. The products of one tile of queries are kept.

#pragma once

#include <vector>

#include "amx_scores.h"
#include "amx_values.h"

namespace {

bool attends_by_tiles(const AttentionCall& call) { return call.key_dim % 32 == 0 && call.value_dim % COLUMNS == 0; }

// The softmax of a query, chunk by chunk.
struct Softmax {
    F32x16 largest = set1_ps(-INFINITY), sum = setzero_ps();
    float most;                                // the largest score, once all are known
};

// Computes the weights of one query from products, a block of positions at a time. In a block that is all seen, scores are only scaled
// products: there the scale and the change to powers of two are one multiplication.
class Weigher {
    const AttentionCall& call_;
    const Query& query_;
    const bool is_plain_;

    bool is_scaled(int64_t j) const { return is_plain_ && j >= query_.earliest && j + KEYS <= query_.position + 1; }

    F32x16 score(int64_t j, const float* products) const { return seen_scores(call_, query_, j, loadu_ps(products)); }

public:
    Weigher(const AttentionCall& call, const Query& query)
        : call_(call), query_(query), is_plain_(only_scales(call, query)) {}

    // products, leading, rest: from seen.first on
    void raise_largest(const Positions& seen, const float* products, Softmax& softmax) const {
        F32x16 largest = softmax.largest, largest_product = set1_ps(-INFINITY);
        for (int64_t j = seen.first; j < seen.end; j += KEYS, products += KEYS) {
            if (is_scaled(j)) {
                largest_product = max_ps(loadu_ps(products), largest_product);
                largest_product = max_ps(loadu_ps(products + HALF), largest_product);
            } else if (query_.sees(j, KEYS)) {
                largest = max_ps(score(j, products), largest);
                largest = max_ps(score(j + HALF, products + HALF), largest);
            }
        }
        softmax.largest = is_plain_ ? max_ps(mul_ps(largest_product, set1_ps(call_.scale)), largest) : largest;
    }

    // Writes the two parts of the weights, 0 for keys that are not seen.
    void split_weights(const Positions& seen, const float* products, uint16_t* leading, uint16_t* rest, Softmax& softmax) const {
        const F32x16 most = set1_ps(softmax.most);
        const ScaledWeights scaled(call_.scale, softmax.most);
        F32x16 sum = softmax.sum;
        for (int64_t j = seen.first; j < seen.end; j += KEYS, products += KEYS, leading += KEYS, rest += KEYS) {
            F32x16 first = setzero_ps(), second = setzero_ps();
            if (is_scaled(j)) {
                first = scaled(loadu_ps(products)), second = scaled(loadu_ps(products + HALF));
            } else if (query_.sees(j, KEYS)) {
                first = exp_nonpositive(sub_ps(score(j, products), most));
                second = exp_nonpositive(sub_ps(score(j + HALF, products + HALF), most));
            }
            sum = add_ps(sum, add_ps(first, second));
            store_weights(first, second, leading, rest);
        }
        softmax.sum = sum;
    }
};

// Calls prepare(chunk) for each chunk, and visit(tile, the positions that it sees, the chunk's first) for each tile that sees some.
template <class Prepare, class Visit>
void for_each_chunk(const TiledBlock& b, const Prepare& prepare, const Visit& visit) {
    const int64_t num_keys = round_up(b.block.num_keys, KEYS);
    for (int64_t first = b.block.earliest / KEYS * KEYS; first < num_keys; first += CHUNK) {
        const Positions chunk = {first, std::min(first + CHUNK, num_keys)};
        prepare(chunk);
        for (int64_t tile = 0; tile < b.num_tiles(); tile++) {
            const Positions seen = b.seen_by(tile, chunk);
            if (!seen.is_empty()) visit(tile, seen, first);
        }
    }
}

void find_largest(const TiledBlock& b, Softmax* softmaxes) {
    const auto prepare = [&](const Positions& chunk) {
        if (b.has_many()) lay_out_keys(b, chunk);
    };
    for_each_chunk(b, prepare, [&](int64_t tile, const Positions& seen, int64_t chunk) {
        if (b.has_many()) multiply_chunk(b, tile, seen, chunk);
        for (int64_t i = b.first_query(tile); i < b.end_of_tile(tile); i++)
            Weigher(b.call, b.block.queries[i]).raise_largest(seen, b.product(i, seen.first, chunk), softmaxes[i]);
    });
    for (int64_t i = 0; i < b.block.count; i++) softmaxes[i].most = most_of(b.block.queries[i], softmaxes[i].largest);
}

void weigh_chunks(TiledBlock& b, Softmax* softmaxes) {
    const auto prepare = [&](const Positions& chunk) {
        if (!b.keeps_products()) lay_out_keys(b, chunk);
        lay_out_values(b, chunk);
    };
    for_each_chunk(b, prepare, [&](int64_t tile, const Positions& seen, int64_t chunk) {
        if (!b.keeps_products()) multiply_chunk(b, tile, seen, chunk);
        for (int64_t i = b.first_query(tile); i < b.end_of_tile(tile); i++) {
            const int64_t at = i % b.tile_rows * CHUNK + seen.first - chunk;
            const Weigher weigher(b.call, b.block.queries[i]);
            weigher.split_weights(seen, b.product(i, seen.first, chunk), b.leading + at, b.rest + at, softmaxes[i]);
        }
        weigh_chunk(b, tile, seen, chunk);
    });
    for (int64_t i = 0; i < b.block.count; i++) {
        Query& query = b.block.queries[i];
        query.inverse = inverse_of(query, softmaxes[i].most, softmaxes[i].sum);
    }
}

void attend_by_tiles(const AttentionCall& call, const QueryBlock& block) {
    const int64_t tile_rows = std::min<int64_t>(block.count, TILE_ROWS), num_rows = round_up(block.count, tile_rows);
    const int64_t units = num_steps(call.key_dim) * PARTS, width = call.value_dim;
    thread_local std::vector<char> memory;
    const int64_t numbers = num_rows * width + TILE_ROWS * CHUNK, shorts = CHUNK * (width + 2 * TILE_ROWS);
    const int64_t key_units = (num_rows + CHUNK + 16) * units;
    memory.resize(4 * (numbers + key_units) + 2 * shorts + num_rows * sizeof(Softmax) + 16 * ALIGN);
    Arena arena = {(char*)round_up((int64_t)memory.data(), ALIGN)};
    TiledBlock b = {call, block, tile_rows, num_rows};
    b.queries = arena.take<Unit>(num_rows * units), b.keys = arena.take<Unit>(CHUNK * units), b.path_keys = arena.take<Unit>(16 * units);
    b.values = arena.take<uint16_t>(CHUNK * width), b.products = arena.take<float>(TILE_ROWS * CHUNK);
    b.leading = arena.take<uint16_t>(TILE_ROWS * CHUNK), b.rest = arena.take<uint16_t>(TILE_ROWS * CHUNK);
    b.sums = arena.take<float>(num_rows * width);
    Softmax* softmaxes = arena.take<Softmax>(num_rows);
    std::fill_n(softmaxes, num_rows, Softmax());
    std::fill_n(b.sums, num_rows * width, 0.0f);
    const WithoutDenormals without;
    if (b.has_many()) {
        lay_out_queries(b);
    } else {
        shape_for_one_query();
        for (int64_t i = 0; i < block.count; i++) multiply_alone(call, block, block.queries[i]);
    }
    shape_for_queries(tile_rows);
    find_largest(b, softmaxes);
    weigh_chunks(b, softmaxes);
    _tile_release();
    for (int64_t i = 0; i < block.count; i++)
        for (int64_t column = 0; column < width; column += COLUMNS)
            store_output(call, block.queries[i], column, load_ps(b.sums + i * width + column));
}

}  // namespace
