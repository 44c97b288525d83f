// Matrix products, attention and whole decoder stacks for a few rows, on x86.
//
// One rule governs every loop here: a row's numbers are summed in an order that depends on nothing but the row. So its
// bits do not depend on how many rows share the pass, on which thread computes it, or on how many keys follow its own.
//
// Everything is called from one OpenMP team per pass; a `Team` says which thread this is. Names: n outputs, k inputs,
// T rows of a pass, D width of a head. Sixteen numbers at a time, by what avx512.h or avx2.h make of them: names are those
// of Intel's instructions, and the inner loops are there too.

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <omp.h>
#include <sched.h>
#include <sys/mman.h>
#include <utility>
#include <vector>

#ifdef __AVX512F__
#include "avx512.h"
#else
#include "avx2.h"
#endif

namespace {

constexpr int ROWS = 6;           // rows of a tile
constexpr int QUERIES = 8;        // query rows that share one reading of the keys
constexpr int PRIVATE_ROWS = 8;   // up to here every thread prepares all rows itself, which spares a barrier
constexpr int PREFETCH = 4096;    // bytes ahead: past the page at which the hardware's prefetcher stops
constexpr int64_t IN_CACHE = 384 << 10;  // bytes of a group up to which the next one fits beside it in the second cache
constexpr int SPINS = 1000;       // looks at a barrier before the processor is offered to others: some 20 microseconds

enum Kind : int64_t { BF16 = 0, INT8 = 1 };
enum Choosing : int64_t { GREEDY = 0, DRAWN = 1, SHARED = 2 };

int64_t group_bytes(int64_t k, int64_t kind) { return GROUP * (kind == INT8 ? round_up(k, INT8_UNIT) : 2 * round_up(k, 2)); }

}  // namespace

extern "C" {

struct Matrix {
    const void* weights;        // packed
    const float* scales;        // [n] int8 only
    const int32_t* corrections; // [n] int8 only: what the numbers added to each row make of an output's weights
    const float* bias;          // [n] or null
    int64_t n, k, kind;
};

struct Layer {
    const float *input_norm, *post_norm;   // [hidden]
    const float *q_norm, *k_norm;          // [D] or null
    Matrix qkv, out, gate_up, down;        // gate_up: groups of 32 gates and their 32 ups
    int64_t window;                        // 0: all earlier keys
};

struct Stack {
    const Layer* layers;
    const uint16_t* embedding;             // [V, hidden] bfloat16
    const float* final_norm;
    Matrix head;
    int64_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate;
    float epsilon, scale;
};

struct Span {                              // rows of a pass that belong to one sequence
    int64_t first_row, num_rows, start, capacity;
};

struct Batch {
    const int32_t *ids, *positions;        // [T]
    const int32_t* wanted;                 // [W] rows whose logits are wanted
    const float *cos, *sin;                // [positions, D / 2]
    const Span* spans;
    uint16_t* const* stores;               // [num_spans, layers, 2]: keys [H, capacity, D] and values
    uint16_t* logits;                      // [W, V] bfloat16
    int64_t num_rows, num_wanted, num_spans;
};

// How the tokens behind a row are chosen: the likeliest, one drawn from the law with a uniform number, or the one that
// noise shared with others favours (see sampling/noise.py). The law is softmax(logits / temperature), truncated.
struct DrawSpec {
    int64_t kind, first_noise;             // where its uniform numbers or its keys begin, one for each token
    int64_t first_prob_row;                     // where the token_probs of its drawn tokens go, one row each
    int64_t top_k;                         // 0: all
    float temperature, top_p, min_p, unused;
};

// TokenProbs of drawn tokens. A row holds `kept[r]` ids, likeliest first, or, where nothing is truncated, all of them in order.
struct TokenProbs {
    float* probs;                          // [R, width]
    int64_t* ids;                          // [R, width]; null where no spec truncates
    int64_t* kept;                         // [R]
    int64_t width;
};

// Sequences whose draft tokens are weighed: sequence b's rows of logits begin at first_rows[b], its draft tokens, and the
// token_probs that each was drawn from (-1: it was certain), at places[b] of [B, K].
struct VerificationBatch {
    const int64_t *first_rows, *lens, *places;  // [num_sequences]
    const DrawSpec* specs;                            // the target's
    const int64_t* rules;                       // 0: rejection, 1: block
    const int64_t *ids, *prob_rows;              // [B, K]
    const float* probs;                         // [R, columns]: the drafts' token_probs
    const int64_t* kept_ids;                    // [R, columns], or null: each column is its id
    const double* uniforms;                     // [num_sequences, 2]
    int64_t num_sequences, max_len, columns, probs_stride, kept_stride;
};

struct AttentionCall {
    const uint16_t* query;                 // element (head, row, i) at head * query_head + row * query_row + i
    int64_t query_head, query_row;
    const uint16_t *keys, *values;         // [H, capacity, Dk], [H, capacity, Dv]
    int64_t capacity;
    const uint8_t* mask;                   // [num_rows, mask_keys], 0 hides a key; null: all earlier ones are seen
    int64_t mask_keys;
    const float* sinks;                    // [num_heads] or null
    uint16_t* output;                      // [num_rows, num_heads, Dv]
    int64_t num_rows, start, num_heads, num_kv_heads, key_dim, value_dim, window;
    float scale, softcap;                  // softcap 0: none
};

}  // extern "C"

namespace {

// OpenMP's own barrier spins for milliseconds, which starves the thread that is waited for where processors are shared.
struct Barrier {
    alignas(ALIGN) std::atomic<int> arrived{0};
    alignas(ALIGN) std::atomic<int> round{0};
    void wait(int size) {
        const int mine = round.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            arrived.store(0, std::memory_order_relaxed);
            round.store(mine + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round.load(std::memory_order_acquire) == mine;)
            if (++spins < SPINS) _mm_pause(); else sched_yield();
    }
};

struct Team {
    int rank, size;
    Barrier* barrier;
    void wait() const { barrier->wait(size); }
    void share(int64_t count, int64_t& first, int64_t& last) const {
        first = count * rank / size;
        last = count * (rank + 1) / size;
    }
};

template <class Work>
void with_team(int64_t num_threads, const Work& work) {
    Barrier barrier;
#pragma omp parallel num_threads(num_threads)
    work(Team{omp_get_thread_num(), omp_get_num_threads(), &barrier});
}

// ---------------------------------------------------------------------------------------------- small vector helpers


// exp for -87 <= x <= 0. Polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2], error about 1e-7.
F32x16 exp_above(F32x16 x) {
    const F32x16 whole = round_ps(mul_ps(x, set1_ps(1.44269504f)));
    F32x16 rest = fnmadd_ps(whole, set1_ps(0.693359375f), x);
    rest = fnmadd_ps(whole, set1_ps(-2.12194440e-4f), rest);
    F32x16 sum = set1_ps(1.0f / 720);
    sum = fmadd_ps(sum, rest, set1_ps(1.0f / 120));
    sum = fmadd_ps(sum, rest, set1_ps(1.0f / 24));
    sum = fmadd_ps(sum, rest, set1_ps(1.0f / 6));
    sum = fmadd_ps(sum, rest, set1_ps(0.5f));
    sum = fmadd_ps(sum, rest, set1_ps(1.0f));
    sum = fmadd_ps(sum, rest, set1_ps(1.0f));
    return scalef_ps(sum, whole);
}

// exp for x <= 0; exactly 0 below -87; NaN stays NaN.
F32x16 exp_nonpositive(F32x16 x) {
    const Mask16 seen = at_least(x, set1_ps(-87.0f));
    const Mask16 is_nan = is_nan_ps(x);
    const F32x16 found = exp_above(max_ps(x, set1_ps(-87.0f)));
    return mask_mov_ps(maskz_mov_ps(seen, found), is_nan, x);
}

// x * sigmoid(x), through exp(-|x|) so that nothing overflows
F32x16 silu(F32x16 x) {
    const F32x16 one = set1_ps(1.0f);
    const F32x16 e = exp_nonpositive(sub_ps(setzero_ps(), abs_ps(x)));
    const Mask16 positive = at_least(x, setzero_ps());
    return div_ps(mul_ps(x, mask_mov_ps(e, positive, one)), add_ps(one, e));
}

// --------------------------------------------------------------------------------------------------- rows of products

// The left side of a product: bfloat16 rows, or int8 rows with a scale each, as the inner loops read them.
struct Rows {
    char* data;
    float* scales;
    int64_t stride;             // bytes
    void* row(int64_t r) const { return data + r * stride; }
};

int64_t row_bytes(int64_t k) { return round_up((int64_t)sizeof(Short) * k, ALIGN); }

// The scale of a row is its largest magnitude over 127; one that is not finite poisons the scale, so that no NaN is lost.
template <class Read>
void quantise_row(int64_t k, Whole* to, float* scale, const Read& read) {
    F32x16 largest = setzero_ps(), poison = setzero_ps();
    for (int64_t i = 0; i < k; i += 16) {
        const F32x16 x = read(i, lanes(k - i));
        largest = max_ps(largest, abs_ps(x));
        poison = fmadd_ps(x, setzero_ps(), poison);
    }
    const float most = reduce_max_ps(largest) + reduce_add_ps(poison);
    *scale = most / 127.0f;
    const F32x16 inverse = set1_ps(most > 0 ? 127.0f / most : 0.0f);
    for (int64_t i = 0; i < k; i += 16) {
        store_whole(to + i, cvtps_epi32(mul_ps(read(i, lanes(k - i)), inverse)));
    }
}

template <class Read>
void prepare_row(const Matrix& m, const Rows& rows, int64_t r, const Read& read) {
    if (m.kind == INT8) {
        quantise_row(m.k, (Whole*)rows.row(r), rows.scales + r, read);
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

// integer sums -> numbers, in place
void rescale(const Matrix& m, const Rows& x, int64_t row, int num_rows, int64_t first, float (*out)[GROUP]) {
    for (int p = 0; p < 4; p++) {
        const int64_t o = first + 16 * p;
        const Mask16 mask = o < m.n ? lanes(m.n - o) : 0;
        const I512 correction = maskz_loadu_epi32(mask, m.corrections + o);
        const F32x16 scale = maskz_loadu_ps(mask, m.scales + o);
        for (int r = 0; r < num_rows; r++) {
            const F32x16 product = cvtepi32_ps(sub_epi32(load_si512(out[r] + 16 * p), correction));
            const F32x16 both = mul_ps(scale, set1_ps(x.scales[row + r]));
            store_ps(out[r] + 16 * p, mul_ps(product, both));
        }
    }
}

// The first block of rows finds its group in memory, the later ones in the cache. So that the memory does not rest
// meanwhile, every block fetches its part of the next group; where two groups do not fit, the first fetches its own.
Ahead ahead_of(const Matrix& m, const char* weights, int64_t block, int64_t num_blocks) {
    const int64_t bytes = group_bytes(m.k, m.kind), steps = bytes / (4 * 64);
    if (num_blocks > 1 && bytes <= IN_CACHE)
        return {weights + bytes + steps * block / num_blocks * (4 * 64), num_blocks, 1};
    return {weights + PREFETCH, 1, block == 0 ? 1 : steps + 1};
}

template <int R>
void tile(const Matrix& m, int64_t group, const Rows& x, int64_t row, int64_t block, int64_t num_blocks, float (*out)[GROUP]) {
    const int64_t first = group * GROUP;
    const char* weights = (const char*)m.weights + group * group_bytes(m.k, m.kind);
    const Ahead ahead = ahead_of(m, weights, block, num_blocks);
    if (m.kind == INT8)
        tile_int8<R>(m.k, weights, (const char*)x.row(row), x.stride, ahead, out);
    else
        tile_bf16<R>(m.k, weights, (const char*)x.row(row), x.stride, ahead, out);
    if (m.kind == INT8) rescale(m, x, row, R, first, out);
    if (m.bias == nullptr) return;
    for (int p = 0; p < 4; p++) {
        const int64_t o = first + 16 * p;
        const F32x16 bias = maskz_loadu_ps(o < m.n ? lanes(m.n - o) : 0, m.bias + o);
        for (int r = 0; r < R; r++) store_ps(out[r] + 16 * p, add_ps(load_ps(out[r] + 16 * p), bias));
    }
}

void any_tile(const Matrix& m, int64_t group, const Rows& x, int64_t row, int num_rows, int64_t block, int64_t num_blocks,
              float (*out)[GROUP]) {
    switch (num_rows) {
        case 1: return tile<1>(m, group, x, row, block, num_blocks, out);
        case 2: return tile<2>(m, group, x, row, block, num_blocks, out);
        case 3: return tile<3>(m, group, x, row, block, num_blocks, out);
        case 4: return tile<4>(m, group, x, row, block, num_blocks, out);
        case 5: return tile<5>(m, group, x, row, block, num_blocks, out);
        default: return tile<6>(m, group, x, row, block, num_blocks, out);
    }
}

// The thread's share of a product's groups; finish(row, first output, how many, 64 sums) takes each row of a group.
template <class Finish>
void product(const Matrix& m, const Rows& x, int64_t num_rows, const Team& team, const Finish& finish) {
    alignas(ALIGN) float out[ROWS][GROUP];
    int64_t first, last;
    team.share((m.n + GROUP - 1) / GROUP, first, last);
    const int64_t num_blocks = (num_rows + ROWS - 1) / ROWS;
    for (int64_t group = first; group < last; group++) {
        const int64_t o = group * GROUP, count = m.n - o < GROUP ? m.n - o : GROUP;
        for (int64_t block = 0; block < num_blocks; block++) {
            const int64_t begin = num_rows * block / num_blocks, end = num_rows * (block + 1) / num_blocks;
            any_tile(m, group, x, begin, (int)(end - begin), block, num_blocks, out);
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

struct AddFloat {
    float* to;
    int64_t stride;
    void operator()(int64_t r, int64_t o, int64_t count, const float* sums) const {
        for (int64_t i = 0; i < count; i += 16) {
            float* at = to + r * stride + o + i;
            const Mask16 mask = lanes(count - i);
            mask_storeu_ps(at, mask, add_ps(maskz_loadu_ps(mask, at), load_ps(sums + i)));
        }
    }
};

// A group is 32 gates and the 32 values that they gate.
struct StoreGated {
    float* to;
    int64_t stride;
    void operator()(int64_t r, int64_t o, int64_t, const float* sums) const {
        for (int64_t i = 0; i < 32; i += 16) {
            const int64_t at = o / 2 + i;
            if (at >= stride) return;
            const F32x16 gated = mul_ps(silu(load_ps(sums + i)), load_ps(sums + 32 + i));
            mask_storeu_ps(to + r * stride + at, lanes(stride - at), gated);
        }
    }
};

// ---------------------------------------------------------------------------------------------------------- attention

struct Query {
    const uint16_t* from;
    float* scores;              // room for all keys, a multiple of 16
    int64_t position, row;
    const float* sink;
};

// scores, then weights in their place; returns 1 / sum
float weigh(const AttentionCall& call, const Query& query, const uint16_t* keys, int64_t first_key, int64_t num_keys) {
    const I512 places = setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const F32x16 hidden = set1_ps(-INFINITY);
    const int64_t earliest = call.window ? query.position - call.window + 1 : 0;
    F32x16 largest = hidden;
    for (int64_t j = first_key; j < num_keys; j += 16) {
        F32x16 s = mul_ps(score_block(query.from, keys + j * call.key_dim, call.key_dim), set1_ps(call.scale));
        if (call.softcap > 0) {
            alignas(ALIGN) float each[16];
            store_ps(each, s);
            for (float& one : each) one = tanhf(one / call.softcap) * call.softcap;
            s = load_ps(each);
        }
        const I512 at = add_epi32(places, set1_epi32((int32_t)j));
        Mask16 seen = cmple_epi32_mask(at, set1_epi32((int32_t)query.position));
        seen &= cmpge_epi32_mask(at, set1_epi32((int32_t)earliest));
        if (call.mask != nullptr)
            seen &= nonzero_bytes(lanes(call.mask_keys - j), call.mask + query.row * call.mask_keys + j);
        s = mask_mov_ps(hidden, seen, s);
        largest = max_ps(s, largest);
        storeu_ps(query.scores + j, s);
    }
    float most = reduce_max_ps(largest);
    if (query.sink != nullptr && *query.sink > most) most = *query.sink;
    if (most == -INFINITY) most = 0;  // nothing is seen
    F32x16 sum = setzero_ps();
    for (int64_t j = first_key; j < num_keys; j += 16) {
        const F32x16 w = exp_nonpositive(sub_ps(loadu_ps(query.scores + j), set1_ps(most)));
        sum = add_ps(sum, w);
        storeu_ps(query.scores + j, w);
    }
    float total = reduce_add_ps(sum);
    if (query.sink != nullptr) total += expf(*query.sink - most);
    return 1.0f / total;
}

// The weighted sum of values for a few queries, 64 columns at a time, key after key.
template <int Q>
void gather(const AttentionCall& call, const Query* queries, const float* inverse, const uint16_t* values, int64_t first_key,
            int64_t num_keys, int64_t column, float (*out)[GROUP]) {
    F32x16 sums[Q][4];
    Mask16 masks[4];
    for (int p = 0; p < 4; p++) {
        const int64_t left = call.value_dim - column - 16 * p;
        masks[p] = left > 0 ? lanes(left) : 0;
        for (int q = 0; q < Q; q++) sums[q][p] = setzero_ps();
    }
    int64_t seen_by_all = num_keys;
    for (int q = 0; q < Q; q++) seen_by_all = std::min(seen_by_all, queries[q].position + 1);
    for (int64_t j = first_key; j < num_keys; j++) {
        F32x16 v[4];
        for (int p = 0; p < 4; p++) v[p] = load_bf16(values + j * call.value_dim + column + 16 * p, masks[p]);
        for (int q = 0; q < Q; q++) {
            // a weight of zero is not enough: a later row's value may be NaN
            if (j >= seen_by_all && j > queries[q].position) continue;
            const F32x16 w = set1_ps(queries[q].scores[j]);
            for (int p = 0; p < 4; p++) sums[q][p] = fmadd_ps(w, v[p], sums[q][p]);
        }
    }
    for (int q = 0; q < Q; q++)
        for (int p = 0; p < 4; p++) store_ps(out[q] + 16 * p, mul_ps(sums[q][p], set1_ps(inverse[q])));
}

template <int Q = TOGETHER>
void any_gather(int count, const AttentionCall& call, const Query* queries, const float* inverse, const uint16_t* values,
                int64_t first_key, int64_t num_keys, int64_t column, float (*out)[GROUP]) {
    if (count >= Q) return gather<Q>(call, queries, inverse, values, first_key, num_keys, column, out);
    if constexpr (Q > 1) any_gather<Q - 1>(count, call, queries, inverse, values, first_key, num_keys, column, out);
}

int64_t num_blocks(const AttentionCall& call) {
    const int64_t queries = call.num_rows * (call.num_heads / call.num_kv_heads);
    return call.num_kv_heads * ((queries + QUERIES - 1) / QUERIES);
}

// One block of queries that read the same keys. scores: room for QUERIES rows of all keys.
void attend_block(const AttentionCall& call, int64_t block, float* scores) {
    const int64_t groups = call.num_heads / call.num_kv_heads, num_queries = call.num_rows * groups;
    const int64_t per_head = (num_queries + QUERIES - 1) / QUERIES, head = block / per_head;
    const int64_t first = block % per_head * QUERIES;
    const int64_t count = num_queries - first < QUERIES ? num_queries - first : QUERIES;
    const int64_t last_position = call.start + (first + count - 1) / groups, first_position = call.start + first / groups;
    const int64_t num_keys = last_position + 1;
    int64_t first_key = call.window && first_position >= call.window ? (first_position - call.window + 1) / 16 * 16 : 0;
    const uint16_t* keys = call.keys + head * call.capacity * call.key_dim;
    const uint16_t* values = call.values + head * call.capacity * call.value_dim;
    const int64_t room = round_up(num_keys, 16);
    Query queries[QUERIES];
    float inverse[QUERIES];
    int64_t heads[QUERIES];
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = (first + i) / groups, h = head * groups + (first + i) % groups;
        heads[i] = h;
        queries[i] = {call.query + h * call.query_head + row * call.query_row, scores + i * room, call.start + row, row,
                      call.sinks ? call.sinks + h : nullptr};
        inverse[i] = weigh(call, queries[i], keys, first_key, num_keys);
    }
    alignas(ALIGN) float out[TOGETHER][GROUP];
    for (int64_t i = 0; i < count; i += TOGETHER)
        for (int64_t column = 0; column < call.value_dim; column += GROUP) {
            const int some = (int)(count - i < TOGETHER ? count - i : TOGETHER);
            any_gather(some, call, queries + i, inverse + i, values, first_key, num_keys, column, out);
            for (int q = 0; q < some; q++) {
                uint16_t* to = call.output + (queries[i + q].row * call.num_heads + heads[i + q]) * call.value_dim + column;
                for (int64_t c = 0; c < GROUP && column + c < call.value_dim; c += 16)
                    store_bf16(to + c, lanes(call.value_dim - column - c), load_ps(out[q] + c));
            }
        }
}

// The thread's share of a call's blocks; turns go on from call to call.
void attend_shared(const AttentionCall& call, const Team& team, int64_t& turn_of, float* scores) {
    const int64_t blocks = num_blocks(call);
    for (int64_t block = 0; block < blocks; block++)
        if (turn_of++ % team.size == team.rank) attend_block(call, block, scores);
}

int64_t score_room(int64_t num_keys) { return QUERIES * round_up(num_keys, 16) * (int64_t)sizeof(float); }

// -------------------------------------------------------------------------------------------------------------- stack

struct Arena {
    char* at;
    template <class T>
    T* take(int64_t count) {
        T* here = (T*)at;
        at += round_up(count * (int64_t)sizeof(T), ALIGN);
        return here;
    }
};

struct Work {
    float *hidden, *qkv, *gated;
    uint16_t *query, *attended;
    Rows rows, own;             // shared by the team, or each thread's
    float* scores;              // each thread's
};

int64_t widest(const Stack& s) {
    int64_t k = s.hidden > s.intermediate ? s.hidden : s.intermediate;
    return k > s.num_heads * s.head_dim ? k : s.num_heads * s.head_dim;
}

int64_t longest(const Batch& b) {
    int64_t most = 0;
    for (int64_t i = 0; i < b.num_spans; i++)
        if (b.spans[i].start + b.spans[i].num_rows > most) most = b.spans[i].start + b.spans[i].num_rows;
    return most;
}

Work lay_out(const Stack& s, const Batch& b, int rank, int size, char* memory, char** end) {
    Arena arena{memory};
    const int64_t T = b.num_rows, bytes = row_bytes(widest(s)), heads = s.num_heads + 2 * s.num_kv_heads;
    Work w;
    w.hidden = arena.take<float>(T * s.hidden);
    w.qkv = arena.take<float>(T * heads * s.head_dim);
    w.gated = arena.take<float>(T * s.intermediate);
    w.query = arena.take<uint16_t>(T * s.num_heads * s.head_dim);
    w.attended = arena.take<uint16_t>(T * s.num_heads * s.head_dim);
    w.rows = {arena.take<char>(T * bytes), arena.take<float>(T), bytes};
    for (int i = 0; i < size; i++) {
        Rows own = {arena.take<char>(PRIVATE_ROWS * bytes), arena.take<float>(PRIVATE_ROWS), bytes};
        float* scores = arena.take<float>(score_room(longest(b)) / (int64_t)sizeof(float));
        if (i == rank) { w.own = own; w.scores = scores; }
    }
    *end = arena.at;
    return w;
}

// The left side of a product, row r read by read(r): by every thread for itself where rows are few, else shared out.
template <class Read>
Rows prepare(const Matrix& m, const Work& w, int64_t num_rows, const Team& team, const Read& read) {
    if (num_rows <= PRIVATE_ROWS) {
        for (int64_t r = 0; r < num_rows; r++) prepare_row(m, w.own, r, read(r));
        return w.own;
    }
    int64_t first, last;
    team.share(num_rows, first, last);
    for (int64_t r = first; r < last; r++) prepare_row(m, w.rows, r, read(r));
    team.wait();
    return w.rows;
}

// One head's numbers, normed if the model does so, turned by the position's angles. from, to: [D]
void turn(const float* from, const float* norm, float epsilon, const float* cos, const float* sin, int64_t dim, uint16_t* to) {
    const int64_t half = dim / 2;
    F32x16 factor = set1_ps(1.0f);
    if (norm != nullptr) factor = normed(from, norm, dim, epsilon).factor;
    for (int64_t i = 0; i < half; i += 16) {
        const Mask16 mask = lanes(half - i);
        F32x16 a = maskz_loadu_ps(mask, from + i), b = maskz_loadu_ps(mask, from + half + i);
        if (norm != nullptr) {
            a = mul_ps(mul_ps(a, factor), maskz_loadu_ps(mask, norm + i));
            b = mul_ps(mul_ps(b, factor), maskz_loadu_ps(mask, norm + half + i));
        }
        const F32x16 c = maskz_loadu_ps(mask, cos + i), s = maskz_loadu_ps(mask, sin + i);
        store_bf16(to + i, mask, fmsub_ps(a, c, mul_ps(b, s)));
        store_bf16(to + half + i, mask, fmadd_ps(b, c, mul_ps(a, s)));
    }
}

// One row's heads: queries to where attention reads them, keys and values into their sequence's store.
void place_row(const Stack& s, const Layer& layer, const Batch& b, const Work& w, int64_t row, const Span& span,
               uint16_t* const* store) {
    const int64_t D = s.head_dim, position = b.positions[row];
    const float *cos = b.cos + position * (D / 2), *sin = b.sin + position * (D / 2);
    const float* from = w.qkv + row * (s.num_heads + 2 * s.num_kv_heads) * D;
    for (int64_t h = 0; h < s.num_heads; h++, from += D)
        turn(from, layer.q_norm, s.epsilon, cos, sin, D, w.query + (row * s.num_heads + h) * D);
    for (int64_t h = 0; h < s.num_kv_heads; h++, from += D)
        turn(from, layer.k_norm, s.epsilon, cos, sin, D, store[0] + (h * span.capacity + position) * D);
    for (int64_t h = 0; h < s.num_kv_heads; h++, from += D)
        for (int64_t i = 0; i < D; i += 16)
            store_bf16(store[1] + (h * span.capacity + position) * D + i, lanes(D - i), maskz_loadu_ps(lanes(D - i), from + i));
}

void place_rows(const Stack& s, const Batch& b, const Work& w, int64_t index, const Team& team) {
    int64_t first, last;
    team.share(b.num_rows, first, last);
    for (int64_t i = 0; i < b.num_spans; i++) {
        const Span& span = b.spans[i];
        uint16_t* const* store = b.stores + (i * s.num_layers + index) * 2;
        const int64_t begin = span.first_row > first ? span.first_row : first;
        const int64_t end = span.first_row + span.num_rows < last ? span.first_row + span.num_rows : last;
        for (int64_t row = begin; row < end; row++) place_row(s, s.layers[index], b, w, row, span, store);
    }
}

void attend_spans(const Stack& s, const Batch& b, const Work& w, int64_t index, const Team& team) {
    int64_t turn_of = 0;
    for (int64_t i = 0; i < b.num_spans; i++) {
        const Span& span = b.spans[i];
        uint16_t* const* store = b.stores + (i * s.num_layers + index) * 2;
        const int64_t width = s.num_heads * s.head_dim;
        const AttentionCall call = {
            w.query + span.first_row * width, s.head_dim, width, store[0], store[1], span.capacity, nullptr, 0, nullptr,
            w.attended + span.first_row * width, span.num_rows, span.start, s.num_heads, s.num_kv_heads, s.head_dim, s.head_dim,
            s.layers[index].window, s.scale, 0.0f};
        attend_shared(call, team, turn_of, w.scores);
    }
}

void run_layer(const Stack& s, const Batch& b, const Work& w, int64_t index, const Team& team) {
    const Layer& layer = s.layers[index];
    const int64_t T = b.num_rows, heads = s.num_heads + 2 * s.num_kv_heads;
    Rows x = prepare(layer.qkv, w, T, team, [&](int64_t r) { return normed(w.hidden + r * s.hidden, layer.input_norm, s.hidden, s.epsilon); });
    product(layer.qkv, x, T, team, StoreFloat{w.qkv, heads * s.head_dim});
    team.wait();
    place_rows(s, b, w, index, team);
    team.wait();
    attend_spans(s, b, w, index, team);
    team.wait();
    x = prepare(layer.out, w, T, team, [&](int64_t r) { return ReadBf16{w.attended + r * s.num_heads * s.head_dim}; });
    product(layer.out, x, T, team, AddFloat{w.hidden, s.hidden});
    team.wait();
    x = prepare(layer.gate_up, w, T, team, [&](int64_t r) { return normed(w.hidden + r * s.hidden, layer.post_norm, s.hidden, s.epsilon); });
    product(layer.gate_up, x, T, team, StoreGated{w.gated, s.intermediate});
    team.wait();
    x = prepare(layer.down, w, T, team, [&](int64_t r) { return ReadFloat{w.gated + r * s.intermediate}; });
    product(layer.down, x, T, team, AddFloat{w.hidden, s.hidden});
    team.wait();
}

void embed(const Stack& s, const Batch& b, const Work& w, const Team& team) {
    int64_t first, last;
    team.share(b.num_rows, first, last);
    for (int64_t r = first; r < last; r++)
        for (int64_t i = 0; i < s.hidden; i += 16) {
            const Mask16 mask = lanes(s.hidden - i);
            mask_storeu_ps(w.hidden + r * s.hidden + i, mask, load_bf16(s.embedding + (int64_t)b.ids[r] * s.hidden + i, mask));
        }
    team.wait();
}

void run_stack(const Stack& s, const Batch& b, const Work& w, const Team& team) {
    embed(s, b, w, team);
    for (int64_t index = 0; index < s.num_layers; index++) run_layer(s, b, w, index, team);
    if (b.num_wanted == 0) return;
    const Rows x = prepare(s.head, w, b.num_wanted, team, [&](int64_t r) {
        return normed(w.hidden + b.wanted[r] * s.hidden, s.final_norm, s.hidden, s.epsilon);
    });
    product(s.head, x, b.num_wanted, team, StoreBf16{b.logits, s.head.n});
}

// ------------------------------------------------------------------------------------------------------------- logits

constexpr int64_t BLOCK = 64;           // numbers whose largest is remembered
constexpr int64_t WORTH_A_TEAM = 65536; // numbers below which one thread is faster

// One row of logits, bfloat16 or float32: the same arithmetic for both.
struct Logits {
    const void* from;
    bool is_float;
    F32x16 load(int64_t i, Mask16 mask) const {
        if (is_float) return mask_loadu_ps(set1_ps(-INFINITY), mask, (const float*)from + i);
        return load_bf16_or_least((const uint16_t*)from + i, mask);
    }
    float at(int64_t i) const {
        if (is_float) return ((const float*)from)[i];
        const uint32_t bits = (uint32_t)((const uint16_t*)from)[i] << 16;
        float x;
        memcpy(&x, &bits, 4);
        return x;
    }
};

Logits row_of(const void* logits, int64_t is_float, int64_t stride, int64_t r) {
    return {(const char*)logits + r * stride * (is_float ? 4 : 2), is_float != 0};
}

// The first place of the largest number; the first NaN if there is one.
int64_t argmax_of(const Logits& row, int64_t width) {
    F32x16 best = set1_ps(-INFINITY);
    Mask16 nan = 0;
    for (int64_t i = 0; i < width; i += 16) {
        const F32x16 x = row.load(i, lanes(width - i));
        nan |= is_nan_ps(x);
        best = max_ps(x, best);
    }
    const F32x16 most = set1_ps(reduce_max_ps(best));
    for (int64_t i = 0; i < width; i += 16) {
        const Mask16 mask = lanes(width - i);
        const F32x16 x = row.load(i, mask);
        const Mask16 found = (nan ? is_nan_ps(x) : equal(x, most)) & mask;
        if (found) return i + __builtin_ctz(found);
    }
    return 0;
}

// Probabilities of the `count` most likely ids under softmax(row / temperature), most likely first, of equal logits the lower id
// first; and those logits, because two that differ may have one probability in float32.
void top_of(const Logits& row, int64_t width, float temperature, int64_t count, float* probs, float* values, int64_t* ids) {
    const int64_t blocks = (width + BLOCK - 1) / BLOCK;
    std::vector<float> most(blocks), sorted;
    Mask16 nan = 0;
    float largest = -INFINITY;
    for (int64_t b = 0; b < blocks; b++) {
        F32x16 best = set1_ps(-INFINITY);
        for (int64_t i = b * BLOCK; i < (b + 1) * BLOCK && i < width; i += 16) {
            const F32x16 x = row.load(i, lanes(width - i));
            nan |= is_nan_ps(x);
            best = max_ps(x, best);
        }
        most[b] = reduce_max_ps(best);
        largest = std::max(largest, most[b]);
    }
    const F32x16 shift = set1_ps(largest);
    const F32x16 factor = set1_ps(std::min(1.0f / temperature, 3e38f));  // finite: 0 times it is 0
    const F32x16 least = set1_ps(-87.0f);
    const auto term = [&](int64_t i, Mask16 mask) {
        const F32x16 x = mul_ps(sub_ps(row.load(i, mask), shift), factor);
        return exp_above(max_ps(x, least));  // what is below adds 1e-38 to a sum of at least 1
    };
    F32x16 even = setzero_ps(), odd = even;
    int64_t at = 0;
    for (; at + 32 <= width; at += 32) {
        even = add_ps(even, term(at, 0xffff));
        odd = add_ps(odd, term(at + 16, 0xffff));
    }
    for (; at < width; at += 16) even = mask_add_ps(even, lanes(width - at), even, term(at, lanes(width - at)));
    const float total = nan ? NAN : reduce_add_ps(add_ps(even, odd));
    // the count-th largest of the blocks' maxima bounds the count-th largest number from below
    float bound = -INFINITY;
    if (blocks > count) {
        sorted = most;
        std::nth_element(sorted.begin(), sorted.begin() + (count - 1), sorted.end(), std::greater<float>());
        bound = sorted[count - 1];
    }
    std::vector<std::pair<float, int64_t>> found;
    for (int64_t b = 0; b < blocks; b++) {
        if (most[b] < bound) continue;
        for (int64_t i = b * BLOCK; i < (b + 1) * BLOCK && i < width; i++) {
            const float x = row.at(i);
            if (x >= bound) found.push_back({-x, i});
        }
    }
    const int64_t kept = std::min<int64_t>(count, found.size());
    std::partial_sort(found.begin(), found.begin() + kept, found.end());
    alignas(ALIGN) float few[16];
    for (int64_t i = 0; i < count; i += 16) {
        for (int64_t j = 0; j < 16; j++) few[j] = i + j < kept ? -found[i + j].first : -INFINITY;
        mask_storeu_ps(values + i, lanes(count - i), load_ps(few));
        F32x16 p = exp_nonpositive(mul_ps(sub_ps(load_ps(few), shift), factor));
        p = div_ps(p, set1_ps(total));
        mask_storeu_ps(probs + i, lanes(count - i), p);
    }
    for (int64_t i = 0; i < count; i++) ids[i] = i < kept ? found[i].second : 0;
}

// -------------------------------------------------------------------------------------------------------------- choice

struct Noise {
    const double* uniforms;                // in [0, 1)
    const int64_t* keys;
};

// softmax(row / temperature); NaN somewhere if it is no law.
void dense_law(const Logits& row, int64_t width, float temperature, float* probs) {
    F32x16 best = set1_ps(-INFINITY);
    for (int64_t i = 0; i < width; i += 16) best = max_ps(row.load(i, lanes(width - i)), best);
    const F32x16 shift = set1_ps(reduce_max_ps(best));
    const F32x16 factor = set1_ps(std::min(1.0f / temperature, 3e38f));
    F32x16 sum = setzero_ps();
    for (int64_t i = 0; i < width; i += 16) {
        const Mask16 mask = lanes(width - i);
        const F32x16 e = exp_nonpositive(mul_ps(sub_ps(row.load(i, mask), shift), factor));
        sum = mask_add_ps(sum, mask, sum, e);
        mask_storeu_ps(probs + i, mask, e);
    }
    const F32x16 total = set1_ps(reduce_add_ps(sum));
    for (int64_t i = 0; i < width; i += 16) {
        const Mask16 mask = lanes(width - i);
        mask_storeu_ps(probs + i, mask, div_ps(maskz_loadu_ps(mask, probs + i), total));
    }
}

bool truncates(const DrawSpec& spec) { return spec.top_k > 0 || spec.top_p < 1 || spec.min_p > 0; }

constexpr double REACHED = 1 - 1e-6;  // of top_p: so that rounding does not keep one id more where equal logits meet it exactly

// The truncated law on the ids that it keeps, likeliest first: of what has at least min_p of the top probability the
// top_k (equal logits at the border all stay), of those the fewest that hold top_p of the rest's mass (of equal logits the lower
// ids). The same rule as sampling/token_probs.py's. probs, ids: room for all. -> how many are kept; 0: the row is no law
int64_t kept_law(const Logits& row, int64_t width, const DrawSpec& spec, std::vector<float>& probs, std::vector<int64_t>& ids) {
    for (int64_t count = std::min<int64_t>(width, std::max<int64_t>(spec.top_k + 16, 64));; count = std::min(width, 8 * count)) {
        thread_local std::vector<float> values;
        if ((int64_t)probs.size() < count) { probs.resize(count); ids.resize(count); }
        if ((int64_t)values.size() < count) values.resize(count);
        top_of(row, width, spec.temperature, count, probs.data(), values.data(), ids.data());
        if (std::isnan(probs[0])) return 0;
        int64_t kept = count;
        bool bounded = false, complete = count == width;
        const auto cut_below = [&](const std::vector<float>& of, float bound) {
            kept = std::lower_bound(of.begin(), of.begin() + kept, bound, std::greater_equal<float>()) - of.begin();
            complete |= of[count - 1] < bound;
            bounded = true;
        };
        if (spec.min_p > 0) cut_below(probs, spec.min_p * probs[0]);
        if (0 < spec.top_k && spec.top_k <= count) cut_below(values, std::max(values[spec.top_k - 1], -FLT_MAX));  // masked ids never stay
        if (spec.top_p < 1) {
            double mass = 0;
            for (int64_t i = 0; i < kept; i++) mass += probs[i];
            // before min-p and top-k took anything the mass is 1; after them it is what they left
            const double wanted = REACHED * spec.top_p * (bounded ? mass : 1.0);
            if (!bounded) complete |= mass >= wanted;
            double reached = 0;
            for (int64_t i = 0; i < kept; i++) {
                if (i > 0 && reached >= wanted) kept = i;
                reached += probs[i];
            }
        }
        if (!complete) continue;
        double total = 0;
        for (int64_t i = 0; i < kept; i++) total += probs[i];
        for (int64_t i = 0; i < kept; i++) probs[i] /= (float)total;
        return kept;
    }
}

constexpr int64_t STRETCH = 256;  // numbers that are summed before they are looked into

// A place with probability proportional to its weight; one of weight 0 is never drawn.
int64_t drawn_place(const float* weights, int64_t count, double uniform) {
    std::vector<double> reached;
    double total = 0;
    for (int64_t first = 0; first < count; first += STRETCH) {
        F64x8 sum = setzero_pd();
        for (int64_t i = first; i < std::min(count, first + STRETCH); i += 8)
            sum = add_pd(sum, load_as_pd((Mask8)lanes(count - i), weights + i));
        total += reduce_add_pd(sum);
        reached.push_back(total);
    }
    const double at = std::min(uniform * total, std::nextafter(total, 0.0));
    const int64_t stretch = std::upper_bound(reached.begin(), reached.end(), at) - reached.begin();
    double sum = stretch > 0 ? reached[stretch - 1] : 0;
    int64_t place = stretch * STRETCH;
    for (int64_t i = place; i < std::min(count, (stretch + 1) * STRETCH) && sum <= at; i++) {
        if (weights[i] > 0) place = i;  // the last, where sums in another order fall short of their total
        sum += weights[i];
    }
    return std::min(place, count - 1);
}

I512 mixed(I512 z) {
    z = mullo_epi64(xor_si512(z, srli_epi64<30>(z)), set1_epi64((int64_t)0xBF58476D1CE4E5B9ull));
    z = mullo_epi64(xor_si512(z, srli_epi64<27>(z)), set1_epi64((int64_t)0x94D049BB133111EBull));
    return xor_si512(z, srli_epi64<31>(z));
}

// The first place of the largest probs / Exp(1), whose noise is a hash of key and id. ids: null: each place is its id
int64_t favoured_place(const float* probs, const int64_t* ids, int64_t count, int64_t key) {
    const I512 counting = setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
    double best = 0, bound = INFINITY;
    int64_t place = -1;
    for (int64_t i = 0; i < count; i += 8) {
        const Mask8 mask = (Mask8)lanes(count - i);
        const I512 each = ids ? maskz_loadu_epi64(mask, ids + i) : add_epi64(counting, set1_epi64(i));
        const I512 step = mullo_epi64(each, set1_epi64((int64_t)0x9E3779B97F4A7C15ull));
        const I512 z = srli_epi64<12>(mixed(add_epi64(set1_epi64(key), step)));
        const F64x8 u = mul_pd(add_pd(cvtepu52_pd(z), set1_pd(0.5)), set1_pd(0x1p-52));
        const F64x8 p = load_as_pd(mask, probs + i);
        // p / -log(u) > best only where u > exp(-p / best) >= 1 - p / best: so few logarithms are needed
        const F64x8 least = fnmadd_pd(p, set1_pd(bound), set1_pd(1 - 1e-12));
        Mask8 left = at_least(u, place < 0 ? setzero_pd() : least) & mask;
        if (!left) continue;
        alignas(ALIGN) double us[8], ps[8];
        store_pd(us, u);
        store_pd(ps, p);
        for (; left; left &= left - 1) {
            const int lane = __builtin_ctz(left);
            const double score = ps[lane] / -std::log(us[lane]);
            if (place >= 0 && score <= best) continue;
            place = i + lane;
            best = score;
            bound = best > 0 ? 1 / best : INFINITY;
        }
    }
    return place;
}

// The `step`-th token of a spec, or -1 where the row is no law. Its law goes out where it is drawn and token_probs are wanted.
int64_t chosen(const Logits& row, int64_t width, const DrawSpec& spec, const Noise& noise, int64_t step, const TokenProbs* token_probs) {
    if (spec.kind == GREEDY) {
        const int64_t token = argmax_of(row, width);
        return std::isnan(row.at(token)) ? -1 : token;
    }
    thread_local std::vector<float> probs;
    thread_local std::vector<int64_t> ids;
    const bool is_cut = truncates(spec), is_drawn = spec.kind == DRAWN;
    const int64_t at = spec.first_prob_row + step;
    float* law = nullptr;
    int64_t count = width;
    if (is_cut) {
        count = kept_law(row, width, spec, probs, ids);
        if (count == 0) return -1;
        law = probs.data();
    } else {
        if ((int64_t)probs.size() < width) { probs.resize(width); ids.resize(width); }
        law = token_probs && is_drawn ? token_probs->probs + at * token_probs->width : probs.data();
        dense_law(row, width, spec.temperature, law);
        if (std::isnan(law[0])) return -1;
    }
    if (token_probs && is_drawn) {
        token_probs->kept[at] = count;
        if (is_cut) {
            std::copy_n(law, count, token_probs->probs + at * token_probs->width);
            std::copy_n(ids.data(), count, token_probs->ids + at * token_probs->width);
        } else {
            std::fill(law + width, law + token_probs->width, 0.0f);
            if (token_probs->ids) std::iota(token_probs->ids + at * token_probs->width, token_probs->ids + at * token_probs->width + width, 0);
        }
    }
    const int64_t place = is_drawn ? drawn_place(law, count, noise.uniforms[spec.first_noise + step])
                                   : favoured_place(law, is_cut ? ids.data() : nullptr, count, noise.keys[spec.first_noise + step]);
    return is_cut ? ids[place] : place;
}

// ------------------------------------------------------------------------------------------------------- verification

// A law on some ids; ids null: on all, in order.
struct Seen {
    const float* probs;
    const int64_t* ids;
    int64_t count;
    float of(int64_t id) const {
        if (ids == nullptr) return id < count ? probs[id] : 0.0f;
        for (int64_t i = 0; i < count; i++)
            if (ids[i] == id && probs[i] > 0) return probs[i];
        return 0.0f;
    }
};

// max(scale * p - q, 0) on p's ids -> its sum. spread: zeros for all ids, and zeros again afterwards.
double residual(const Seen& p, const Seen& q, double scale, float* spread, float* out) {
    const F32x16 by = set1_ps((float)scale), zero = setzero_ps();
    const bool is_spread = q.ids != nullptr;
    const float* other = is_spread ? spread : q.probs;
    for (int64_t i = 0; is_spread && i < q.count; i++)
        if (q.probs[i] > 0) spread[q.ids[i]] = q.probs[i];
    double total = 0;
    for (int64_t first = 0; first < p.count; first += STRETCH) {
        F32x16 sum = zero;
        for (int64_t i = first; i < std::min(p.count, first + STRETCH); i += 16) {
            const Mask16 mask = lanes(p.count - i);
            const F32x16 taken = p.ids == nullptr ? maskz_loadu_ps(mask, other + i) : gather_ps(mask, other, p.ids + i);
            const F32x16 left = max_ps(sub_ps(mul_ps(by, maskz_loadu_ps(mask, p.probs + i)), taken), zero);
            sum = mask_add_ps(sum, mask, sum, left);
            if (out) mask_storeu_ps(out + i, mask, left);
        }
        total += reduce_add_ps(sum);
    }
    for (int64_t i = 0; is_spread && i < q.count; i++) spread[q.ids[i]] = 0;
    return total;
}

// How many draft tokens of sequence b stand, and the token after them. p: its lens[b] + 1 token_probs. The rules are those of
// foredraft/verify: see block.py and rejection.py. stop: [lens[b] + 1], the law of the first answer.
void verify_one(const VerificationBatch& d, int64_t b, const std::vector<Seen>& p, std::vector<float>& spread, double* stop, int64_t* outcome) {
    const int64_t n = d.lens[b], at = d.places[b] * d.max_len;
    std::vector<Seen> q(n);
    std::vector<float> ones(1, 1.0f), weights(p[0].count);
    std::vector<double> scale(n + 1, 1.0), holds(n + 1, 1.0);
    const auto draft = [&](int64_t i) -> Seen {
        const int64_t row = d.prob_rows[at + i];
        if (row < 0) return {ones.data(), d.ids + at + i, 1};
        return {d.probs + row * d.probs_stride, d.kept_ids ? d.kept_ids + row * d.kept_stride : nullptr, d.columns};
    };
    const bool is_block = d.rules[b] == 1;
    double reached = 1;
    for (int64_t i = 0; i < n; i++) {
        q[i] = draft(i);
        const int64_t id = d.ids[at + i];
        const double own = q[i].of(id), ratio = own > 0 ? p[i].of(id) / own : 0;
        if (is_block) {
            scale[i + 1] = std::min(1.0, scale[i] * ratio);
        } else {
            stop[i] = reached * (1 - std::min(1.0, ratio));
            reached *= std::min(1.0, ratio);
        }
    }
    stop[n] = reached;
    if (is_block) {
        for (int64_t i = 1; i < n; i++) {
            const double mass = residual(p[i], q[i], scale[i], spread.data(), nullptr), whole = mass + 1 - scale[i];
            holds[i] = whole > 0 ? mass / whole : 1;
        }
        if (n > 0) holds[n] = scale[n];
        double missed = 1;
        for (int64_t i = n; i >= 0; missed *= 1 - holds[i--]) stop[i] = holds[i] * missed;
    }
    double total = 0, sum = 0;
    for (int64_t i = 0; i <= n; i++) total += stop[i];
    const double mark = std::min(d.uniforms[2 * b] * total, std::nextafter(total, 0.0));
    int64_t stood = 0;
    for (int64_t i = 0; i <= n && sum <= mark; sum += stop[i++])
        if (stop[i] > 0) stood = i;
    const Seen& own = p[stood];
    const float* law = own.probs;
    weights.resize(own.count);
    if (stood < n && residual(own, q[stood], is_block ? scale[stood] : 1, spread.data(), weights.data()) > 0) law = weights.data();
    const int64_t place = drawn_place(law, own.count, d.uniforms[2 * b + 1]);
    outcome[0] = stood;
    outcome[1] = own.ids ? own.ids[place] : place;
}

}  // namespace

// -------------------------------------------------------------------------------------------------------------- calls

extern "C" {

// logits: [num_rows, width]; ids: [num_rows]
void argmax(const void* logits, int64_t is_float, int64_t num_rows, int64_t width, int64_t* ids, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows * width > WORTH_A_TEAM)
    for (int64_t r = 0; r < num_rows; r++) ids[r] = argmax_of(row_of(logits, is_float, width, r), width);
}

// temperatures: [num_rows]; probs, ids: [num_rows, count]
void top(const void* logits, int64_t is_float, int64_t num_rows, int64_t width, const float* temperatures, int64_t count, float* probs,
         int64_t* ids, int64_t num_threads) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_rows * width > WORTH_A_TEAM)
    for (int64_t r = 0; r < num_rows; r++) {
        std::vector<float> values(count);
        top_of(row_of(logits, is_float, width, r), width, temperatures[r], count, probs + r * count, values.data(), ids + r * count);
    }
}

// Each row's token under its spec; -1 where a row is no law. ids: [num_rows]
void choose(const void* logits, int64_t is_float, int64_t num_rows, int64_t width, const DrawSpec* specs, const double* uniforms,
            const int64_t* keys, int64_t* ids, int64_t num_threads) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_rows > 1 && num_rows * width > WORTH_A_TEAM)
    for (int64_t r = 0; r < num_rows; r++) ids[r] = chosen(row_of(logits, is_float, width, r), width, specs[r], {uniforms, keys}, 0, nullptr);
}

// Truncated token_probs: probs, ids: [num_rows, room]. -> the most ids that a row keeps; where that is more than the room, what
// was written is of no use. Rows that keep fewer are filled up with probability 0; one that is no law is NaN throughout.
int64_t token_probs(const void* logits, int64_t is_float, int64_t num_rows, int64_t width, const DrawSpec* specs, int64_t room, float* probs,
             int64_t* ids, int64_t num_threads) {
    std::vector<int64_t> kept(num_rows);
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_rows > 1 && num_rows * width > WORTH_A_TEAM)
    for (int64_t r = 0; r < num_rows; r++) {
        thread_local std::vector<float> some;
        thread_local std::vector<int64_t> places;
        kept[r] = kept_law(row_of(logits, is_float, width, r), width, specs[r], some, places);
        std::copy_n(some.begin(), std::min(room, kept[r]), probs + r * room);
        std::copy_n(places.begin(), std::min(room, kept[r]), ids + r * room);
    }
    const int64_t most = std::max<int64_t>(1, *std::max_element(kept.begin(), kept.end()));
    for (int64_t r = 0; r < num_rows && most <= room; r++) {
        std::fill(probs + r * room + kept[r], probs + r * room + most, kept[r] ? 0.0f : NAN);
        std::fill(ids + r * room + kept[r], ids + r * room + most, 0);
    }
    return most;
}

// Weighs sampled drafts. outcomes: [num_sequences, 2], how many draft tokens stand and the next one; bad: [rows of logits],
// set where a row is no law; stops: [num_sequences, max_len + 1], the law of how many stand.
void verify(const void* logits, int64_t is_float, int64_t width, const VerificationBatch* batch, int64_t* outcomes, uint8_t* bad, double* stops,
           int64_t num_threads) {
    const VerificationBatch& d = *batch;
    std::vector<int64_t> offsets(d.num_sequences + 1, 0);
    for (int64_t b = 0; b < d.num_sequences; b++) offsets[b + 1] = offsets[b] + d.lens[b] + 1;
    const int64_t num_rows = offsets[d.num_sequences];
    std::vector<std::pair<int64_t, int64_t>> rows;  // sequence, row of logits
    for (int64_t b = 0; b < d.num_sequences; b++)
        for (int64_t i = 0; i <= d.lens[b]; i++) rows.push_back({b, d.first_rows[b] + i});
    std::vector<std::vector<float>> probs(num_rows);
    std::vector<std::vector<int64_t>> ids(num_rows);
#pragma omp parallel num_threads(num_threads) if (num_rows > 1 && num_rows * width > WORTH_A_TEAM)
    {
        // truncated token_probs row by row; whole ones by the sequence, in memory that stays warm
#pragma omp for schedule(dynamic)
        for (int64_t r = 0; r < num_rows; r++) {
            const DrawSpec& spec = d.specs[rows[r].first];
            if (!truncates(spec)) continue;
            thread_local std::vector<float> some;
            thread_local std::vector<int64_t> places;
            const int64_t kept = kept_law(row_of(logits, is_float, width, rows[r].second), width, spec, some, places);
            probs[r].assign(some.begin(), some.begin() + kept);
            ids[r].assign(places.begin(), places.begin() + kept);
        }
        thread_local std::vector<float> whole, spread;
        if ((int64_t)spread.size() < width) spread.resize(width, 0.0f);
#pragma omp for schedule(dynamic)
        for (int64_t b = 0; b < d.num_sequences; b++) {
            std::vector<Seen> p;
            const int64_t stride = round_up(width, 16);
            if (!truncates(d.specs[b]) && (int64_t)whole.size() < (d.lens[b] + 1) * stride) whole.resize((d.lens[b] + 1) * stride);
            for (int64_t i = 0; i <= d.lens[b]; i++) {
                const int64_t r = offsets[b] + i, from = d.first_rows[b] + i;
                if (truncates(d.specs[b])) {
                    if (probs[r].empty()) { probs[r].push_back(0); ids[r].push_back(0); bad[from] = 1; }
                    p.push_back({probs[r].data(), ids[r].data(), (int64_t)probs[r].size()});
                    continue;
                }
                float* law = whole.data() + i * stride;
                dense_law(row_of(logits, is_float, width, from), width, d.specs[b].temperature, law);
                bad[from] = std::isnan(law[0]);
                if (bad[from]) std::fill_n(law, width, 0.0f);
                p.push_back({law, nullptr, width});
            }
            verify_one(d, b, p, spread, stops + b * (d.max_len + 1), outcomes + 2 * b);
        }
    }
}

// Bytes of a packed matrix.
int64_t packed_bytes(int64_t n, int64_t k, int64_t kind) {
    return round_up(n, GROUP) / GROUP * group_bytes(k, kind);
}

// weights: [n, k] bfloat16 or int8 -> groups of 64 outputs, in the order in which the inner loops read them.
// corrections: [n], for int8.
void pack(const void* weights, int64_t n, int64_t k, int64_t kind, void* to, int32_t* corrections) {
    const int64_t size = kind == INT8 ? 1 : 2, unit = kind == INT8 ? INT8_UNIT : 2, bytes = group_bytes(k, kind), groups = round_up(n, GROUP) / GROUP;
#ifdef MADV_HUGEPAGE
    const uintptr_t begin = round_up((uintptr_t)to, 1 << 21), end = ((uintptr_t)to + packed_bytes(n, k, kind)) >> 21 << 21;
    if (end > begin) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#endif
#pragma omp parallel for
    for (int64_t group = 0; group < groups; group++) {
        char* into = (char*)to + group * bytes;
        memset(into, 0, bytes);
        for (int64_t j = 0; j < GROUP && group * GROUP + j < n; j++) {
            const int64_t o = group * GROUP + j;
            const char* row = (const char*)weights + o * k * size;
            for (int64_t i = 0; i < k; i += unit) {
                const int64_t count = k - i < unit ? k - i : unit;
                memcpy(into + packed_place(j, i / unit, round_up(k, unit) / unit) * unit * size, row + i * size, count * size);
            }
            if (kind != INT8) continue;
            int32_t sum = 0;
            for (int64_t i = 0; i < k; i++) sum += ((const int8_t*)row)[i];
            corrections[o] = OFFSET * sum;
        }
    }
}

int64_t linear_workspace(const Matrix* m, int64_t num_rows) {
    return num_rows * row_bytes(m->k) + round_up(4 * num_rows, ALIGN);
}

// y = x W^T + b. x: [num_rows, k] bfloat16, y: [num_rows, n] bfloat16
void linear(const Matrix* m, const uint16_t* x, uint16_t* y, int64_t num_rows, char* workspace, int64_t num_threads) {
    Arena arena{workspace};
    const int64_t bytes = row_bytes(m->k);
    char* data = arena.take<char>(num_rows * bytes);
    const Rows rows = {data, arena.take<float>(num_rows), bytes};
    with_team(num_threads, [&](const Team& team) {
        int64_t first, last;
        team.share(num_rows, first, last);
        for (int64_t r = first; r < last; r++) prepare_row(*m, rows, r, ReadBf16{x + r * m->k});
        team.wait();
        product(*m, rows, num_rows, team, StoreBf16{y, m->n});
    });
}

// Of each thread.
int64_t attention_workspace(int64_t num_keys) { return round_up(score_room(num_keys), ALIGN); }

// Several spans of one layer. workspace: `room`, attention_workspace(longest) bytes, for each thread
void attention(const AttentionCall* calls, int64_t num_calls, char* workspace, int64_t room, int64_t num_threads) {
    with_team(num_threads, [&](const Team& team) {
        float* scores = (float*)(workspace + team.rank * room);
        int64_t turn_of = 0;
        for (int64_t i = 0; i < num_calls; i++) attend_shared(calls[i], team, turn_of, scores);
    });
}

int64_t stack_workspace(const Stack* s, const Batch* b, int64_t num_threads) {
    char* end = nullptr;
    lay_out(*s, *b, 0, (int)num_threads, nullptr, &end);
    return (int64_t)end;
}

// One pass of a whole decoder. workspace: stack_workspace bytes, aligned to 64
void stack(const Stack* s, const Batch* b, char* workspace, int64_t num_threads) {
    with_team(num_threads, [&](const Team& team) {
        char* end;
        run_stack(*s, *b, lay_out(*s, *b, team.rank, team.size, workspace, &end), team);
    });
}

// Reads a batch, whose last rows of each span are wanted, and goes on by itself: span i writes lens[i] >= 1 tokens, each
// chosen by specs[i] from the first `vocabulary` logits, into written[i, :lens[i]]; the last one is not read. -1 from a row
// on that is no law. workspace: for the batch, or for a batch of one row a span at the longest, whichever is larger.
// -> the most ids that a truncated law keeps; the others are filled up with probability 0
int64_t write(const Stack* s, const Batch* batch, const int64_t* lens, int64_t width, int64_t vocabulary, const DrawSpec* specs,
              const double* uniforms, const int64_t* keys, const TokenProbs* token_probs, int64_t num_prob_rows, int64_t* written, char* workspace, int64_t num_threads) {
    Batch b = *batch;
    const int64_t num_spans = batch->num_spans;
    std::vector<int64_t> open(num_spans);                       // span -> its place in the batch as first given
    std::vector<Span> spans(batch->spans, batch->spans + num_spans);
    std::vector<uint16_t*> stores(batch->stores, batch->stores + num_spans * s->num_layers * 2);
    std::vector<int32_t> ids(num_spans), positions(num_spans), wanted(num_spans);
    for (int64_t i = 0; i < num_spans; i++) open[i] = i;
    for (int64_t step = 0; b.num_spans > 0; step++) {
        stack(s, &b, workspace, num_threads);
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (b.num_spans > 1 && b.num_spans * vocabulary > WORTH_A_TEAM)
        for (int64_t i = 0; i < b.num_spans; i++)
            written[open[i] * width + step] = chosen(row_of(b.logits, 0, s->head.n, i), vocabulary, specs[open[i]], {uniforms, keys}, step, token_probs);
        int64_t left = 0;
        for (int64_t i = 0; i < b.num_spans; i++) {
            const int64_t place = open[i], token = written[place * width + step], end = spans[i].start + spans[i].num_rows;
            if (token < 0 || step + 1 >= lens[place]) continue;
            ids[left] = (int32_t)token;
            positions[left] = (int32_t)end;
            wanted[left] = (int32_t)left;
            std::copy_n(stores.begin() + i * s->num_layers * 2, s->num_layers * 2, stores.begin() + left * s->num_layers * 2);
            spans[left] = {left, 1, end, spans[i].capacity};
            open[left++] = place;
        }
        b = {ids.data(), positions.data(), wanted.data(), b.cos, b.sin, spans.data(), stores.data(), b.logits, left, left, left};
    }
    if (num_prob_rows == 0) return 0;
    const int64_t most = token_probs->ids ? *std::max_element(token_probs->kept, token_probs->kept + num_prob_rows) : token_probs->width;
    for (int64_t r = 0; r < num_prob_rows; r++) {
        const int64_t first = r * token_probs->width + token_probs->kept[r], end = r * token_probs->width + most;
        if (token_probs->kept[r] == 0 || token_probs->ids) std::fill(token_probs->probs + first, token_probs->probs + end, 0.0f);
        if (token_probs->ids) std::fill(token_probs->ids + first, token_probs->ids + end, 0);
    }
    return most;
}

}  // extern "C"
