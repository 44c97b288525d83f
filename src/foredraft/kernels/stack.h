// A whole decoder of Llama's form as one call.

#pragma once

#include "attention.h"
#include "products.h"

namespace {

constexpr int PRIVATE_ROWS = 8;   // up to here every thread prepares all rows itself, which spares a barrier

struct Arena {
    char* at;
    template <class T>
    T* take(int64_t count) {
        T* start = (T*)at;
        at += round_up(count * (int64_t)sizeof(T), ALIGN);
        return start;
    }
};

struct Workspace {
    float *hidden, *qkv, *gated;
    uint16_t *query, *attended;
    Rows rows, thread_rows;     // of the team, or of this thread alone
    float* scores;              // of this thread
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

Workspace lay_out_workspace(const Stack& s, const Batch& b, int rank, int size, char* memory, char** end) {
    Arena arena{memory};
    const int64_t T = b.num_rows, bytes = row_bytes(widest(s)), heads = s.num_heads + 2 * s.num_kv_heads;
    Workspace w;
    w.hidden = arena.take<float>(T * s.hidden);
    w.qkv = arena.take<float>(T * heads * s.head_dim);
    w.gated = arena.take<float>(T * s.intermediate);
    w.query = arena.take<uint16_t>(T * s.num_heads * s.head_dim);
    w.attended = arena.take<uint16_t>(T * s.num_heads * s.head_dim);
    w.rows = {arena.take<char>(T * bytes), arena.take<float>(T), bytes};
    for (int i = 0; i < size; i++) {
        Rows thread_rows = {arena.take<char>(PRIVATE_ROWS * bytes), arena.take<float>(PRIVATE_ROWS), bytes};
        float* scores = arena.take<float>(score_room(longest(b)) / (int64_t)sizeof(float));
        if (i == rank) { w.thread_rows = thread_rows; w.scores = scores; }
    }
    *end = arena.at;
    return w;
}

// The left side of a product, row r read by read(r). A few rows are prepared by every thread for itself, more are divided.
template <class Read>
Rows prepare(const Matrix& m, const Workspace& w, int64_t num_rows, const Team& team, const Read& read) {
    if (num_rows <= PRIVATE_ROWS) {
        for (int64_t r = 0; r < num_rows; r++) prepare_row(m, w.thread_rows, r, read(r));
        return w.thread_rows;
    }
    int64_t first, last;
    team.share(num_rows, first, last);
    for (int64_t r = first; r < last; r++) prepare_row(m, w.rows, r, read(r));
    team.wait();
    return w.rows;
}

// The rotary embedding of one head (arXiv:2104.09864), after its norm if the model has one. from, to: [D]
void rotate(const float* from, const float* norm, float epsilon, const float* cos, const float* sin, int64_t dim, uint16_t* to) {
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
void place_row(const Stack& s, const Layer& layer, const Batch& b, const Workspace& w, int64_t row, const Span& span,
               uint16_t* const* store) {
    const int64_t D = s.head_dim, position = b.positions[row], slot = b.slots == nullptr ? position : b.slots[row];
    const float *cos = b.cos + position * (D / 2), *sin = b.sin + position * (D / 2);
    const float* from = w.qkv + row * (s.num_heads + 2 * s.num_kv_heads) * D;
    for (int64_t h = 0; h < s.num_heads; h++, from += D)
        rotate(from, layer.q_norm, s.epsilon, cos, sin, D, w.query + (row * s.num_heads + h) * D);
    for (int64_t h = 0; h < s.num_kv_heads; h++, from += D)
        rotate(from, layer.k_norm, s.epsilon, cos, sin, D, store[0] + (h * span.capacity + slot) * D);
    for (int64_t h = 0; h < s.num_kv_heads; h++, from += D)
        for (int64_t i = 0; i < D; i += 16)
            store_bf16(store[1] + (h * span.capacity + slot) * D + i, lanes(D - i), maskz_loadu_ps(lanes(D - i), from + i));
}

void place_rows(const Stack& s, const Batch& b, const Workspace& w, int64_t index, const Team& team) {
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

void attend_spans(const Stack& s, const Batch& b, const Workspace& w, int64_t index, const Team& team) {
    int64_t next_block = 0;
    for (int64_t i = 0; i < b.num_spans; i++) {
        const Span& span = b.spans[i];
        uint16_t* const* store = b.stores + (i * s.num_layers + index) * 2;
        const int64_t width = s.num_heads * s.head_dim;
        const AttentionCall call = {
            w.query + span.first_row * width, s.head_dim, width, store[0], store[1], span.capacity,
            b.slots == nullptr ? nullptr : b.slots + span.first_row, nullptr, 0, nullptr,
            w.attended + span.first_row * width, span.num_rows, span.start, s.num_heads, s.num_kv_heads, s.head_dim, s.head_dim,
            s.layers[index].window, s.scale, 0.0f};
        attend_shared(call, team, next_block, w.scores);
    }
}

void run_layer(const Stack& s, const Batch& b, const Workspace& w, int64_t index, const Team& team) {
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

void embed(const Stack& s, const Batch& b, const Workspace& w, const Team& team) {
    int64_t first, last;
    team.share(b.num_rows, first, last);
    for (int64_t r = first; r < last; r++)
        for (int64_t i = 0; i < s.hidden; i += 16) {
            const Mask16 mask = lanes(s.hidden - i);
            mask_storeu_ps(w.hidden + r * s.hidden + i, mask, load_bf16(s.embedding + (int64_t)b.ids[r] * s.hidden + i, mask));
        }
    team.wait();
}

void run_stack(const Stack& s, const Batch& b, const Workspace& w, const Team& team) {
    embed(s, b, w, team);
    for (int64_t index = 0; index < s.num_layers; index++) run_layer(s, b, w, index, team);
    if (b.num_wanted == 0) return;
    const Rows x = prepare(s.head, w, b.num_wanted, team, [&](int64_t r) {
        return normed(w.hidden + b.wanted[r] * s.hidden, s.final_norm, s.hidden, s.epsilon);
    });
    product(s.head, x, b.num_wanted, team, StoreBf16{b.logits, s.head.n});
}

}  // namespace
