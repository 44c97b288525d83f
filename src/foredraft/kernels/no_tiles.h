// Stand-ins for instruction sets without tiles (see amx.h).

#pragma once

#include "base.h"
#include "structs.h"

namespace {

constexpr int MOST_TILED_ROWS = 0;
constexpr int64_t TILED_QUERIES = 1;

bool may_use_tiles() { return true; }

bool uses_tiles(const Matrix&, int64_t) { return false; }

int64_t most_tiled_rows(const Matrix&) { return 0; }

class Tiles {
public:
    explicit Tiles(const Matrix&) {}
    void multiply(const Matrix&, const char*, const char*, int64_t, const Prefetch&, float (*)[GROUP], int, int64_t, int64_t) {}
};

struct QueryBlock;

bool attends_by_tiles(const AttentionCall&) { return false; }

void attend_by_tiles(const AttentionCall&, const QueryBlock&) {}

}  // namespace
