// Which experts of a mixture run for which rows of a pass (arXiv:1701.06538).
//
// A choice is one of a row's experts: choice c of row r has number r * experts_per_token + c. Rows that share an expert are
// adjacent: a slot is the place of a choice when choices are sorted by expert.

#pragma once

#include <cmath>

#include "structs.h"

namespace {

struct Routing {
    int32_t* experts;           // [choices]
    float* weights;             // [choices]
    int32_t *choices, *slots;   // [slots] the choice in a slot, [choices] the slot of a choice; of this thread
    int32_t* first_slots;       // [experts + 1]; of this thread
};

// Chooses a row's likeliest experts. Weights: softmax over the router's logits of all experts, or of the chosen ones; NaN if a logit is.
void choose_experts(const Stack& s, const float* logits, int32_t* experts, float* weights) {
    const int64_t count = s.experts_per_token;
    for (int64_t c = 0; c < count; c++) {
        int64_t best = -1;
        for (int64_t e = 0; e < s.num_experts; e++) {
            bool is_taken = false;
            for (int64_t d = 0; d < c; d++) is_taken |= experts[d] == e;
            if (!is_taken && (best < 0 || logits[e] > logits[best])) best = e;
        }
        experts[c] = (int32_t)best;
    }
    float total = 0;
    if (s.normalizes_experts)
        for (int64_t c = 0; c < count; c++) total += expf(logits[experts[c]] - logits[experts[0]]);
    else
        for (int64_t e = 0; e < s.num_experts; e++) total += expf(logits[e] - logits[experts[0]]);
    for (int64_t e = 0; e < s.num_experts; e++)
        if (std::isnan(logits[e])) total = NAN;
    for (int64_t c = 0; c < count; c++) weights[c] = expf(logits[experts[c]] - logits[experts[0]]) / total;
}

// Sorts choices into slots by expert, and for each expert by row. -> how many experts have any
int64_t sort_by_expert(const Stack& s, int64_t num_choices, const Routing& routing) {
    int64_t num_read = 0;
    for (int64_t e = 0; e <= s.num_experts; e++) routing.first_slots[e] = 0;
    for (int64_t i = 0; i < num_choices; i++) routing.first_slots[routing.experts[i] + 1]++;
    for (int64_t e = 0; e < s.num_experts; e++) {
        num_read += routing.first_slots[e + 1] > 0;
        routing.first_slots[e + 1] += routing.first_slots[e];
    }
    for (int64_t i = 0; i < num_choices; i++) routing.slots[i] = routing.first_slots[routing.experts[i]]++;
    for (int64_t e = s.num_experts; e > 0; e--) routing.first_slots[e] = routing.first_slots[e - 1];
    routing.first_slots[0] = 0;
    for (int64_t i = 0; i < num_choices; i++) routing.choices[routing.slots[i]] = (int32_t)i;
    return num_read;
}

}  // namespace
