// Score functions on tiles of scores: what the kernel passes on to them.
#pragma once

#include "operands.h"

namespace {

// A score function on one tile; none if the call has none.
struct Scored {
    const Call& call;
    ScoreTile tile;

    Scored(const Call& c, int64_t b, int64_t h, int64_t line, int64_t j, const Outline& outline,
           int count)
        : call(c), tile{} {
        if (!c.score) return;
        tile.given = c.score_given, tile.whole = c.score_whole, tile.real = c.score_real;
        tile.batch = b, tile.head = h;
        tile.q_at = c.q_at + line * TILE, tile.kv_at = c.kv_at + j * TILE;
        tile.consecutive = c.q_consecutive[line] && c.kv_consecutive[j];
        tile.sums_at = c.lookup_sums_at;
        tile.first = outline.first, tile.last = outline.last, tile.rows = count;
    }

    void change(float* scores) const {
        if (call.score) call.score(&tile, scores);
    }

    // The same, after the scores are kept in `given`.
    void change(float* scores, float* given) const {
        if (!call.score) return;
        std::memcpy(given, scores, tile.rows * TILE * sizeof(float));
        call.score(&tile, scores);
    }

    // Adds gradients of what the score function reads to sums of the task's own.
    void add_lookups(const float* given, const float* gradients, double* sums) const {
        if (call.sum_lookups) call.sum_lookups(&tile, given, gradients, sums);
    }

    // Gradients of changed scores to those of scores as they were given. A forbidden pair's stays 0:
    // the derivative there may not be finite.
    void pull_back(const float* given, float* gradients, const Tile& at) const {
        if (!call.score) return;
        call.pull_back(&tile, given, gradients);
        for (int r = 0; at.bits && r < tile.rows; r++)
            for (int j = tile.first[r / MR]; j < tile.last[r / MR]; j += WIDTH) {
                float* x = gradients + r * TILE + j;
                store(x, at.allowed(r, j) ? load(x) : Vec{});
            }
    }
};

}  // namespace
