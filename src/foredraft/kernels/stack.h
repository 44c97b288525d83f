// A whole decoder in one call: one routine runs all layers, directed by the description of the decoder (structs.h).

#pragma once

#include "attention.h"
#include "experts.h"
#include "fusing.h"
#include "norms.h"
#include "outputs.h"
#include "packing.h"

namespace {

constexpr int PRIVATE_ROWS = 4;   // up to this many, every thread prepares all rows itself, which saves a barrier

struct Workspace {
    float *hidden, *qkv, *gated;
    float* embedded;            // the embeddings; the same memory as `hidden` unless rows have states
    float* branch;              // the output of attention or an MLP, before its norm
    float *router_logits, *expert_outputs;
    uint16_t *query, *attended;
    uint16_t* states;           // computed from features; null: of the batch, or none
    Rows rows, thread_rows;     // of the team, or of this thread alone
    float* scores;              // of this thread
    Routing routing;
};

bool has_states(const Batch& b) { return b.states != nullptr || b.read_features != nullptr; }

int64_t widest(const Stack& s) {
    const int64_t input = s.fusion.n > 0 || s.layers->is_fused ? 2 * s.hidden : s.hidden;
    return std::max({input, s.intermediate, s.num_heads * s.head_dim, s.features_width});
}

int64_t longest(const Batch& b) {
    int64_t most = 0;
    for (int64_t i = 0; i < b.num_spans; i++) {
        const Span& span = b.spans[i];
        most = std::max({most, span.start + (span.has_paths ? b.path_stride : span.num_rows), span.source_len});
    }
    return most;
}

Workspace lay_out_workspace(const Stack& s, const Batch& b, int rank, int size, char* memory, char** end) {
    Arena arena{memory};
    const int64_t T = b.num_rows, bytes = row_bytes(widest(s)), heads = s.num_heads + 2 * s.num_kv_heads;
    const int64_t choices = T * s.experts_per_token, rows = choices > T ? choices : T;
    Workspace w;
    w.hidden = arena.take<float>(T * s.hidden);
    w.qkv = arena.take<float>(T * heads * s.head_dim);
    w.gated = arena.take<float>(rows * s.intermediate);
    w.branch = arena.take<float>(T * s.hidden);
    w.embedded = has_states(b) ? arena.take<float>(T * s.hidden) : w.hidden;
    w.states = b.read_features == nullptr ? nullptr : arena.take<uint16_t>(T * s.hidden);
    w.router_logits = arena.take<float>(T * s.num_experts);
    w.expert_outputs = arena.take<float>(choices * s.hidden);
    w.query = arena.take<uint16_t>(T * s.num_heads * s.head_dim);
    w.attended = arena.take<uint16_t>(T * s.num_heads * s.head_dim);
    w.rows = {arena.take<char>(rows * bytes), arena.take<float>(rows), bytes};
    w.routing.experts = arena.take<int32_t>(choices);
    w.routing.weights = arena.take<float>(choices);
    for (int i = 0; i < size; i++) {
        Rows thread_rows = {arena.take<char>(PRIVATE_ROWS * bytes), arena.take<float>(PRIVATE_ROWS), bytes};
        float* scores = arena.take<float>(score_room(longest(b)) / (int64_t)sizeof(float));
        Routing routing = w.routing;
        routing.choices = arena.take<int32_t>(choices);
        routing.slots = arena.take<int32_t>(choices);
        routing.first_slots = arena.take<int32_t>(s.num_experts + 1);
        if (i == rank) { w.thread_rows = thread_rows; w.scores = scores; w.routing = routing; }
    }
    *end = arena.at;
    return w;
}

// The left side of a product; write(rows, r) writes row r. A few rows are prepared by every thread for itself; more rows are divided
// among the threads.
template <class Write>
Rows prepare(const Workspace& w, int64_t num_rows, const Team& team, const Write& write) {
    if (num_rows <= PRIVATE_ROWS) {
        for (int64_t r = 0; r < num_rows; r++) write(w.thread_rows, r);
        return w.thread_rows;
    }
    int64_t first, last;
    team.share(num_rows, first, last);
    for (int64_t r = first; r < last; r++) write(w.rows, r);
    team.wait();
    return w.rows;
}

// The left side of a product with normed hidden states; row r of it is hidden state row_of(r).
template <class RowOf>
Rows prepare_normed(const Stack& s, const Matrix& m, const Norm& norm, const Workspace& w, int64_t num_rows, const Team& team,
                    const RowOf& row_of) {
    return prepare(w, num_rows, team, [&](const Rows& rows, int64_t r) {
        with_norm(s, norm, w.hidden + row_of(r) * s.hidden, s.hidden, [&](const auto& read) { prepare_row(m, rows, r, read); });
    });
}

// Replaces the residual stream by its norm.
void norm_residual(const Stack& s, const Norm& norm, const Workspace& w, int64_t num_rows, const Team& team) {
    int64_t first, last;
    team.share(num_rows, first, last);
    for (int64_t r = first; r < last; r++) {
        float* row = w.hidden + r * s.hidden;
        with_norm(s, norm, row, s.hidden, [&](const auto& read) {
            for (int64_t i = 0; i < s.hidden; i += 16) mask_storeu_ps(row + i, lanes(s.hidden - i), read(i, lanes(s.hidden - i)));
        });
    }
    team.wait();
}

// The input of attention or an MLP: all hidden states, normed. With norms_residual the norm replaces the residual stream too.
Rows prepare_part(const Stack& s, const Matrix& m, const Norm& norm, const Workspace& w, int64_t num_rows, const Team& team) {
    const bool is_of_stream = s.norms_residual && norm.weight != nullptr;
    if (is_of_stream) norm_residual(s, norm, w, num_rows, team);
    return prepare_normed(s, m, is_of_stream ? Norm{nullptr, nullptr} : norm, w, num_rows, team, [](int64_t r) { return r; });
}

// hidden += residual_scale * norm(x W^T)
void add_product(const Stack& s, const Matrix& m, const Rows& x, const Norm& norm, const Workspace& w, int64_t num_rows,
                 const Team& team) {
    if (norm.weight == nullptr) {
        product(m, x, num_rows, team, AddScaled{w.hidden, s.hidden, s.residual_scale});
    } else {
        product(m, x, num_rows, team, StoreFloat{w.branch, s.hidden});
        team.wait();
        int64_t first, last;
        team.share(num_rows, first, last);
        for (int64_t r = first; r < last; r++) add_normed(s, norm, w.branch + r * s.hidden, w.hidden + r * s.hidden, s.hidden);
    }
    team.wait();
}

// ---------------------------------------------------------------------------------------------------------- attention

// The rotary embedding of the first `rotary_dim` numbers of one head (arXiv:2104.09864). read: reads the head, normed
template <class Read>
void rotate(const Read& read, const float* cos, const float* sin, int64_t dim, int64_t rotary_dim, uint16_t* to) {
    const int64_t half = rotary_dim / 2;
    for (int64_t i = 0; i < half; i += 16) {
        const Mask16 mask = lanes(half - i);
        const F32x16 a = read(i, mask), b = read(half + i, mask);
        const F32x16 c = maskz_loadu_ps(mask, cos + i), s = maskz_loadu_ps(mask, sin + i);
        store_bf16(to + i, mask, fmsub_ps(a, c, mul_ps(b, s)));
        store_bf16(to + half + i, mask, fmadd_ps(b, c, mul_ps(a, s)));
    }
    for (int64_t i = rotary_dim; i < dim; i += 16) store_bf16(to + i, lanes(dim - i), read(i, lanes(dim - i)));
}

// Writes the queries or keys of one row; head h goes to place(h). norm: the weight, or null
template <class Place>
void place_heads(const Stack& s, const float* from, const float* norm, int64_t num_heads, const float* cos, const float* sin,
                 int64_t rotary_dim, const Place& place) {
    const int64_t D = s.head_dim;
    const bool is_joint = norm != nullptr && s.joint_head_norm;
    const F32x16 factor = is_joint ? normed(from, norm, num_heads * D, s.epsilon).factor : setzero_ps();
    for (int64_t h = 0; h < num_heads; h++) {
        const float* weight = norm == nullptr ? nullptr : norm + h * s.head_norm_stride;
        const auto put = [&](const auto& read) { rotate(read, cos, sin, D, rotary_dim, place(h)); };
        if (is_joint) put(ReadNormed{from + h * D, weight, factor});
        else with_norm(s, {weight, nullptr}, from + h * D, D, put);
    }
}

// Writes the heads of one row: queries to where attention reads them, keys and values to their sequence's store.
void place_row(const Stack& s, const Layer& layer, const Batch& b, const Workspace& w, int64_t row, const Span& span,
               uint16_t* const* store) {
    const int64_t D = s.head_dim, position = b.positions[row], slot = b.slots == nullptr ? position : b.slots[row];
    const int64_t rotary_dim = layer.rotary_table < 0 ? 0 : s.rotary_dim;
    const int64_t angles = (layer.rotary_table < 0 ? 0 : layer.rotary_table) * b.rotary_stride + position * (s.rotary_dim / 2);
    const float *cos = b.cos + angles, *sin = b.sin + angles;
    const float* from = w.qkv + row * (s.num_heads + 2 * s.num_kv_heads) * D;
    place_heads(s, from, layer.q_norm, s.num_heads, cos, sin, rotary_dim, [&](int64_t h) { return w.query + (row * s.num_heads + h) * D; });
    from += s.num_heads * D;
    place_heads(s, from, layer.k_norm, s.num_kv_heads, cos, sin, rotary_dim, [&](int64_t h) { return store[0] + (h * span.capacity + slot) * D; });
    from += s.num_kv_heads * D;
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
            span.has_paths ? b.positions + span.first_row : nullptr,
            span.has_paths ? b.paths + span.first_row * b.path_stride : nullptr, nullptr, 0, s.layers[index].sinks,
            s.layers[index].bias, s.farthest, s.sees_all ? span.start + span.num_rows : 0,
            w.attended + span.first_row * width, b.path_stride, span.num_rows, span.start, s.num_heads, s.num_kv_heads, s.head_dim, s.head_dim,
            s.layers[index].window, s.scale, s.softcap};
        attend_shared(call, team, next_block, w.scores);
    }
}

// Cross-attention of every row over all of its sequence's source.
void attend_to_sources(const Stack& s, const Batch& b, const Workspace& w, int64_t index, const Team& team) {
    const int64_t width = s.num_heads * s.head_dim;
    int64_t next_block = 0;
    for (int64_t i = 0; i < b.num_spans; i++) {
        const Span& span = b.spans[i];
        const uint16_t* const* source = b.sources + (i * s.num_layers + index) * 2;
        const AttentionCall call = {
            w.query + span.first_row * width, s.head_dim, width, source[0], source[1], span.source_capacity, nullptr, nullptr, nullptr, 0, nullptr,
            nullptr, 0, span.source_len, w.attended + span.first_row * width, 0, span.num_rows, span.start, s.num_heads, s.num_kv_heads,
            s.head_dim, s.head_dim, 0, s.scale, s.softcap};
        attend_shared(call, team, next_block, w.scores);
    }
}

// Adds the output of attention to the residual stream.
void add_attended(const Stack& s, const Matrix& out, const Norm& norm, const Workspace& w, int64_t num_rows, const Team& team) {
    const Rows x = prepare(w, num_rows, team, [&](const Rows& rows, int64_t r) { prepare_row(out, rows, r, ReadBf16{w.attended + r * s.num_heads * s.head_dim}); });
    add_product(s, out, x, norm, w, num_rows, team);
}

void run_cross_attention(const Stack& s, const Batch& b, const Workspace& w, int64_t index, const Team& team) {
    const Layer& layer = s.layers[index];
    const Rows x = prepare_part(s, layer.cross_query, layer.cross_norm, w, b.num_rows, team);
    product(layer.cross_query, x, b.num_rows, team, StoreBf16{w.query, s.num_heads * s.head_dim});
    team.wait();
    attend_to_sources(s, b, w, index, team);
    team.wait();
    add_attended(s, layer.cross_out, {nullptr, nullptr}, w, b.num_rows, team);
}

// --------------------------------------------------------------------------------------------------------------- MLPs

// Writes the activated product with x to w.gated, from slot `first` on.
void product_up(const Stack& s, const Mlp& mlp, const Rows& x, int64_t first, int64_t num_rows, const Workspace& w, const Team& team) {
    const int64_t width = mlp.down.k;
    float* to = w.gated + first * width;
    with_activation(s, [&](const auto& activation) {
        using Activation = std::decay_t<decltype(activation)>;
        if (s.is_gated) product(mlp.up, x, num_rows, team, StoreGated<Activation>{to, width, activation});
        else product(mlp.up, x, num_rows, team, StoreActivated<Activation>{to, width, activation});
    });
}

// The first half of the MLP, for the normed hidden states.
void run_up(const Stack& s, const Layer& layer, const Norm& norm, const Workspace& w, int64_t num_rows, const Team& team) {
    const Rows x = prepare_part(s, layer.mlps->up, norm, w, num_rows, team);
    product_up(s, *layer.mlps, x, 0, num_rows, w, team);
    team.wait();
}

void run_down(const Stack& s, const Layer& layer, const Workspace& w, int64_t num_rows, const Team& team) {
    const Matrix& down = layer.mlps->down;
    const Rows x = prepare(w, num_rows, team, [&](const Rows& rows, int64_t r) { prepare_row(down, rows, r, ReadFloat{w.gated + r * down.k}); });
    add_product(s, down, x, layer.mlp_post_norm, w, num_rows, team);
}

void route(const Stack& s, const Layer& layer, const Workspace& w, int64_t num_rows, const Team& team) {
    const Rows x = prepare_normed(s, layer.router, layer.mlp_norm, w, num_rows, team, [](int64_t r) { return r; });
    product(layer.router, x, num_rows, team, StoreFloat{w.router_logits, s.num_experts});
    team.wait();
    int64_t first, last;
    team.share(num_rows, first, last);
    for (int64_t r = first; r < last; r++)
        choose_experts(s, w.router_logits + r * s.num_experts, w.routing.experts + r * s.experts_per_token,
                       w.routing.weights + r * s.experts_per_token);
    team.wait();
    const int64_t num_read = sort_by_expert(s, num_rows * s.experts_per_token, w.routing);
    if (team.rank == 0) *s.num_experts_read += num_read;
}

// Calls run(expert, first slot, how many) for every expert that a row has chosen: the weights of others are not read.
template <class Run>
void for_chosen_experts(const Stack& s, const Layer& layer, const Routing& routing, const Run& run) {
    for (int64_t e = 0; e < s.num_experts; e++) {
        const int64_t first = routing.first_slots[e], count = routing.first_slots[e + 1] - first;
        if (count > 0) run(layer.mlps[e], first, count);
    }
}

Rows from_slot(const Rows& x, int64_t first) { return {x.data + first * x.stride, x.scales + first, x.stride}; }

// A row's outputs are summed in the order of its own choices.
void add_expert_outputs(const Stack& s, const Layer& layer, const Workspace& w, int64_t row) {
    float* sum = w.branch + row * s.hidden;
    for (int64_t i = 0; i < s.hidden; i += 16) {
        const Mask16 mask = lanes(s.hidden - i);
        F32x16 total = setzero_ps();
        for (int64_t c = row * s.experts_per_token; c < (row + 1) * s.experts_per_token; c++) {
            const float* output = w.expert_outputs + w.routing.slots[c] * s.hidden;
            total = fmadd_ps(set1_ps(w.routing.weights[c]), maskz_loadu_ps(mask, output + i), total);
        }
        mask_storeu_ps(sum + i, mask, total);
    }
    add_normed(s, layer.mlp_post_norm, sum, w.hidden + row * s.hidden, s.hidden);
}

void run_experts(const Stack& s, const Layer& layer, const Workspace& w, int64_t num_rows, const Team& team) {
    route(s, layer, w, num_rows, team);
    const int64_t num_slots = num_rows * s.experts_per_token;
    const Matrix &up = layer.mlps->up, &down = layer.mlps->down;  // rows are prepared alike for all experts
    const Rows x = prepare_normed(s, up, layer.mlp_norm, w, num_slots, team, [&](int64_t slot) { return w.routing.choices[slot] / s.experts_per_token; });
    for_chosen_experts(s, layer, w.routing, [&](const Mlp& expert, int64_t first, int64_t count) {
        product_up(s, expert, from_slot(x, first), first, count, w, team);
    });
    team.wait();
    const Rows y = prepare(w, num_slots, team, [&](const Rows& rows, int64_t slot) { prepare_row(down, rows, slot, ReadFloat{w.gated + slot * down.k}); });
    for_chosen_experts(s, layer, w.routing, [&](const Mlp& expert, int64_t first, int64_t count) {
        product(expert.down, from_slot(y, first), count, team, StoreFloat{w.expert_outputs + first * s.hidden, s.hidden});
    });
    team.wait();
    int64_t first, last;
    team.share(num_rows, first, last);
    for (int64_t r = first; r < last; r++) add_expert_outputs(s, layer, w, r);
    team.wait();
}

// --------------------------------------------------------------------------------------------------------------- pass

// Two vectors of `width` numbers, concatenated.
template <class First, class Second>
struct ReadBoth {
    First first;
    Second second;
    int64_t width;
    F32x16 operator()(int64_t i, Mask16 mask) const { return i < width ? first(i, mask) : second(i - width, mask); }
};

// The left side of a product with each row's embedding and hidden state, each normed, concatenated.
Rows prepare_fused(const Stack& s, const Matrix& m, const Norm& embedding_norm, const Norm& norm, const Workspace& w, int64_t num_rows,
                   const Team& team) {
    return prepare(w, num_rows, team, [&](const Rows& rows, int64_t r) {
        with_norm(s, embedding_norm, w.embedded + r * s.hidden, s.hidden, [&](const auto& embedding) {
            with_norm(s, norm, w.hidden + r * s.hidden, s.hidden, [&](const auto& hidden) {
                using Both = ReadBoth<std::decay_t<decltype(embedding)>, std::decay_t<decltype(hidden)>>;
                prepare_row(m, rows, r, Both{embedding, hidden, s.hidden});
            });
        });
    });
}

void run_layer(const Stack& s, const Batch& b, const Workspace& w, int64_t index, const Team& team) {
    const Layer& layer = s.layers[index];
    const int64_t T = b.num_rows, heads = s.num_heads + 2 * s.num_kv_heads;
    if (layer.qkv.n == 0) {
        run_up(s, layer, layer.mlp_norm, w, T, team);
        return run_down(s, layer, w, T, team);
    }
    if (layer.residual_norm.weight != nullptr) norm_residual(s, layer.residual_norm, w, T, team);
    const Rows x = layer.is_fused ? prepare_fused(s, layer.qkv, layer.embedding_norm, layer.attention_norm, w, T, team)
                                  : prepare_part(s, layer.qkv, layer.attention_norm, w, T, team);
    product(layer.qkv, x, T, team, StoreFloat{w.qkv, heads * s.head_dim});
    team.wait();
    if (s.is_parallel) run_up(s, layer, layer.attention_norm, w, T, team);  // before attention changes its input
    place_rows(s, b, w, index, team);
    team.wait();
    attend_spans(s, b, w, index, team);
    team.wait();
    add_attended(s, layer.out, layer.attention_post_norm, w, T, team);
    if (layer.cross_query.n > 0) run_cross_attention(s, b, w, index, team);
    if (layer.is_mixture) return run_experts(s, layer, w, T, team);
    if (!s.is_parallel) run_up(s, layer, layer.mlp_norm, w, T, team);
    run_down(s, layer, w, T, team);
}

void embed(const Stack& s, const Batch& b, const Workspace& w, const Team& team) {
    const uint16_t* states = w.states == nullptr ? b.states : w.states;
    int64_t first, last;
    team.share(b.num_rows, first, last);
    for (int64_t r = first; r < last; r++) {
        float* to = w.embedded + r * s.hidden;
        if (s.embedding == nullptr) unpack_row(s.packed_embedding, b.ids[r], to);
        for (int64_t i = 0; i < s.hidden; i += 16) {
            const Mask16 mask = lanes(s.hidden - i);
            const F32x16 row = s.embedding == nullptr ? maskz_loadu_ps(mask, to + i) : load_bf16(s.embedding + (int64_t)b.ids[r] * s.hidden + i, mask);
            F32x16 x = mul_ps(row, set1_ps(s.embedding_scale));
            if (s.position_rows != nullptr) x = add_ps(x, maskz_loadu_ps(mask, s.position_rows + (int64_t)b.positions[r] * s.hidden + i));
            mask_storeu_ps(to + i, mask, x);
            if (states != nullptr) mask_storeu_ps(w.hidden + r * s.hidden + i, mask, load_bf16(states + r * s.hidden + i, mask));
        }
    }
    team.wait();
}

// Computes the initial hidden states from embeddings and states.
void fuse_embeddings(const Stack& s, const Workspace& w, int64_t num_rows, const Team& team) {
    const Rows x = prepare_fused(s, s.fusion, {nullptr, nullptr}, {nullptr, nullptr}, w, num_rows, team);
    team.wait();  // all rows are read before any is overwritten
    product(s.fusion, x, num_rows, team, StoreFloat{w.hidden, s.hidden});
    team.wait();
}

constexpr int64_t FINAL_NORM = -1;

// Copies the hidden states of all rows, normed, to the features of this tap. Each thread copies its rows before it takes part in the
// products that change them.
void keep_tapped(const Stack& s, const Batch& b, const Workspace& w, int64_t tap, const Norm& norm, const Team& team) {
    int64_t first, last;
    team.share(b.num_rows, first, last);
    for (int64_t t = 0; t < b.num_taps; t++) {
        if (b.taps[t] != tap) continue;
        for (int64_t r = first; r < last; r++) {
            uint16_t* to = b.features[r] + t * s.hidden;
            with_norm(s, norm, w.hidden + r * s.hidden, s.hidden, [&](const auto& read) {
                for (int64_t i = 0; i < s.hidden; i += 16) store_bf16(to + i, lanes(s.hidden - i), read(i, lanes(s.hidden - i)));
            });
        }
    }
}

void run_stack(const Stack& s, const Batch& b, const Workspace& w, const Team& team) {
    if (w.states != nullptr) fuse_features(s, b.read_features, b.num_rows, w.states, w.rows, team);
    embed(s, b, w, team);
    if (s.fusion.n > 0) fuse_embeddings(s, w, b.num_rows, team);
    for (int64_t index = 0; index < s.num_layers; index++) {
        keep_tapped(s, b, w, index, {nullptr, nullptr}, team);
        run_layer(s, b, w, index, team);
    }
    keep_tapped(s, b, w, s.num_layers, {nullptr, nullptr}, team);
    keep_tapped(s, b, w, FINAL_NORM, s.final_norm, team);
    if (b.num_wanted == 0) return;
    const Rows x = prepare_normed(s, s.head, s.final_norm, w, b.num_wanted, team, [&](int64_t r) { return b.wanted[r]; });
    product(s.head, x, b.num_wanted, team, StoreLogits{b.logits, s.head.n, s.logit_scale, s.logit_softcap});
}

}  // namespace
