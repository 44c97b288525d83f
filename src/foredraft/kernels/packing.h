// The memory order of a matrix: written once when it is packed, and read row by row if it is an embedding.

#pragma once

#include "products.h"

namespace {

// Packs 64 outputs, or the last few, of a matrix without groups of inputs. from: [count, k]
void pack_whole(const Matrix& m, const char* from, int64_t count, char* to, int32_t* corrections) {
    const int64_t size = m.kind == INT8 ? 1 : 2, unit = m.kind == INT8 ? INT8_UNIT : 2, steps = round_up(m.k, unit) / unit;
    for (int64_t j = 0; j < count; j++) {
        const char* row = from + j * m.k * size;
        for (int64_t i = 0; i < m.k; i += unit)
            memcpy(to + packed_place(j, i / unit, steps) * unit * size, row + i * size, (m.k - i < unit ? m.k - i : unit) * size);
        if (m.kind != INT8) continue;
        int32_t sum = 0;
        for (int64_t i = 0; i < m.k; i++) sum += ((const int8_t*)row)[i];
        corrections[j] = OFFSET * sum;
    }
}

// Where the block of output j of 64 and of a group of inputs begins: scales, offsets, lines.
int64_t block_at(const Matrix& m, int64_t j, int64_t group) { return (j / BESIDE * groups_of(m).count + group) * block_bytes(m); }

int64_t lines_at(const Matrix& m) { return BESIDE * m.scale_bytes * (m.has_offsets ? 2 : 1); }

// The place of input i of output j among the lines of a block.
int64_t byte_at(const Matrix& m, int64_t j, int64_t i) {
    return (i / inputs_of_line(m) * BESIDE + j % BESIDE) * unit_of(m) + i % unit_of(m);
}

struct LevelCodes {
    int16_t of[256];
    explicit LevelCodes(const int8_t* levels) {
        for (int i = 0; i < 256; i++) of[i] = -1;
        for (int i = 15; i >= 0; i--) of[(uint8_t)levels[i]] = (int16_t)i;
    }
};

// The codes of eight numbers, in the lower half of each byte. The upper half is not zero if the number has no code.
uint64_t plain_codes(uint64_t numbers) {
    constexpr uint64_t SIGNS = 0x8080808080808080u;
    return ((numbers & ~SIGNS) + 0x0808080808080808u) ^ (numbers & SIGNS);
}

uint64_t level_codes(const LevelCodes& levels, uint64_t numbers) {
    uint64_t codes = 0;
    for (int i = 0; i < 64; i += 8) codes |= (uint64_t)(uint8_t)levels.of[numbers >> i & 255] << i;
    return codes;
}

int64_t num_without_code(uint64_t codes) {
    const uint64_t outside = codes >> 4, any = outside | outside >> 1 | outside >> 2 | outside >> 3;
    return __builtin_popcountll(any & 0x0101010101010101u);
}

// Eight numbers -> four bytes. bad: how many of the numbers have no code is added to it
uint32_t nibbles_of(const LevelCodes* levels, const int8_t* from, int64_t& bad) {
    uint64_t numbers;
    memcpy(&numbers, from, sizeof numbers);
    const uint64_t codes = levels ? level_codes(*levels, numbers) : plain_codes(numbers), low = codes & 0x0f0f0f0f0f0f0f0fu;
    bad += num_without_code(codes);
    return (uint32_t)(low | low >> 28);
}

uint32_t bytes_of(const int8_t* from) {
    uint32_t numbers = 0;
    memcpy(&numbers, from, INT8_UNIT);
    return numbers ^ 0x01010101u * EIGHT_BIT_ZERO;
}

// Calls pack(inputs, place) for every N inputs of a group; to: the first place; step: bytes between them. If the last inputs are fewer,
// numbers with code 0 follow them.
template <int N, class Pack>
void for_inputs(const int8_t* from, int64_t count, int8_t with_code_0, char* to, int64_t step, const Pack& pack) {
    int64_t i = 0;
    for (; i + N <= count; i += N, to += step) pack(from + i, to);
    if (i == count) return;
    int8_t last[N];
    memset(last, with_code_0, N);
    memcpy(last, from + i, count - i);
    pack(last, to);
}

// -> how many codes the kind cannot represent
int64_t pack_codes(const Matrix& m, const LevelCodes* levels, const int8_t* from, int64_t j, char* lines) {
    char* to = lines + byte_at(m, j, 0);
    const int64_t step = BESIDE * unit_of(m);
    int64_t bad = 0;
    if (m.kind == INT8_GROUPS) {
        for_inputs<INT8_UNIT>(from, m.group, (int8_t)EIGHT_BIT_ZERO, to, step, [](const int8_t* inputs, char* place) {
            const uint32_t packed = bytes_of(inputs);
            memcpy(place, &packed, INT8_UNIT);
        });
    } else {
        for_inputs<2 * UNIT>(from, m.group, levels ? m.levels[0] : -8, to, step, [&](const int8_t* inputs, char* place) {
            const uint32_t packed = nibbles_of(levels, inputs, bad);
            memcpy(place, &packed, UNIT);
        });
    }
    return bad;
}

// Packs 64 outputs, or the last few. codes: [count, k]. scales, offsets: [count, k / group]. -> how many codes the kind cannot represent
int64_t pack_groups(const Matrix& m, const int8_t* codes, const char* scales, const char* offsets, int64_t count, char* to) {
    const int64_t num_groups = m.k / m.group, size = m.scale_bytes;
    const LevelCodes levels(m.levels ? m.levels : (const int8_t*)"0123456789abcdef");
    int64_t bad = 0;
    for (int64_t j = 0; j < count; j++)
        for (int64_t g = 0; g < num_groups; g++) {
            char* block = to + block_at(m, j, g);
            memcpy(block + j % BESIDE * size, scales + (j * num_groups + g) * size, size);
            if (m.has_offsets) memcpy(block + (BESIDE + j % BESIDE) * size, offsets + (j * num_groups + g) * size, size);
            bad += pack_codes(m, m.kind == LEVEL_GROUPS ? &levels : nullptr, codes + j * m.k + g * m.group, j, block + lines_at(m));
        }
    return bad;
}

// -------------------------------------------------------------------------------------------------------- reading rows

float number_at(const char* from, int64_t scale_bytes) {
    if (scale_bytes == 2) {
        uint16_t half;
        memcpy(&half, from, 2);
        return _cvtsh_ss(half);
    }
    float number;
    memcpy(&number, from, 4);
    return number;
}

int code_at(const Matrix& m, const char* lines, int64_t j, int64_t i) {
    const uint8_t byte = (uint8_t)lines[byte_at(m, j, i)];
    if (m.kind == INT8_GROUPS) return (int8_t)(byte ^ EIGHT_BIT_ZERO);
    const int code = i / UNIT % 2 ? byte >> 4 : byte & 15;
    return m.kind == LEVEL_GROUPS ? m.levels[code] : m.has_offsets ? code : code - 8;
}

void unpack_groups(const Matrix& m, int64_t row, float* to) {
    const int64_t j = row % GROUP;
    const char* weights = (const char*)m.weights + row / GROUP * group_bytes(m);
    for (int64_t g = 0; g < m.k / m.group; g++) {
        const char* block = weights + block_at(m, j, g);
        const float scale = number_at(block + j % BESIDE * m.scale_bytes, m.scale_bytes);
        const float offset = m.has_offsets ? number_at(block + (BESIDE + j % BESIDE) * m.scale_bytes, m.scale_bytes) : 0.0f;
        for (int64_t i = 0; i < m.group; i++) to[g * m.group + i] = (float)code_at(m, block + lines_at(m), j, i) * scale + offset;
    }
}

// to: [k]
void unpack_row(const Matrix& m, int64_t row, float* to) {
    if (has_groups(m)) return unpack_groups(m, row, to);
    const int64_t unit = m.kind == INT8 ? INT8_UNIT : 2, steps = round_up(m.k, unit) / unit;
    const char* weights = (const char*)m.weights + row / GROUP * group_bytes(m);
    for (int64_t i = 0; i < m.k; i++) {
        const int64_t place = packed_place(row % GROUP, i / unit, steps) * unit + i % unit;
        if (m.kind == INT8) {
            to[i] = (float)((const int8_t*)weights)[place] * m.scales[row];
            continue;
        }
        const uint32_t bits = (uint32_t)((const uint16_t*)weights)[place] << 16;
        memcpy(to + i, &bits, 4);
    }
}

}  // namespace
