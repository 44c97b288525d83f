// Penalties, biases and bans, by the same arithmetic as in sampling/sampler.py.

#pragma once

#include <algorithm>
#include <cmath>

#include "structs.h"

namespace {

// A row of logits, by id.
struct AdjustedRow {
    float* logits;
    const AdjustmentBatch& batch;

    // Sets the logit of an id to change(logit), if the row has that id.
    template <class Change>
    void change(int64_t id, const Change& change) const {
        if (id < 0 || id >= batch.num_ids) return;
        const int64_t column = batch.columns ? batch.columns[id] : id;
        if (column >= 0) logits[column] = change(logits[column]);
    }
};

// count: of a token in the output; 0 for one that is only in the prompt
float penalised(const Adjustments& a, float logit, int64_t count) {
    logit = logit > 0 ? logit / a.repetition : logit * a.repetition;
    logit = logit - a.frequency * (float)count;
    return logit - a.presence * (float)std::min<int64_t>(count, 1);
}

// Penalises the tokens of the prompt and of the output, which ends with the generated tokens.
void penalise(const AdjustedRow& row, const Adjustments& a, const int64_t* generated, int64_t num_generated) {
    const auto number_of = [&](int64_t id, int64_t before) { return std::count(generated, generated + before, id); };
    for (int64_t i = 0; i < a.num_ids; i++) {
        const int64_t count = a.counts[i] + number_of(a.ids[i], num_generated);
        if (count > 0 || i < a.num_prompt_ids) row.change(a.ids[i], [&](float x) { return penalised(a, x, count); });
    }
    for (int64_t i = 0; i < num_generated; i++) {
        const int64_t id = generated[i];
        if (number_of(id, i) > 0 || std::find(a.ids, a.ids + a.num_ids, id) != a.ids + a.num_ids) continue;  // is penalised already
        row.change(id, [&](float x) { return penalised(a, x, number_of(id, num_generated)); });
    }
}

// Changes the row that follows these generated tokens. logits: the row
void adjust(float* logits, const AdjustmentBatch& batch, int64_t sequence, const int64_t* generated, int64_t num_generated) {
    const Adjustments& a = batch.each[sequence];
    const AdjustedRow row = {logits, batch};
    if (a.repetition != 1 || a.frequency != 0 || a.presence != 0) penalise(row, a, generated, num_generated);
    for (int64_t i = 0; i < a.num_biased; i++) row.change(a.biased[i], [&](float x) { return x + a.biases[i]; });
    for (int64_t i = 0; i < a.num_banned; i++)
        if (num_generated < a.banned_tokens[i]) row.change(a.banned[i], [](float) { return -INFINITY; });
}

}  // namespace
