// The arguments of the library's functions, field by field as in structs.py.

#pragma once

#include <cstdint>

// The storage of a matrix: bfloat16; int8 with a scale for each output; or, with a scale for each group of inputs, codes of four
// bits, codes of four bits that select one of 16 levels, or codes of eight bits.
enum Kind : int64_t { BF16 = 0, INT8 = 1, INT4_GROUPS = 2, LEVEL_GROUPS = 3, INT8_GROUPS = 4 };
enum Choice : int64_t { GREEDY = 0, DRAWN = 1, SHARED = 2 };       // how a token is chosen
enum Activation : int64_t { SILU = 0, GELU_TANH = 1, CLAMPED_SWIGLU = 2, RELU = 3, GELU = 4 };
enum NormKind : int64_t { RMS_NORM = 0, LAYER_NORM = 1 };

extern "C" {

struct Matrix {
    const void* weights;        // packed
    const float* scales;        // [n] int8 only
    const int32_t* corrections; // [n] int8 only: what the OFFSET added to the numbers of each row adds to an output's sums
    const float* bias;          // [n] or null
    const int8_t* levels;       // [16], for LEVEL_GROUPS only
    int64_t n, k, kind;
    int64_t group, scale_bytes, has_offsets;  // for kinds with groups; their scales (and offsets) are stored among the weights
};

struct Norm {
    const float *weight, *bias;            // weight null: there is no norm. bias: for layer norms
};

struct Mlp {
    Matrix up, down;                       // up, if gated: groups of 32 gates and their 32 ups
};

struct Layer {
    Norm attention_norm, mlp_norm;         // [hidden] of the inputs of attention and the MLP
    Norm attention_post_norm, mlp_post_norm;  // [hidden] of their outputs
    Norm residual_norm;                    // [hidden] replaces the residual stream by its norm at the start of the layer
    Norm embedding_norm;                   // [hidden] of the embeddings that a fused layer reads
    const float *q_norm, *k_norm;          // [D] or [heads, D]; null: none
    Matrix qkv, out;                       // qkv.n 0: the layer is an MLP without attention
    const Mlp* mlps;                       // one, or one for each expert
    Matrix router;                         // [num_experts, hidden]
    const float* sinks;                    // [num_heads] or null
    Norm cross_norm;                       // [hidden] of the input of cross-attention to a source
    Matrix cross_query, cross_out;         // n 0: the layer attends to no source
    const float* bias;                     // [num_heads, 2 * farthest + 1] as in AttentionCall; null: none
    int64_t is_fused;                      // attention reads the row's embedding and hidden state, concatenated: qkv is [.., 2 * hidden]
    int64_t is_mixture;                    // of experts: the router chooses some for each row
    int64_t window;                        // 0: all earlier keys
    int64_t rotary_table;                  // -1: queries and keys are not rotated
};

// A decoder and its form, as in decoder.py.
struct Stack {
    const Layer* layers;
    const uint16_t* embedding;             // [V, hidden] bfloat16; null: the packed one
    Matrix packed_embedding;
    const float* position_rows;            // [.., hidden] added to embeddings, by position; null: none
    Matrix fusion;                         // of a row's embedding and state, concatenated, to its initial hidden state; n 0: there is none
    Matrix features_fc;                    // of a row's features, normed, to its state; n 0: features are states
    const float* features_norm;            // [features_parts * width] the weights of RMS norms over equal parts of the features; null: none
    int64_t features_parts, features_width;
    Norm final_norm;
    Matrix head;
    const int64_t* column_ids;             // [head.n] the id of each column of the logits; null: columns are ids
    int64_t* num_experts_read;             // counts the experts whose weights a pass reads, layer by layer
    int64_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate;
    int64_t rotary_dim;                    // of each head; the rest is not rotated
    int64_t norm_kind, is_parallel;        // parallel: attention and the MLP have the same input
    int64_t norms_residual;                // norms before attention and the MLP replace the residual stream too
    int64_t sees_all;                      // a row sees its whole span: an encoder
    int64_t farthest;                      // of biases by distance
    int64_t is_gated, activation;          // of the MLPs
    int64_t joint_head_norm, head_norm_stride;  // whether query and key norms span all heads; stride of their weights by head
    int64_t num_experts, experts_per_token, normalizes_experts;
    int64_t state_tap;                     // of the hidden state that a generated row passes to the next one, if rows have states
    float epsilon, scale, softcap;
    float embedding_scale, residual_scale, logit_scale, logit_softcap;
    float swiglu_alpha, swiglu_limit;
};

struct Span {                              // the rows of a pass that belong to one sequence
    int64_t first_row, num_rows, start, capacity;
    int64_t has_paths;                     // whether rows see the slots of their paths; if not, all positions before their own, in slots of the same numbers
    int64_t source_len, source_capacity;   // of the source that its rows attend to, if the decoder has cross-attention
};

struct Batch {
    const int32_t *ids, *positions;        // [T]
    const int32_t* slots;                  // [T] the slot for a row's keys and values in its sequence's store; null: its position
    const int32_t* paths;                  // [T, path_stride] for spans with paths: the slots from the span's start to a row's own position
    const int32_t* wanted;                 // [W] rows whose logits are wanted
    const uint16_t* const* read_features;  // [T] each row's features_width features, bfloat16, from which its state is computed; null: none
    const Span* spans;
    uint16_t* const* stores;               // [num_spans, layers, 2]: keys [H, capacity, D] and values
    const uint16_t* const* sources;        // [num_spans, layers, 2]: the same for sources, [H, source_capacity, D]; null: there are none
    const int64_t* taps;                   // to keep: i: the input of layer i; num_layers: the output of the last one; -1: that after the final norm
    uint16_t* const* features;             // [T] where they go: num_taps * hidden numbers for each row, bfloat16
    const uint16_t* states;                // [T, hidden] bfloat16: the initial hidden states; null: the embeddings, unless rows have features
    const float *cos, *sin;                // [tables, positions, rotary_dim / 2]
    float* logits;                         // [W, V]
    int64_t num_rows, num_wanted, num_spans;
    int64_t rotary_stride;                 // from table to table
    int64_t path_stride;
    int64_t num_taps;
};

// How the tokens after a row are chosen from softmax(logits / temperature), truncated: the likeliest, one drawn with a uniform
// number, or the one selected by the noise shared with the verifier (see sampling/noise.py).
struct DrawSpec {
    int64_t kind, first_noise;             // first_noise: the index of its first uniform number or key; there is one for each token
    int64_t first_prob_row;                // the row of TokenProbs for its first drawn token
    int64_t top_k;                         // 0: all
    float temperature, top_p, min_p, unused;
};

// Changes to the logits of a sequence, before its temperature: penalties for the tokens so far, then biases, then bans.
struct Adjustments {
    const int64_t *ids, *counts;           // [num_ids] the distinct tokens so far, those of the prompt first; how often each is in the output
    const int64_t* biased;                 // [num_biased] ids
    const float* biases;                   // [num_biased]
    const int64_t *banned, *banned_tokens; // [num_banned] ids, each banned for so many generated tokens
    int64_t num_ids, num_prompt_ids, num_biased, num_banned;
    float repetition, frequency, presence, unused;
};

// The changes for each sequence, and where ids are in a row of logits.
struct AdjustmentBatch {
    const Adjustments* each;
    const int64_t* columns;                // [num_ids], -1 for ids without one; null: columns are ids
    int64_t num_ids;
};

// The distributions of drawn tokens. Row r holds `kept[r]` ids, likeliest first, or all ids in order if nothing is truncated.
struct TokenProbs {
    float* probs;                          // [R, width]
    int64_t* ids;                          // [R, width]; null if no spec truncates
    int64_t* kept;                         // [R]
    int64_t width;
};

// Sequences to verify. The rows of logits of sequence b begin at first_rows[b]. Its draft tokens are row b of ids, and the rows of
// probs that they were drawn from (-1: a point mass) are row b of prob_rows.
struct VerificationBatch {
    const int64_t *first_rows, *lens;           // [num_sequences]
    const DrawSpec* specs;                      // the target's
    const int64_t* rules;                       // 0: rejection, 1: block
    const int64_t *ids, *prob_rows;             // [num_sequences, max_len]
    const float* probs;                         // [R, columns]: the draft distributions
    const int64_t* kept_ids;                    // [R, columns], or null: columns are ids
    const double* uniforms;                     // [num_sequences, 2]
    int64_t num_sequences, max_len, columns, probs_stride, kept_stride;
};

struct AttentionCall {
    const uint16_t* query;                 // element (head, row, i) at head * query_head + row * query_row + i
    int64_t query_head, query_row;
    const uint16_t *keys, *values;         // [H, capacity, Dk], [H, capacity, Dv]
    int64_t capacity;
    const int32_t *positions, *paths;      // [num_rows], [num_rows, path_stride]: as in Batch; null: start .., each in the slot of its position
    const uint8_t* mask;                   // [num_rows, mask_keys], 0 hides a key; null: none is hidden
    int64_t mask_keys;
    const float* sinks;                    // [num_heads] or null
    const float* bias;                     // [num_heads, 2 * farthest + 1], by the distance key - query from -farthest on; or null
    int64_t farthest;                      // distances are clamped to -farthest .. farthest
    int64_t num_seen;                      // how many keys every row sees; 0: a row sees those up to its own position
    uint16_t* output;                      // [num_rows, num_heads, Dv]
    int64_t path_stride, num_rows, start, num_heads, num_kv_heads, key_dim, value_dim, window;
    float scale, softcap;                  // softcap 0: none
};

}  // extern "C"
