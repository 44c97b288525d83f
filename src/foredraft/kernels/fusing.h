// What a head computes from the target's features before its own layers (arXiv:2503.01840).

#pragma once

#include "norms.h"

namespace {

// The left side of the product that makes states of features: row r is `from`, its equal parts normed.
void prepare_features(const Stack& s, const uint16_t* from, const Rows& rows, int64_t r) {
    if (s.features_norm == nullptr) return prepare_row(s.features_fc, rows, r, ReadBf16{from});
    const int64_t width = s.features_width / s.features_parts;
    thread_local std::vector<float> row;
    row.resize(s.features_width);
    for (int64_t at = 0; at < s.features_width; at += width) {
        float* part = row.data() + at;
        for (int64_t i = 0; i < width; i += 16) mask_storeu_ps(part + i, lanes(width - i), load_bf16(from + at + i, lanes(width - i)));
        const ReadNormed read = normed(part, s.features_norm + at, width, s.epsilon);
        for (int64_t i = 0; i < width; i += 16) mask_storeu_ps(part + i, lanes(width - i), read(i, lanes(width - i)));
    }
    prepare_row(s.features_fc, rows, r, ReadFloat{row.data()});
}

// The states of rows. features: [num_rows] addresses of features_width numbers each; states: [num_rows, hidden]; rows: room for the
// left side of the product
void fuse_features(const Stack& s, const uint16_t* const* features, int64_t num_rows, uint16_t* states, const Rows& rows, const Team& team) {
    int64_t first, last;
    team.share(num_rows, first, last);
    for (int64_t r = first; r < last; r++) {
        if (s.features_fc.n > 0) prepare_features(s, features[r], rows, r);
        else std::copy_n(features[r], s.hidden, states + r * s.hidden);
    }
    team.wait();
    if (s.features_fc.n == 0) return;
    product(s.features_fc, rows, num_rows, team, StoreBf16{states, s.hidden});
    team.wait();
}

}  // namespace
