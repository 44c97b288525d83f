// The memory layout of a matrix with groups of inputs.

#pragma once

#include <algorithm>

#include "base.h"
#include "structs.h"
#include "vector_math.h"

namespace {

bool has_groups(const Matrix& m) { return m.kind >= INT4_GROUPS; }

// Adjacent inputs of one output in a matrix with groups.
int64_t unit_of(const Matrix& m) { return m.kind == INT8_GROUPS ? INT8_UNIT : UNIT; }

int64_t inputs_of_line(const Matrix& m) { return m.kind == INT8_GROUPS ? INT8_UNIT : 2 * UNIT; }

// The packed code that represents 0.
int32_t zero_code(const Matrix& m) { return m.kind != INT4_GROUPS ? EIGHT_BIT_ZERO : m.has_offsets ? 0 : 8; }

constexpr int64_t OVERHANG = 8;  // numbers written past the end of the last group: it is a multiple of eight, and sixteen are written at a time

Groups groups_of(const Matrix& m) {
    const int64_t steps = round_up(m.group, inputs_of_line(m)) / inputs_of_line(m);
    const int64_t number = m.kind == INT8_GROUPS ? sizeof(GroupWhole8) : sizeof(GroupWhole4);
    return {m.k / m.group, steps, m.scale_bytes, m.has_offsets != 0, m.levels, round_up((m.k + OVERHANG) * number, ALIGN)};
}

// Bytes of a block, a group of inputs of adjacent outputs: scales, offsets, lines.
int64_t block_bytes(const Matrix& m) {
    return BESIDE * (m.scale_bytes * (m.has_offsets ? 2 : 1) + unit_of(m) * groups_of(m).steps);
}

}  // namespace
