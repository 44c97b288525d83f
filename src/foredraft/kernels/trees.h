// Trees of tokens that grow after the spans of a batch, level by level.

#pragma once

#include "sampling.h"
#include "stack.h"

namespace {

// shape: the parent of each node, an earlier node or -1; the first child of a node is the best token. tokens: -1 for nodes that have
// not grown. end: the first position after the span.
struct Tree {
    int64_t size;
    const int64_t* shape;
    int64_t* tokens;
    int64_t end;
    std::vector<std::vector<int32_t>> paths;  // of each node that was read: the slots from `end` to its own
    int64_t num_read = 0;

    int64_t num_children(int64_t node) const { return std::count(shape, shape + size, node); }

    // The tokens from the root's child to this node.
    std::vector<int64_t> tokens_to(int64_t node) const {
        std::vector<int64_t> found;
        for (; node >= 0; node = shape[node]) found.push_back(tokens[node]);
        std::reverse(found.begin(), found.end());
        return found;
    }

    // Gives the children of a node these tokens, best first. If there are fewer tokens, the remaining children do not grow.
    void grow(int64_t node, const std::vector<int64_t>& found) {
        size_t rank = 0;
        for (int64_t child = node + 1; child < size; child++)
            if (shape[child] == node && rank < found.size()) tokens[child] = found[rank++];
    }

    // Called before a node is read: gives it the next slot.
    const std::vector<int32_t>& read(int64_t node) {
        if (shape[node] >= 0) paths[node] = paths[shape[node]];
        paths[node].push_back((int32_t)(end + num_read++));
        return paths[node];
    }
};

// The states that the rows of a pass give to the rows after them.
struct KeptStates {
    std::vector<uint16_t> numbers;
    std::vector<uint16_t*> rows;

    // Has the pass of b keep them here.
    void keep(const Stack& s, Batch& b) {
        numbers.resize(b.num_rows * s.hidden);
        rows.resize(b.num_rows);
        for (int64_t r = 0; r < b.num_rows; r++) rows[r] = numbers.data() + r * s.hidden;
        b.taps = &s.state_tap;
        b.num_taps = 1;
        b.features = rows.data();
    }
};

// A node whose children grow from a row of logits; node -1: the root. parent_row: the row of its parent in the last pass.
struct GrowingNode {
    int64_t tree, node, parent_row;
};

// The rows of one level, as a batch. first: the original batch, whose spans these rows continue.
struct Level {
    std::vector<int32_t> ids, positions, slots, paths, wanted;
    std::vector<Span> spans;
    std::vector<uint16_t*> stores;
    std::vector<const uint16_t*> sources;
    std::vector<uint16_t> states;

    Level() = default;

    // kept: of the last pass; null if rows have no states
    Level(const Stack& s, const Batch& first, std::vector<Tree>& trees, const std::vector<GrowingNode>& nodes, int64_t depth,
          const KeptStates* kept) {
        paths.assign(nodes.size() * depth, 0);
        for (size_t row = 0; row < nodes.size(); row++) {
            const auto [place, node, parent_row] = nodes[row];
            Tree& tree = trees[place];
            if (row == 0 || nodes[row - 1].tree != place) begin_span(s, first, place, (int64_t)row, tree.end);
            spans.back().num_rows++;
            const std::vector<int32_t>& path = tree.read(node);
            std::copy(path.begin(), path.end(), paths.begin() + row * depth);
            ids.push_back((int32_t)tree.tokens[node]);
            positions.push_back((int32_t)(tree.end + depth - 1));
            slots.push_back(path.back());
            wanted.push_back((int32_t)row);
            if (kept) states.insert(states.end(), kept->rows[parent_row], kept->rows[parent_row] + s.hidden);
        }
    }

    void begin_span(const Stack& s, const Batch& first, int64_t place, int64_t row, int64_t end) {
        const Span& before = first.spans[place];
        const int64_t num_stores = s.num_layers * 2;
        spans.push_back({row, 0, end, before.capacity, 1, before.source_len, before.source_capacity});
        stores.insert(stores.end(), first.stores + place * num_stores, first.stores + (place + 1) * num_stores);
        if (first.sources) sources.insert(sources.end(), first.sources + place * num_stores, first.sources + (place + 1) * num_stores);
    }

    Batch batch(const Batch& first, int64_t depth) const {
        const int64_t count = (int64_t)ids.size();
        Batch b = first;
        b.ids = ids.data();
        b.positions = positions.data();
        b.slots = slots.data();
        b.paths = paths.data();
        b.wanted = wanted.data();
        b.states = states.empty() ? nullptr : states.data();
        b.read_features = nullptr;
        b.spans = spans.data();
        b.stores = stores.data();
        b.sources = sources.empty() ? nullptr : sources.data();
        b.num_rows = b.num_wanted = count;
        b.num_spans = (int64_t)spans.size();
        b.path_stride = depth;
        return b;
    }
};

// The nodes of the next level that have grown and have children. rows: the row of each of `nodes` in the last pass.
std::vector<GrowingNode> next_level(const std::vector<Tree>& trees, const std::vector<GrowingNode>& nodes, const int32_t* rows) {
    std::vector<GrowingNode> next;
    for (size_t i = 0; i < nodes.size(); i++) {
        const Tree& tree = trees[nodes[i].tree];
        for (int64_t child = nodes[i].node + 1; child < tree.size; child++)
            if (tree.shape[child] == nodes[i].node && tree.tokens[child] >= 0 && tree.num_children(child) > 0)
                next.push_back({nodes[i].tree, child, rows[i]});
    }
    return next;
}

}  // namespace
