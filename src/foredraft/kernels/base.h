// What the inner loops of every instruction set share.

#pragma once

#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace {

constexpr int GROUP = 64;  // outputs of a packed group
constexpr int ALIGN = 64;
constexpr int UNIT = 4;    // inputs of one output that lie side by side in a matrix whose scales are of groups of inputs

int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

using Mask16 = uint16_t;   // a bit for each of sixteen numbers
using Mask8 = uint8_t;

Mask16 lanes(int64_t left) { return left >= 16 ? 0xffff : (Mask16)((1u << left) - 1); }

// Which weights to fetch while a tile is computed: four lines in every so many steps.
struct Prefetch {
    const char* at;
    int64_t every, left;
    int64_t unfetched = 0;  // bytes read since the last step, where reading does not go by four lines
    void step() {
        if (--left > 0) return;
        for (int line = 0; line < 4; line++) _mm_prefetch(at + line * 64, _MM_HINT_T1);
        at += 4 * 64;
        left = every;
    }
    void has_read(int64_t bytes) {  // at most four lines
        unfetched += bytes;
        if (unfetched < 4 * 64) return;
        unfetched -= 4 * 64;
        step();
    }
};

// How the inputs of a matrix are grouped under scales.
struct Groups {
    int64_t count, steps;        // groups of inputs; lines of each, of 4 inputs (eight bits) or 8 (four bits)
    int64_t scale_bytes;         // 2: float16, 4: float32
    bool has_offsets;
    const int8_t* levels;        // [16] or null
    int64_t sums_at;             // bytes from a row's whole numbers to the sums of its groups, int32 each; then scales, float each
};

}  // namespace
