// The tiles of AMX: registers of up to sixteen rows of 64 bytes.

#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "avx512.h"

namespace {

constexpr int TILE_ROWS = 16, TILE_BYTES = 64;

// Whether the system lets this process use the tiles' registers. Asked once; threads that come later have them too.
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
    // To GCC's _tile_loadconfig a shape ends after 8 bytes: it may leave out what is stored behind them.
    void load() const { asm volatile("ldtilecfg %0" ::"m"(*this)); }
};

// Between stores and the loads of tiles from there: GCC does not know that these read memory.
void finish_stores() { asm volatile("" ::: "memory"); }

}  // namespace
