// What a score function gets of a tile: the kernel that calls it and generated code share this.
#pragma once

#include <cstdint>

extern "C" {

struct ScoreTile {
    const int64_t* given;  // by the emitter's numbers: addresses, sizes and strides of tensors
    const int64_t* whole;  // numbers that the function was written with
    const float* real;
    int64_t batch, head;  // of the call
    const int32_t *q_at, *kv_at;  // [TILE] global positions
    int64_t consecutive;  // whether both count up by 1
    const int *first, *last;  // by groups of MR rows: the columns that are needed
    int64_t rows;
    const int64_t* sums_at;  // where the sums of each lookup begin
};

// Changes scores [TILE][TILE] in place.
typedef void (*ScoreFunction)(const ScoreTile*, float* scores);
// Changes gradients of what that made of some scores to gradients of these, in place.
typedef void (*ScorePullBack)(const ScoreTile*, const float* scores, float* gradients);
// Adds gradients of what was read from tensors, from those of changed scores, to sums by element.
typedef void (*ScoreSums)(const ScoreTile*, const float* scores, const float* gradients,
                          double* sums);

}  // extern "C"
