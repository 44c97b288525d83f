// AMX tiles: registers of up to sixteen rows of 64 bytes.

#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "avx512.h"

namespace {

constexpr int TILE_ROWS = 16, TILE_BYTES = 64;

// Requests the tile registers for this process -> whether the system allows it. Called once; later threads inherit the permission.
bool may_use_tiles() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

struct alignas(ALIGN) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
    void set(int tile, int64_t num_rows, int64_t num_bytes = TILE_BYTES) {
        bytes[tile] = (uint16_t)num_bytes, rows[tile] = (uint8_t)num_rows;
    }
    // Not by GCC's _tile_loadconfig, which claims to read 8 bytes only: stores to the rest could be optimised away.
    void load() const { asm volatile("ldtilecfg %0" ::"m"(*this)); }
};

// Needed between stores and tile loads of the same memory: GCC does not know that tile loads read memory.
void finish_stores() { asm volatile("" ::: "memory"); }

// Tiles treat denormal bfloat16 numbers as 0, so the loops for few rows must too.
class WithoutDenormals {
    const unsigned control_ = _mm_getcsr();

public:
    explicit WithoutDenormals(bool applies = true) {
        if (applies) _mm_setcsr(control_ | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
    }
    ~WithoutDenormals() { _mm_setcsr(control_); }
};

}  // namespace
