// What callers hand to the library, field by field as in structs.py.

#pragma once

#include <cstdint>

// Of a matrix: bfloat16; int8 with a scale for each output; and with a scale for each group of inputs: codes of four bits, four
// bits that choose one of 16 levels, codes of eight bits.
enum Kind : int64_t { BF16 = 0, INT8 = 1, INT4_GROUPS = 2, LEVEL_GROUPS = 3, INT8_GROUPS = 4 };
enum Choice : int64_t { GREEDY = 0, DRAWN = 1, SHARED = 2 };       // of a token
enum Activation : int64_t { SILU = 0, GELU_TANH = 1, CLAMPED_SWIGLU = 2, RELU = 3, GELU = 4 };
enum NormKind : int64_t { RMS_NORM = 0, LAYER_NORM = 1 };

extern "C" {

struct Matrix {
    const void* weights;        // packed
    const float* scales;        // [n] int8 only
    const int32_t* corrections; // [n] int8 only: what the numbers added to each row make of an output's weights
    const float* bias;          // [n] or null
    const int8_t* levels;       // [16], of LEVEL_GROUPS
    int64_t n, k, kind;
    int64_t group, scale_bytes, has_offsets;  // of kinds with groups, whose scales (and offsets) lie among the weights
};

struct Norm {
    const float *weight, *bias;            // weight null: there is no norm. bias: of layer norms
};

struct Mlp {
    Matrix up, down;                       // up of a gated one: groups of 32 gates and their 32 ups
};

struct Layer {
    Norm attention_norm, mlp_norm;         // [hidden] of what attention and the MLP read
    Norm attention_post_norm, mlp_post_norm;  // [hidden] of what they write
    Norm residual_norm;                    // [hidden] of the residual stream itself, where the layer begins
    Norm embedding_norm;                   // [hidden] of the embedding that a fused layer reads
    const float *q_norm, *k_norm;          // [D] or [heads, D]; null: none
    Matrix qkv, out;                       // qkv.n 0: the layer is an MLP without attention
    const Mlp* mlps;                       // one, or an expert each
    Matrix router;                         // [num_experts, hidden]
    const float* sinks;                    // [num_heads] or null
    Norm cross_norm;                       // [hidden] of what attention to a source reads
    Matrix cross_query, cross_out;         // n 0: the layer attends to no source
    const float* bias;                     // [num_heads, 2 * farthest + 1] as of an AttentionCall; null: none
    int64_t is_fused;                      // attention reads the row's embedding and, behind it, its hidden state: qkv is [.., 2 * hidden]
    int64_t is_mixture;                    // of experts, which the router chooses for each row
    int64_t window;                        // 0: all earlier keys
    int64_t rotary_table;                  // -1: queries and keys are not rotated
};

// The form of a decoder, as in decoder.py.
struct Stack {
    const Layer* layers;
    const uint16_t* embedding;             // [V, hidden] bfloat16; null: the packed one
    Matrix packed_embedding;
    const float* position_rows;            // [.., hidden] added to embeddings, by position; null: none
    Matrix fusion;                         // of a row's embedding and, behind it, its state: the hidden state; n 0: there is none
    Norm final_norm;
    Matrix head;
    const int64_t* column_ids;             // [head.n] the id that each column of the logits stands for; null: its number
    int64_t* num_experts_read;             // counts the experts whose weights a pass reads, layer by layer
    int64_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate;
    int64_t rotary_dim;                    // of each head; the rest is not rotated
    int64_t norm_kind, is_parallel;        // parallel: the MLP reads what attention reads
    int64_t norms_residual;                // norms before the parts of a layer are of the residual stream itself
    int64_t sees_all;                      // a row sees its whole span: an encoder
    int64_t farthest;                      // of biases by distance
    int64_t is_gated, activation;          // of the MLPs
    int64_t joint_head_norm, head_norm_stride;  // whether a query norm is taken over all heads at once; its weight from head to head
    int64_t num_experts, experts_per_token, normalizes_experts;
    int64_t state_tap;                     // of what a generated row hands to the next one, if rows have states
    int64_t num_ids;                       // of the vocabulary that column_ids name
    float epsilon, scale, softcap;
    float embedding_scale, residual_scale, logit_scale, logit_softcap;
    float swiglu_alpha, swiglu_limit;
};

struct Span {                              // rows of a pass that belong to one sequence
    int64_t first_row, num_rows, start, capacity;
    int64_t has_paths;                     // whether its rows see what their paths name; if not, all positions before their own, at these slots
    int64_t source_len, source_capacity;   // of the source that its rows attend to, if the layers do
};

struct Batch {
    const int32_t *ids, *positions;        // [T]
    const int32_t* slots;                  // [T] where in its sequence's store a row's keys and values go; null: at its position
    const int32_t* paths;                  // [T, path_stride] the slots of the positions from its span's start to a row's own, where spans have paths
    const int32_t* wanted;                 // [W] rows whose logits are wanted
    const uint16_t* states;                // [T, hidden] bfloat16: what the hidden states begin as, beside the embeddings; null: they begin as those
    const float *cos, *sin;                // [tables, positions, rotary_dim / 2]
    const Span* spans;
    uint16_t* const* stores;               // [num_spans, layers, 2]: keys [H, capacity, D] and values
    const uint16_t* const* sources;        // [num_spans, layers, 2]: the same of sources, [H, source_capacity, D]; null: there are none
    float* logits;                         // [W, V]
    int64_t num_rows, num_wanted, num_spans;
    int64_t rotary_stride;                 // from table to table
    int64_t path_stride;
    const int64_t* taps;                   // hidden states that are kept: what layer i reads; num_layers: what the last one gives; -1: that, normed
    uint16_t* features;                    // [T, num_taps * hidden] bfloat16: where they go
    int64_t num_taps;
};

// How the tokens after a row are chosen from softmax(logits / temperature), truncated: the likeliest, one drawn with a uniform
// number, or the one that noise shared with the verifier selects (see sampling/noise.py).
struct DrawSpec {
    int64_t kind, first_noise;             // index of its first uniform number or key, one for each token
    int64_t first_prob_row;                // row of TokenProbs of its first drawn token
    int64_t top_k;                         // 0: all
    float temperature, top_p, min_p, unused;
};

// The distributions of drawn tokens. A row holds `kept[r]` ids, likeliest first, or all of them in order if nothing is truncated.
struct TokenProbs {
    float* probs;                          // [R, width]
    int64_t* ids;                          // [R, width]; null where no spec truncates
    int64_t* kept;                         // [R]
    int64_t width;
};

// Sequences to verify. Sequence b's rows of logits begin at first_rows[b]; its draft tokens, and the row of probs that each was
// drawn from (-1: a point mass), are row places[b] of [B, K].
struct VerificationBatch {
    const int64_t *first_rows, *lens, *places;  // [num_sequences]
    const DrawSpec* specs;                      // the target's
    const int64_t* rules;                       // 0: rejection, 1: block
    const int64_t *ids, *prob_rows;             // [B, K]
    const float* probs;                         // [R, columns]: the draft distributions
    const int64_t* kept_ids;                    // [R, columns], or null: each column is its id
    const double* uniforms;                     // [num_sequences, 2]
    int64_t num_sequences, max_len, columns, probs_stride, kept_stride;
};

struct AttentionCall {
    const uint16_t* query;                 // element (head, row, i) at head * query_head + row * query_row + i
    int64_t query_head, query_row;
    const uint16_t *keys, *values;         // [H, capacity, Dk], [H, capacity, Dv]
    int64_t capacity;
    const int32_t *positions, *paths;      // [num_rows], [num_rows, path_stride]: as of a Batch; null: start .., each at its position
    const uint8_t* mask;                   // [num_rows, mask_keys], 0 hides a key; null: all earlier ones are seen
    int64_t mask_keys;
    const float* sinks;                    // [num_heads] or null
    const float* bias;                     // [num_heads, 2 * farthest + 1] by the distance key - query, from -farthest on; or null
    int64_t farthest;                      // what lies farther counts as that far
    int64_t num_seen;                      // keys that every row sees; 0: a row sees those up to its own position
    uint16_t* output;                      // [num_rows, num_heads, Dv]
    int64_t path_stride, num_rows, start, num_heads, num_kv_heads, key_dim, value_dim, window;
    float scale, softcap;                  // softcap 0: none
};

}  // extern "C"
