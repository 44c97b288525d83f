// What the inner loops of every instruction set share.

#pragma once

#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace {

constexpr int GROUP = 64;  // outputs of a packed group
constexpr int ALIGN = 64;

int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

using Mask16 = uint16_t;   // a bit for each of sixteen numbers
using Mask8 = uint8_t;

Mask16 lanes(int64_t left) { return left >= 16 ? 0xffff : (Mask16)((1u << left) - 1); }

// Which weights to fetch while a tile is computed: four lines in every so many steps.
struct Prefetch {
    const char* at;
    int64_t every, left;
    void step() {
        if (--left > 0) return;
        for (int line = 0; line < 4; line++) _mm_prefetch(at + line * 64, _MM_HINT_T1);
        at += 4 * 64;
        left = every;
    }
};

}  // namespace
