// Shared by the inner loops of all instruction sets.

#pragma once

#include <cstdint>
#include <cstring>
#include <immintrin.h>

// For functions that take or return sixteen numbers: where these fill two registers, a real call would pass them through memory.
#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int GROUP = 64;  // outputs of a packed group
constexpr int ALIGN = 64;
constexpr int64_t PAGE = 4096;  // bytes
constexpr int UNIT = 4;    // adjacent inputs of one output in a matrix of four bits

constexpr int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

// Divides a piece of memory.
struct Arena {
    char* at;
    template <class T>
    T* take(int64_t count) {
        T* start = (T*)at;
        at += round_up(count * (int64_t)sizeof(T), ALIGN);
        return start;
    }
};

using Mask16 = uint16_t;   // a bit for each of sixteen numbers
using Mask8 = uint8_t;

Mask16 lanes(int64_t left) { return left >= 16 ? 0xffff : (Mask16)((1u << left) - 1); }

// Which weights to fetch while a tile is computed.
struct Prefetch {
    const char* at;
    int64_t bytes_per_line;      // to fetch for each line of weights that is read
    bool is_sparse;              // whether products without groups fetch only one line in four (see SPARSE)
    void has_read(int64_t bytes) {  // fetches one line. Without a branch, which would cost more than a fetch
        _mm_prefetch(at, _MM_HINT_T1);
        at += bytes * bytes_per_line >> 6;
    }
    void will_read(int64_t bytes) {
        for (const char* last = at + (bytes * bytes_per_line >> 6); at < last; at += ALIGN) _mm_prefetch(at, _MM_HINT_T1);
    }
};

// The groups of inputs that share a scale.
struct Groups {
    int64_t count, steps;        // the number of groups; lines of each, with 4 inputs (eight bits) or 8 (four bits)
    int64_t scale_bytes;         // 2: float16, 4: float32
    bool has_offsets;
    const int8_t* levels;        // [16] or null
    int64_t constants_at;        // bytes from the start of a row to the constants after its integers (see quantise_groups)
};

}  // namespace
