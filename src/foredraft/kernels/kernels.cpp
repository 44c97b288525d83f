// Matrix products, attention and whole decoder stacks for a few rows, on x86.
//
// One rule holds for every loop: a row's numbers are summed in an order that depends only on the row. So its bits do not
// depend on how many rows share the pass, on which thread computes it, or on how many keys follow its own.
//
// Everything is called from one OpenMP team per pass; a `Team` says which thread this is. Names: n outputs, k inputs,
// T rows of a pass, D width of a head. Loops process sixteen numbers at a time, with the functions of avx512.h or avx2.h,
// which are named after Intel's instructions; the inner loops are there too. This file holds the exported functions.

#include <sys/mman.h>

#include "adjusting.h"
#include "losses.h"
#include "stack.h"
#include "trees.h"
#include "verification.h"

namespace {

// The columns of logits. ids: of the columns; null: columns are ids. Those of ids below `vocabulary` may be chosen.
class Columns {
    const int64_t count_, vocabulary_;
    std::vector<float> masked_;  // rows of logits, if not all columns may be chosen

public:
    const int64_t* const ids;
    const int64_t width;         // the columns to choose from
    Columns(int64_t count, const int64_t* ids, int64_t vocabulary, int64_t num_rows)
        : count_(count), vocabulary_(vocabulary), ids(ids), width(ids ? count : vocabulary) {
        if (ids && *std::max_element(ids, ids + count) >= vocabulary) masked_.resize(num_rows * count);
    }
    // Row r of the logits, -inf for columns that may not be chosen. Rows may be asked for by several threads.
    Logits row(const float* logits, int64_t r) {
        if (masked_.empty()) return row_of(logits, 1, count_, r);
        for (int64_t c = 0; c < count_; c++) masked_[r * count_ + c] = ids[c] < vocabulary_ ? logits[r * count_ + c] : -INFINITY;
        return row_of(masked_.data(), 1, count_, r);
    }
};

// Pads the rows of distributions to the width of the widest with probability 0. -> that width
int64_t fill_up(const TokenProbs* token_probs, int64_t num_rows) {
    if (num_rows == 0) return 0;
    const int64_t most = token_probs->ids ? *std::max_element(token_probs->kept, token_probs->kept + num_rows) : token_probs->width;
    for (int64_t r = 0; r < num_rows; r++) {
        const int64_t first = r * token_probs->width + token_probs->kept[r], end = r * token_probs->width + most;
        if (token_probs->kept[r] == 0 || token_probs->ids) std::fill(token_probs->probs + first, token_probs->probs + end, 0.0f);
        if (token_probs->ids) std::fill(token_probs->ids + first, token_probs->ids + end, 0);
    }
    return most;
}

struct StoreCorrected {
    float* to;
    const float* logits;
    const int64_t* rows;         // the row of logits for each row of the product
    int64_t stride;
    void operator()(int64_t r, int64_t o, int64_t count, const float* sums) const {
        for (int64_t i = 0; i < count; i += 16) {
            const Mask16 mask = lanes(count - i);
            const F32x16 own = maskz_loadu_ps(mask, logits + rows[r] * stride + o + i);
            mask_storeu_ps(to + r * stride + o + i, mask, add_ps(own, load_ps(sums + i)));
        }
    }
};

}  // namespace

extern "C" {

// To be called first. -> whether the system lets this process use the instructions that the library was compiled for
int64_t start() { return may_use_tiles(); }

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

// softmax(logits / temperature), for training. probs: [num_rows, width]; negative_entropies, likeliest: [num_rows]
void softmax(const void* logits, int64_t is_float, int64_t num_rows, int64_t width, double temperature, float* probs,
             float* negative_entropies, int64_t* likeliest, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows * width > WORTH_A_TEAM)
    for (int64_t r = 0; r < num_rows; r++)
        negative_entropies[r] = (float)softmax_of(row_of(logits, is_float, width, r), width, (float)temperature, probs + r * width, likeliest + r);
}

// See distill_row. probs, negative_entropies, likeliest: the target's, as computed by softmax; places: [num_rows], the target's row that
// each row of logits is compared with; null: all, in order. gradient: like logits. sums: [num_rows, 3]
void distill(const void* logits, int64_t is_float, int64_t num_rows, int64_t width, double temperature, const float* probs,
             const float* negative_entropies, const int64_t* likeliest, const int64_t* places, double kl_share, void* gradient, double* sums,
             int64_t num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_rows * width > WORTH_A_TEAM)
    {
        std::vector<float> terms(width);
#pragma omp for
        for (int64_t r = 0; r < num_rows; r++) {
            const int64_t at = places ? places[r] : r;
            const Gradient slope = {(char*)gradient + r * width * (is_float ? 4 : 2), is_float != 0};
            distill_row(row_of(logits, is_float, width, r), width, (float)temperature, probs + at * width, negative_entropies[at],
                        likeliest[at], kl_share, terms.data(), slope, sums + r * 3);
        }
    }
}

// Adjusts rows of logits [.., width] in place: row rows[i] by adjustments i, after the generated tokens before ends[i], which begin where
// those of the row before end.
void adjust_rows(float* logits, int64_t width, const AdjustmentBatch* adjustments, const int64_t* rows, int64_t num_rows,
                 const int64_t* generated, const int64_t* ends, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows * adjustments->each->num_ids > WORTH_A_TEAM)
    for (int64_t i = 0; i < num_rows; i++) {
        const int64_t first = i > 0 ? ends[i - 1] : 0;
        adjust(logits + rows[i] * width, *adjustments, i, generated + first, ends[i] - first);
    }
}

// Chooses a token for each row with its spec; -1 if the row has a NaN. ids: [num_rows]
void choose(const void* logits, int64_t is_float, int64_t num_rows, int64_t width, const DrawSpec* specs, const double* uniforms,
            const int64_t* keys, int64_t* ids, int64_t num_threads) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_rows > 1 && num_rows * width > WORTH_A_TEAM)
    for (int64_t r = 0; r < num_rows; r++) ids[r] = choose_token(row_of(logits, is_float, width, r), width, nullptr, specs[r], {uniforms, keys}, 0, nullptr);
}

// Truncated distributions. probs, ids: [num_rows, room]. -> the most ids that a row keeps; if that is more than room, the
// output is incomplete. Rows that keep fewer are padded with probability 0; a row with a NaN becomes all NaN.
int64_t token_probs(const void* logits, int64_t is_float, int64_t num_rows, int64_t width, const DrawSpec* specs, int64_t room, float* probs,
             int64_t* ids, int64_t num_threads) {
    std::vector<int64_t> kept(num_rows);
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_rows > 1 && num_rows * width > WORTH_A_TEAM)
    for (int64_t r = 0; r < num_rows; r++) {
        thread_local std::vector<float> some;
        thread_local std::vector<int64_t> places;
        kept[r] = truncated_softmax(row_of(logits, is_float, width, r), width, specs[r], some, places);
        std::copy_n(some.begin(), std::min(room, kept[r]), probs + r * room);
        std::copy_n(places.begin(), std::min(room, kept[r]), ids + r * room);
    }
    int64_t most = 1;
    for (const int64_t count : kept) most = std::max(most, count);
    for (int64_t r = 0; r < num_rows && most <= room; r++) {
        std::fill(probs + r * room + kept[r], probs + r * room + most, kept[r] ? 0.0f : NAN);
        std::fill(ids + r * room + kept[r], ids + r * room + most, 0);
    }
    return most;
}

// Verifies sampled drafts. outcomes: [num_sequences, 2], the number of accepted draft tokens and the next token; bad: [rows of
// logits], 1 for rows with a NaN; stops: [num_sequences, max_len + 1], the probability of each number of accepted tokens.
void verify(const void* logits, int64_t is_float, int64_t width, const VerificationBatch* batch, int64_t* outcomes, uint8_t* bad, double* stops,
           int64_t num_threads) {
    const VerificationBatch& d = *batch;
    const auto verify_by = [&](const Team& team, int64_t b, Scratch& scratch) {
        verify_sequence(team, {logits, is_float != 0, width}, d, b, scratch, bad, stops + b * (d.max_len + 1), outcomes + 2 * b);
    };
    const int64_t num_rows = d.num_sequences + std::accumulate(d.lens, d.lens + d.num_sequences, (int64_t)0);
    if (num_rows * width <= WORTH_A_TEAM) num_threads = 1;
    thread_local Scratch of_this_thread;
    if (d.num_sequences < num_threads) {
        Scratch& scratch = of_this_thread;  // the caller's, for the whole team
        scratch.reserve(d, width);
        with_team(num_threads, [&](const Team& team) {
            for (int64_t b = 0; b < d.num_sequences; b++) verify_by(team, b, scratch);
        });
        return;
    }
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
    for (int64_t b = 0; b < d.num_sequences; b++) {
        of_this_thread.reserve(d, width);
        alone([&](const Team& team) { verify_by(team, b, of_this_thread); });
    }
}

// For a quantised matrix: the numbers of its rows are rounded to integers from -row_steps to row_steps.
int64_t row_steps(const Matrix* m) { return steps_of_row(*m); }

// Bytes of a packed matrix.
int64_t packed_bytes(const Matrix* m) { return round_up(m->n, GROUP) / GROUP * group_bytes(*m); }

// Packs rows first .. first + num_rows - 1 of a matrix, first being a multiple of 64, in the order in which the inner loops read them.
// weights: [num_rows, k] bfloat16, or int8 codes. scales, offsets: [num_rows, k / group] of m's scale_bytes, for kinds with groups.
// corrections: [num_rows], for INT8. -> how many codes the kind cannot represent; those are packed as other numbers
int64_t pack(const Matrix* m, int64_t first, int64_t num_rows, const void* weights, const char* scales, const char* offsets, int32_t* corrections) {
    const int64_t bytes = group_bytes(*m), groups = round_up(num_rows, GROUP) / GROUP;
    char* to = (char*)m->weights + first / GROUP * bytes;
#ifdef MADV_HUGEPAGE
    const uintptr_t begin = round_up((uintptr_t)m->weights, 1 << 21), end = ((uintptr_t)m->weights + packed_bytes(m)) >> 21 << 21;
    if (first == 0 && end > begin) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#endif
    int64_t bad = 0;
#pragma omp parallel for reduction(+ : bad)
    for (int64_t group = 0; group < groups; group++) {
        const int64_t row = group * GROUP, count = num_rows - row < GROUP ? num_rows - row : GROUP;
        memset(to + group * bytes, 0, bytes);
        if (has_groups(*m)) {
            const int64_t heads = row * (m->k / m->group) * m->scale_bytes;
            bad += pack_groups(*m, (const int8_t*)weights + row * m->k, scales + heads, offsets ? offsets + heads : nullptr, count, to + group * bytes);
        } else {
            pack_whole(*m, (const char*)weights + row * m->k * (m->kind == INT8 ? 1 : 2), count, to + group * bytes, corrections + row);
        }
    }
    return bad;
}

// Rows of a matrix, dequantised. ids: [count]; to: [count, k]
void unpack(const Matrix* m, const int64_t* ids, int64_t count, float* to) {
#pragma omp parallel for if (count * m->k > WORTH_A_TEAM)
    for (int64_t i = 0; i < count; i++) unpack_row(*m, ids[i], to + i * m->k);
}

int64_t linear_workspace(const Matrix* m, int64_t num_rows) { return rows_bytes(num_rows, m->k); }

// y = x W^T + b. x: [num_rows, k] bfloat16, y: [num_rows, n] bfloat16
void linear(const Matrix* m, const uint16_t* x, uint16_t* y, int64_t num_rows, char* workspace, int64_t num_threads) {
    const Rows rows = rows_in(workspace, num_rows, m->k);
    with_team(num_threads, [&](const Team& team) {
        int64_t first, last;
        team.share(num_rows, first, last);
        for (int64_t r = first; r < last; r++) prepare_row(*m, rows, r, ReadBf16{x + r * m->k});
        team.wait();
        product(*m, rows, num_rows, team, StoreBf16{y, m->n});
    });
}

// Bytes for each thread.
int64_t attention_workspace(int64_t num_keys) { return round_up(score_room(num_keys), ALIGN); }

// Attention of several spans in one layer. workspace: `room` = attention_workspace(longest) bytes for each thread
void attention(const AttentionCall* calls, int64_t num_calls, char* workspace, int64_t room, int64_t num_threads) {
    with_team(num_threads, [&](const Team& team) {
        float* scores = (float*)(workspace + team.rank * room);
        int64_t next_block = 0;
        for (int64_t i = 0; i < num_calls; i++) attend_shared(calls[i], team, next_block, scores);
    });
}

// The states of rows of features, as a pass that reads features computes them (see Batch). workspace: linear_workspace(features_fc,
// num_rows) bytes
void fuse(const Stack* s, const uint16_t* const* features, int64_t num_rows, uint16_t* states, char* workspace, int64_t num_threads) {
    const Rows rows = rows_in(workspace, num_rows, s->features_width);
    with_team(num_threads, [&](const Team& team) { fuse_features(*s, features, num_rows, states, rows, team); });
}

int64_t stack_workspace(const Stack* s, const Batch* b, int64_t num_threads) {
    char* end = nullptr;
    lay_out_workspace(*s, *b, 0, (int)num_threads, nullptr, &end);
    return (int64_t)end;
}

// One pass of a whole decoder. workspace: stack_workspace bytes, aligned to 64
void stack(const Stack* s, const Batch* b, char* workspace, int64_t num_threads) {
    with_team(num_threads, [&](const Team& team) {
        char* end;
        run_stack(*s, *b, lay_out_workspace(*s, *b, team.rank, team.size, workspace, &end), team);
    });
}

// Reads a batch whose wanted rows are the last ones of its spans, and generates lens[i] >= 1 tokens after span i: each is chosen by
// specs[i] from the ids below `vocabulary` and written to generated[i, :lens[i]]; the last one is not read. A row with a NaN gives
// -1 and ends its span; later tokens are not written. adjustments: of the logits; null: none. Slots must be null. workspace: the larger of
// that for the batch and that for one row of each span at its greatest length. -> the most ids that a truncated distribution keeps; the
// others are padded with probability 0
int64_t generate(const Stack* s, const Batch* batch, const int64_t* lens, int64_t width, int64_t vocabulary, const DrawSpec* specs,
                 const AdjustmentBatch* adjustments, const double* uniforms, const int64_t* keys, const TokenProbs* token_probs, int64_t num_prob_rows,
                 int64_t* generated, char* workspace, int64_t num_threads) {
    Batch b = *batch;
    const int64_t num_spans = batch->num_spans;
    std::vector<int64_t> open(num_spans);                       // the original index of each span that is not finished
    std::vector<Span> spans(batch->spans, batch->spans + num_spans);
    const int64_t num_stores = s->num_layers * 2;
    std::vector<uint16_t*> stores(batch->stores, batch->stores + num_spans * num_stores);
    std::vector<const uint16_t*> sources;
    if (batch->sources != nullptr) sources.assign(batch->sources, batch->sources + num_spans * num_stores);
    std::vector<int32_t> ids(num_spans), positions(num_spans), wanted(num_spans);
    std::vector<uint16_t> states;
    const bool carries_states = has_states(b);
    KeptStates kept;
    Columns columns(s->head.n, s->column_ids, vocabulary, num_spans);
    if (carries_states) states.resize(num_spans * s->hidden);
    for (int64_t i = 0; i < num_spans; i++) open[i] = i;
    for (int64_t step = 0; b.num_spans > 0; step++) {
        if (carries_states) kept.keep(*s, b);
        stack(s, &b, workspace, num_threads);
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (b.num_spans > 1 && b.num_spans * columns.width > WORTH_A_TEAM)
        for (int64_t i = 0; i < b.num_spans; i++) {
            int64_t* tokens = generated + open[i] * width;
            if (adjustments) adjust(b.logits + i * s->head.n, *adjustments, open[i], tokens, step);
            tokens[step] = choose_token(columns.row(b.logits, i), columns.width, columns.ids, specs[open[i]], {uniforms, keys}, step, token_probs);
        }
        int64_t left = 0;
        for (int64_t i = 0; i < b.num_spans; i++) {
            const int64_t place = open[i], token = generated[place * width + step], end = spans[i].start + spans[i].num_rows;
            if (token < 0 || step + 1 >= lens[place]) continue;
            ids[left] = (int32_t)token;
            positions[left] = (int32_t)end;
            if (carries_states) std::copy_n(kept.rows[b.wanted[i]], s->hidden, states.begin() + left * s->hidden);
            wanted[left] = (int32_t)left;
            std::copy_n(stores.begin() + i * num_stores, num_stores, stores.begin() + left * num_stores);
            if (!sources.empty()) std::copy_n(sources.begin() + i * num_stores, num_stores, sources.begin() + left * num_stores);
            spans[left] = {left, 1, end, spans[i].capacity, 0, spans[i].source_len, spans[i].source_capacity};
            open[left++] = place;
        }
        b = {ids.data(), positions.data(), nullptr, nullptr, wanted.data(), nullptr, spans.data(), stores.data(),
             sources.empty() ? nullptr : sources.data(), nullptr, nullptr, states.empty() ? nullptr : states.data(), b.cos, b.sin, b.logits,
             left, left, left, b.rotary_stride};
    }
    return fill_up(token_probs, num_prob_rows);
}

// Reads a batch whose wanted rows are the last ones of its spans, and grows a tree after each: tree i has sizes[i] >= 1 nodes, and
// specs[i], greedy or with shared noise, chooses the children of a node from the first `vocabulary` ids. shapes: the parents of all
// nodes, tree after tree, see Tree; grown: the tokens of all nodes, -1 for those that did not grow. Slots must be null. Keys and values
// of the trees remain in the stores after the spans. adjustments: as in generate. workspace: the larger of those for the batch and for the
// longest, widest level.
void grow(const Stack* s, const Batch* batch, const int64_t* sizes, const int64_t* shapes, int64_t vocabulary, const DrawSpec* specs,
          const AdjustmentBatch* adjustments, const int64_t* keys, int64_t* grown, char* workspace, int64_t num_threads) {
    std::vector<Tree> trees;
    std::vector<GrowingNode> nodes;
    for (int64_t i = 0, at = 0; i < batch->num_spans; at += sizes[i++]) {
        std::fill_n(grown + at, sizes[i], -1);
        trees.push_back({sizes[i], shapes + at, grown + at, batch->spans[i].start + batch->spans[i].num_rows, {}, 0});
        trees.back().paths.resize(sizes[i]);
        nodes.push_back({i, -1, -1});
    }
    const bool carries_states = has_states(*batch);
    const int64_t* column_ids = s->column_ids;
    const int64_t width = column_ids ? s->head.n : std::min(vocabulary, s->head.n);
    KeptStates kept;
    Batch b = *batch;
    Level level;
    for (int64_t depth = 1; !nodes.empty(); depth++) {
        if (carries_states) kept.keep(*s, b);
        stack(s, &b, workspace, num_threads);
        const int64_t count = (int64_t)nodes.size();
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (count > 1 && count * width > WORTH_A_TEAM)
        for (int64_t r = 0; r < count; r++) {
            Tree& tree = trees[nodes[r].tree];
            const DrawSpec& spec = specs[nodes[r].tree];
            Best best(tree.num_children(nodes[r].node));
            if (adjustments) {
                const std::vector<int64_t> path = tree.tokens_to(nodes[r].node);
                adjust(b.logits + r * s->head.n, *adjustments, nodes[r].tree, path.data(), (int64_t)path.size());
            }
            choose_best(row_of(b.logits, 1, s->head.n, r), width, column_ids, spec, spec.kind == GREEDY ? 0 : keys[spec.first_noise + depth - 1], best);
            std::vector<int64_t> found;
            for (const auto& [_, column] : best.kept) {
                const int64_t id = column_ids ? column_ids[column] : column;
                if (id < vocabulary) found.push_back(id);
            }
            tree.grow(nodes[r].node, found);
        }
        nodes = next_level(trees, nodes, b.wanted);
        level = Level(*s, *batch, trees, nodes, depth, carries_states ? &kept : nullptr);
        b = level.batch(*batch, depth);
    }
}

// Chooses chains of tokens from given logits, each row corrected by the token before it (a Markov factor): position i of chain c has the
// logits of row first_rows[c] + i, plus `second` times row t of `first` [.., second->k], where t is the token before, previous[c] for
// the first. lens[c] >= 1 tokens, chosen by specs[c] from the ids below `vocabulary`, are written to chosen[c, :lens[c]]; -1 from
// a row with a NaN on. column_ids: as in Stack. adjustments: as in generate. workspace: linear_workspace(second, num_chains) bytes.
// -> as generate
int64_t choose_chains(const Matrix* second, const float* first, const float* logits, const int64_t* first_rows, const int64_t* lens,
                      const int64_t* previous, int64_t num_chains, int64_t width, const int64_t* column_ids, int64_t vocabulary,
                      const DrawSpec* specs, const AdjustmentBatch* adjustments, const double* uniforms, const int64_t* keys,
                      const TokenProbs* token_probs, int64_t num_prob_rows, int64_t* chosen, char* workspace, int64_t num_threads) {
    Columns columns(second->n, column_ids, vocabulary, num_chains);
    std::vector<float> corrected(num_chains * second->n);
    std::vector<int64_t> open(num_chains), rows(first_rows, first_rows + num_chains), before(previous, previous + num_chains);
    std::iota(open.begin(), open.end(), 0);
    const Rows x = rows_in(workspace, num_chains, second->k);
    for (int64_t step = 0; !open.empty(); step++) {
        const int64_t count = (int64_t)open.size(), work = count * second->n;
        with_team(work * second->k > WORTH_A_TEAM ? num_threads : 1, [&](const Team& team) {
            int64_t begin, end;
            team.share(count, begin, end);
            for (int64_t r = begin; r < end; r++) prepare_row(*second, x, r, ReadFloat{first + before[r] * second->k});
            team.wait();
            product(*second, x, count, team, StoreCorrected{corrected.data(), logits, rows.data(), second->n});
        });
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (count > 1 && work > WORTH_A_TEAM)
        for (int64_t r = 0; r < count; r++) {
            int64_t* tokens = chosen + open[r] * width;
            if (adjustments) adjust(corrected.data() + r * second->n, *adjustments, open[r], tokens, step);
            tokens[step] = choose_token(columns.row(corrected.data(), r), columns.width, columns.ids, specs[open[r]], {uniforms, keys}, step, token_probs);
        }
        int64_t left = 0;
        for (int64_t r = 0; r < count; r++) {
            const int64_t chain = open[r], token = chosen[chain * width + step];
            if (token < 0 || step + 1 >= lens[chain]) continue;
            before[left] = token;
            rows[left] = rows[r] + 1;
            open[left++] = chain;
        }
        open.resize(left);
    }
    return fill_up(token_probs, num_prob_rows);
}

}  // extern "C"
