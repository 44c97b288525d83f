// How a matrix with groups of inputs lies in memory.

#pragma once

#include <algorithm>

#include "base.h"
#include "structs.h"
#include "vector_math.h"

namespace {

bool has_groups(const Matrix& m) { return m.kind >= INT4_GROUPS; }

// Inputs of one output that lie side by side in a matrix with groups.
int64_t unit_of(const Matrix& m) { return m.kind == INT8_GROUPS ? INT8_UNIT : UNIT; }

int64_t inputs_of_line(const Matrix& m) { return m.kind == INT8_GROUPS ? INT8_UNIT : 2 * UNIT; }

// What stands for 0 among packed codes.
int32_t zero_code(const Matrix& m) { return m.kind != INT4_GROUPS ? EIGHT_BIT_ZERO : m.has_offsets ? 0 : 8; }

constexpr int64_t OVERHANG = 8;  // numbers that are written behind a last group of a multiple of eight, sixteen at a time

Groups groups_of(const Matrix& m) {
    const int64_t steps = round_up(m.group, inputs_of_line(m)) / inputs_of_line(m);
    const int64_t number = m.kind == INT8_GROUPS ? sizeof(GroupWhole8) : sizeof(GroupWhole4);
    return {m.k / m.group, steps, m.scale_bytes, m.has_offsets != 0, m.levels, round_up((m.k + OVERHANG) * number, ALIGN)};
}

// Bytes of a group of inputs of the outputs that lie together: scales, offsets, lines.
int64_t block_bytes(const Matrix& m) {
    return BESIDE * (m.scale_bytes * (m.has_offsets ? 2 : 1) + unit_of(m) * groups_of(m).steps);
}

}  // namespace
