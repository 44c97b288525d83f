// Which sampled draft tokens are accepted, and the token after them.

#pragma once

#include "sampling.h"
#include "team.h"

namespace {

// A row of the target's distribution over all ids: softmax(logits / temperature), computed again wherever it is needed, which takes less
// time than to store it. Columns are ids.
struct DenseRow {
    Logits logits;
    int64_t count;
    F32x16 shift, factor, inverse;  // the largest logit, 1 / temperature, and 1 / the sum of the exponentials
    bool is_bad;                    // a NaN among the logits, or none is finite: all probabilities are 0
    F32x16 exponentials(F32x16 some) const { return exp_nonpositive(mul_ps(sub_ps(some, shift), factor)); }
    F32x16 probs(F32x16 some) const { return is_bad ? setzero_ps() : mul_ps(exponentials(some), inverse); }
    F32x16 at(int64_t i, Mask16 mask) const { return probs(logits.load(i, mask)); }
    F32x16 of(const int64_t* ids, Mask16 mask) const { return probs(logits.gather(ids, mask)); }
    F32x16 drafted(const float* by_id, int64_t i, Mask16 mask) const { return maskz_loadu_ps(mask, by_id + i); }
    int64_t id(int64_t column) const { return column; }
    float of(int64_t id) const { return id < count ? reduce_add_ps(at(id, 1)) : 0; }
};

// The probability of an id in a list of ids, which may be padded with probabilities of 0.
float prob_among(const float* probs, const int64_t* ids, int64_t count, int64_t id) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] == id && probs[i] > 0) return probs[i];
    return 0.0f;
}

// A row of the target's distribution over the ids that truncation keeps.
struct KeptRow {
    const float* kept;
    const int64_t* ids;
    int64_t count;
    bool is_bad;
    F32x16 at(int64_t i, Mask16 mask) const { return maskz_loadu_ps(mask, kept + i); }
    F32x16 drafted(const float* by_id, int64_t i, Mask16 mask) const { return gather_ps(mask, by_id, ids + i); }
    int64_t id(int64_t column) const { return ids[column]; }
    float of(int64_t id) const { return prob_among(kept, ids, count, id); }
};

// A draft distribution; ids null: over all ids, in order.
struct Draft {
    const float* probs;
    const int64_t* ids;
    int64_t count;
    float of(int64_t id) const {
        if (ids != nullptr) return prob_among(probs, ids, count, id);
        return id < count ? probs[id] : 0.0f;
    }
};

// What the threads that verify one sequence share: the probabilities of its draft tokens, and numbers for each stretch of each
// row's columns. by_id: zeros, and zeros again afterwards; holds a draft distribution by id.
struct Scratch {
    std::vector<double> drafted, sums, masses, weights;
    std::vector<float> most, by_id;
    std::vector<std::vector<float>> kept_probs;
    std::vector<std::vector<int64_t>> kept_ids;
    std::vector<int64_t> num_kept;
    size_t stretches = 0, most_parts = 0;  // of a row, and of a row or a draft distribution
    void reserve(const VerificationBatch& d, int64_t width) {
        stretches = num_stretches(width);
        most_parts = num_stretches(std::max(width, d.columns));
        const size_t rows = d.max_len + 1;
        if (drafted.size() < rows) { drafted.resize(rows); kept_probs.resize(rows); kept_ids.resize(rows); num_kept.resize(rows); }
        if (sums.size() < rows * stretches) { sums.resize(rows * stretches); most.resize(rows * stretches); }
        if (masses.size() < rows * most_parts) masses.resize(rows * most_parts);
        if (weights.size() < stretches) weights.resize(stretches);
        by_id.resize(width);  // exactly, since threads share its ids as they share a row's columns
    }
};

// Calls run(stretch, its first column, its end) for this thread's share of a row's columns.
template <class Run>
void each_stretch(const Team& team, int64_t count, const Run& run) {
    int64_t first, last;
    team.share(num_stretches(count), first, last);
    for (int64_t s = first; s < last; s++) run(s, s * STRETCH, std::min(count, (s + 1) * STRETCH));
}

// Logits of the target, [rows, width].
struct TargetLogits {
    const void* from;
    bool is_float;
    int64_t width;
    Logits row(int64_t r) const { return row_of(from, is_float, width, r); }
};

// The target's distributions under rows first .. first + num_rows - 1 of the logits.
std::vector<DenseRow> dense_rows(const Team& team, const TargetLogits& logits, int64_t first, int64_t num_rows, float temperature, Scratch& scratch) {
    std::vector<DenseRow> rows(num_rows);
    for (int64_t r = 0; r < num_rows; r++) {
        rows[r].logits = logits.row(first + r);
        rows[r].count = logits.width;
        rows[r].factor = inverse_temperature(temperature);
        each_stretch(team, logits.width, [&](int64_t s, int64_t from, int64_t end) {
            F32x16 most = set1_ps(-INFINITY);
            for (int64_t i = from; i < end; i += 16) most = max_ps(rows[r].logits.load(i, lanes(end - i)), most);
            scratch.most[r * scratch.stretches + s] = reduce_max_ps(most);
        });
    }
    team.wait();
    for (int64_t r = 0; r < num_rows; r++) {
        const float* const most = &scratch.most[r * scratch.stretches];
        rows[r].shift = set1_ps(*std::max_element(most, most + scratch.stretches));
        each_stretch(team, logits.width, [&](int64_t s, int64_t from, int64_t end) {
            F32x16 sum = setzero_ps();
            for (int64_t i = from; i < end; i += 16) sum = mask_add_ps(sum, lanes(end - i), sum, rows[r].exponentials(rows[r].logits.load(i, lanes(end - i))));
            scratch.sums[r * scratch.stretches + s] = reduce_add_ps(sum);
        });
    }
    team.wait();
    for (int64_t r = 0; r < num_rows; r++) {
        const double* const sums = &scratch.sums[r * scratch.stretches];
        const double total = std::accumulate(sums, sums + scratch.stretches, 0.0);
        rows[r].is_bad = std::isnan(total);
        rows[r].inverse = set1_ps((float)(1 / total));
    }
    return rows;
}

// The same under truncation. A bad row keeps one id, with probability 0.
std::vector<KeptRow> kept_rows(const Team& team, const TargetLogits& logits, int64_t first, int64_t num_rows, const DrawSpec& spec, Scratch& scratch) {
    for (int64_t r = team.rank; r < num_rows; r += team.size) {
        scratch.num_kept[r] = truncated_softmax(logits.row(first + r), logits.width, spec, scratch.kept_probs[r], scratch.kept_ids[r]);
        if (scratch.num_kept[r] == 0) scratch.kept_probs[r][0] = 0, scratch.kept_ids[r][0] = 0;
    }
    team.wait();
    std::vector<KeptRow> rows;
    for (int64_t r = 0; r < num_rows; r++)
        rows.push_back({scratch.kept_probs[r].data(), scratch.kept_ids[r].data(), std::max<int64_t>(scratch.num_kept[r], 1), scratch.num_kept[r] == 0});
    return rows;
}

// The draft distributions of sequence b. The probabilities of its draft tokens are in scratch after the next wait.
std::vector<Draft> drafts_of(const Team& team, const VerificationBatch& d, int64_t b, Scratch& scratch) {
    static const float one = 1;
    const int64_t at = b * d.max_len;
    std::vector<Draft> drafts(d.lens[b]);
    for (int64_t i = 0; i < d.lens[b]; i++) {
        const int64_t row = d.prob_rows[at + i];
        if (row < 0) drafts[i] = {&one, d.ids + at + i, 1};
        else drafts[i] = {d.probs + row * d.probs_stride, d.kept_ids ? d.kept_ids + row * d.kept_stride : nullptr, d.columns};
        if (i % team.size == team.rank) scratch.drafted[i] = drafts[i].of(d.ids[at + i]);
    }
    return drafts;
}

// A draft distribution by id, which reads as an array what is stored with a list of ids. Each thread of a team has its share of the ids.
class DraftById {
    float* const by_id;
    int64_t first_id, end_id;
    const Draft* held = nullptr;

public:
    DraftById(const Team& team, std::vector<float>& ids) : by_id(ids.data()) {
        team.share(num_stretches(ids.size()), first_id, end_id);  // as each_stretch shares columns
        first_id *= STRETCH, end_id *= STRETCH;
    }
    ~DraftById() { clear(); }
    const float* of(const Draft& q) {
        if (q.ids == nullptr || held == &q) return q.ids ? by_id : q.probs;
        clear();
        for (int64_t i = 0; i < q.count; i++)
            if (is_mine(q.ids[i]) && q.probs[i] > 0) by_id[q.ids[i]] = q.probs[i];
        held = &q;
        return by_id;
    }

private:
    bool is_mine(int64_t id) const { return first_id <= id && id < end_id; }
    void clear() const {
        for (int64_t i = 0; held && i < held->count; i++)
            if (is_mine(held->ids[i])) by_id[held->ids[i]] = 0;
    }
};

// max(scale * p - q, 0) by column. q: by id
template <class Row>
struct Residual {
    const Row& p;
    const float* q;
    F32x16 scale;
    F32x16 at(int64_t i, Mask16 mask) const { return max_ps(sub_ps(mul_ps(scale, p.at(i, mask)), p.drafted(q, i, mask)), setzero_ps()); }
};

// The mass of a residual: `rest` and `count` parts in scratch.
struct Mass {
    int64_t count;
    double rest;
    double with(const double* parts) const { return std::max(rest + std::accumulate(parts, parts + count, 0.0), 0.0); }
};

// For a q over some ids: on the others the residual is scale * p, and p has the mass 1 in all. So only these ids are read.
Mass mass_beside_ids(const Team& team, const DenseRow& p, const Draft& q, double scale, double* parts) {
    const F32x16 by = set1_ps((float)scale), zero = setzero_ps();
    each_stretch(team, q.count, [&](int64_t s, int64_t from, int64_t end) {
        F32x16 excess = zero, covered = zero;
        for (int64_t i = from; i < end; i += 16) {
            const Mask16 mask = lanes(end - i) & at_least(maskz_loadu_ps(lanes(end - i), q.probs + i), set1_ps(FLT_MIN));  // not padding
            const F32x16 wanted = p.of(q.ids + i, mask);
            excess = mask_add_ps(excess, mask, excess, max_ps(sub_ps(mul_ps(by, wanted), maskz_loadu_ps(mask, q.probs + i)), zero));
            covered = mask_add_ps(covered, mask, covered, wanted);
        }
        parts[s] = reduce_add_ps(excess) - scale * reduce_add_ps(covered);
    });
    return {num_stretches(q.count), scale};
}

// The sum of max(scale * p - q, 0) over all ids.
template <class Row>
Mass residual_mass(const Team& team, const Row& p, const Draft& q, double scale, DraftById& by_id, double* parts) {
    if constexpr (std::is_same_v<Row, DenseRow>)
        if (q.ids) return mass_beside_ids(team, p, q, scale, parts);
    const Residual<Row> residual{p, by_id.of(q), set1_ps((float)scale)};
    each_stretch(team, p.count, [&](int64_t s, int64_t from, int64_t end) {
        F32x16 sum = setzero_ps();
        for (int64_t i = from; i < end; i += 16) sum = mask_add_ps(sum, lanes(end - i), sum, residual.at(i, lanes(end - i)));
        parts[s] = reduce_add_ps(sum);
    });
    return {num_stretches(p.count), 0};
}

// Draws a column with probability proportional to its weight, for the first thread of the team. False if all weights are 0. scratch: may
// be written again afterwards.
template <class Weights>
bool draw_column(const Team& team, const Weights& weights, int64_t count, double uniform, Scratch& scratch, int64_t& column) {
    alignas(ALIGN) float some[STRETCH];
    const auto stretch = [&](int64_t s) {
        const int64_t from = s * STRETCH, end = std::min(count, from + STRETCH);
        for (int64_t i = from; i < end; i += 16) store_ps(some + i - from, weights.at(i, lanes(end - i)));
        return (const float*)some;
    };
    each_stretch(team, count, [&](int64_t s, int64_t from, int64_t end) { scratch.weights[s] = stretch_total(stretch(s), end - from); });
    team.wait();
    const auto end = scratch.weights.begin() + num_stretches(count);
    const bool found = std::any_of(scratch.weights.begin(), end, [](double weight) { return weight > 0; });
    if (found && team.rank == 0) column = draw_index(scratch.weights.data(), count, uniform, stretch);
    team.wait();
    return found;
}

// Verifies a draft by rejection sampling (arXiv:2211.17192) or block verification (arXiv:2403.10444), as block.py and rejection.py
// in foredraft/verify do. p: [lens[b] + 1], the target's distributions. q: [lens[b]]; the probabilities of the draft tokens are in
// scratch. stop: [lens[b] + 1], the probability of each number of accepted tokens. outcome: how many are accepted, and the next token.
// The threads of a team share each row's columns; the results do not depend on their number.
template <class Row>
void verify_draft(const Team& team, const VerificationBatch& d, int64_t b, const std::vector<Row>& p, const std::vector<Draft>& q, Scratch& scratch,
                double* stop, int64_t* outcome) {
    const int64_t n = d.lens[b], at = b * d.max_len;
    std::vector<double> scale(n + 1, 1.0), accept(n + 1, 1.0), stops(n + 1, 0.0);
    DraftById by_id(team, scratch.by_id);
    const bool is_block = d.rules[b] == 1;
    double reached = 1;
    for (int64_t i = 0; i < n; i++) {
        const double drafted = scratch.drafted[i], ratio = drafted > 0 ? p[i].of(d.ids[at + i]) / drafted : 0;
        if (is_block) {
            scale[i + 1] = std::min(1.0, scale[i] * ratio);
        } else {
            stops[i] = reached * (1 - std::min(1.0, ratio));
            reached *= std::min(1.0, ratio);
        }
    }
    stops[n] = reached;
    if (is_block) {
        std::vector<Mass> masses(n);
        const auto parts = [&](int64_t i) { return &scratch.masses[i * scratch.most_parts]; };
        for (int64_t i = 1; i < n; i++) masses[i] = residual_mass(team, p[i], q[i], scale[i], by_id, parts(i));
        team.wait();
        for (int64_t i = 1; i < n; i++) {
            const double mass = p[i].is_bad ? 0 : masses[i].with(parts(i)), whole = mass + 1 - scale[i];
            accept[i] = whole > 0 ? mass / whole : 1;
        }
        if (n > 0) accept[n] = scale[n];
        double missed = 1;
        for (int64_t i = n; i >= 0; missed *= 1 - accept[i--]) stops[i] = accept[i] * missed;
    }
    const double total = std::accumulate(stops.begin(), stops.end(), 0.0);
    const double threshold = std::min(d.uniforms[2 * b] * total, std::nextafter(total, 0.0));
    int64_t num_accepted = 0;
    double sum = 0;
    for (int64_t i = 0; i <= n && sum <= threshold; sum += stops[i++])
        if (stops[i] > 0) num_accepted = i;
    const Row& last = p[num_accepted];
    int64_t column = 0;
    const auto draw_from = [&](const auto& weights) { return draw_column(team, weights, last.count, d.uniforms[2 * b + 1], scratch, column); };
    if (num_accepted == n ||
        !draw_from(Residual<Row>{last, by_id.of(q[num_accepted]), set1_ps(is_block ? (float)scale[num_accepted] : 1)}))
        draw_from(last);
    if (team.rank > 0) return;
    std::copy(stops.begin(), stops.end(), stop);
    outcome[0] = num_accepted;
    outcome[1] = last.id(column);
}

// Verifies sequence b by the whole team. bad: [rows of logits]
void verify_sequence(const Team& team, const TargetLogits& logits, const VerificationBatch& d, int64_t b, Scratch& scratch, uint8_t* bad,
                     double* stop, int64_t* outcome) {
    const int64_t num_rows = d.lens[b] + 1, first = d.first_rows[b];
    const std::vector<Draft> q = drafts_of(team, d, b, scratch);
    const auto verify = [&](const Team& by, const auto& p) {
        for (int64_t r = 0; r < num_rows && team.rank == 0; r++) bad[first + r] = p[r].is_bad;
        verify_draft(by, d, b, p, q, scratch, stop, outcome);
    };
    if (!truncates(d.specs[b])) {
        verify(team, dense_rows(team, logits, first, num_rows, d.specs[b].temperature, scratch));
        return;
    }
    const std::vector<KeptRow> p = kept_rows(team, logits, first, num_rows, d.specs[b], scratch);
    if (team.rank == 0) alone([&](const Team& one) { verify(one, p); });  // few numbers, at any ids
    team.wait();
}

}  // namespace
