// Vectors as wide as the processor's, the exponential, and the product that all else is made of.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace {

// FLEXCP_WIDTH asks for another width than the processor's: compilers emulate wider vectors.
#if defined(FLEXCP_WIDTH)
constexpr int WIDTH = FLEXCP_WIDTH, MR = WIDTH == 16 ? 12 : 6;
#elif defined(__AVX512F__)
constexpr int WIDTH = 16, MR = 12;  // 24 sums, in 32 registers
#elif defined(__AVX__)
constexpr int WIDTH = 8, MR = 6;  // 12 sums, in 16 registers
#else
constexpr int WIDTH = 4, MR = 6;
#endif
constexpr int NR = 2 * WIDTH;

typedef float Vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t IntVec __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t WrappingVec __attribute__((vector_size(4 * WIDTH)));

inline Vec splat(float x) { return x - Vec{}; }
inline IntVec splat(int32_t x) { return x - IntVec{}; }
inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<Vec*>(p) = x; }
inline Vec load_anywhere(const float* p) {
    Vec found;
    std::memcpy(&found, p, sizeof found);
    return found;
}
inline void store_anywhere(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }

// Each bit of a word, as a vector takes those of its columns.
struct Bits {
    int32_t each[32];

    constexpr Bits() : each() {
        for (int i = 0; i < 32; i++) each[i] = static_cast<int32_t>(1u << i);
    }
};
constexpr Bits BITS;
static_assert(32 % WIDTH == 0);

typedef float Four __attribute__((vector_size(16)));
#if defined(__clang__)
#define FLEXCP_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t FourPlaces __attribute__((vector_size(16)));
#define FLEXCP_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, FourPlaces{__VA_ARGS__})
#endif

// All numbers of a vector as one, in a fixed order.
inline float total(Vec x) {
    Four parts[WIDTH / 4];
    std::memcpy(parts, &x, sizeof x);
#pragma GCC unroll 4
    for (int i = 1; i < WIDTH / 4; i++) parts[0] += parts[i];
    const Four two = parts[0] + FLEXCP_SHUFFLE(parts[0], parts[0], 2, 3, 0, 1);
    return (two + FLEXCP_SHUFFLE(two, two, 1, 0, 3, 2))[0];
}

// The numbers of two vectors in turn: of their first halves, or of their second ones.
template <int HALF>
inline Vec in_turn(Vec a, Vec b) {
#if defined(__clang__)
    Vec found;
    for (int i = 0; i < WIDTH; i++) found[i] = (i % 2 ? b : a)[i / 2 + HALF * WIDTH / 2];
    return found;
#else
    IntVec places;
    for (int i = 0; i < WIDTH; i++) places[i] = i / 2 + HALF * WIDTH / 2 + i % 2 * WIDTH;
    return __builtin_shuffle(a, b, places);
#endif
}

// Each of WIDTH vectors, which are overwritten, as one number, in a fixed order. One by one takes
// three times as long.
template <typename Join>
inline Vec joined(Vec* x, Join join) {
#pragma GCC unroll 4
    for (int n = WIDTH / 2; n > 0; n /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < n; i++)
            x[i] = join(in_turn<0>(x[i], x[i + n]), in_turn<1>(x[i], x[i + n]));
    return x[0];
}

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }
inline Vec sum_of(Vec a, Vec b) { return a + b; }

// What `exp_of` keeps powers of 2 between. The compiler is not to know these numbers: GCC takes two
// instructions to compare with a constant, and one to compare with another vector.
struct Limits {
    Vec least, most;

    Limits() {
        float ends[] = {-127.0f, 128.0f};
        asm("" : "+m"(ends));
        least = splat(ends[0]), most = splat(ends[1]);
    }
};

// e to the power of x: 0 below 2**-127, infinity from 2**128 on; NaN stays NaN.
inline Vec exp_of(Vec x, const Limits& limits = Limits()) {
    x = x * 1.44269504088896340736f;  // 2 to the power of this
    x = limits.least > x ? limits.least : x;
    x = limits.most < x ? limits.most : x;
    // 1.5 * 2**23 rounds to a whole number; 127 more makes its low bits those of an exponent.
    const Vec magic = splat(12582912.0f + 127.0f);
    const Vec rounded = x + magic;
    const Vec power = (Vec)((IntVec)rounded << 23);
    const Vec f = x - (rounded - magic);
    // Least squares at Chebyshev points of [-1/2, 1/2]: within 3e-9 of 2**f.
    Vec p = splat(1.535336188319500e-4f);
    p = p * f + 1.339887440266574e-3f;
    p = p * f + 9.618437357674640e-3f;
    p = p * f + 5.550332471162809e-2f;
    p = p * f + 2.402264791363012e-1f;
    p = p * f + 6.931472028550421e-1f;
    p = p * f + 1.0f;
    return p * power;
}

// How a product is written: in place of what was there, added to it, or added to a part of it.
struct Replaced {
    Vec operator()(int, Vec, Vec product) const { return product; }
};
struct Added {
    Added from(int) const { return {}; }
    Vec operator()(int, Vec former, Vec product) const { return former + product; }
};
struct AddedToPart {
    const float* parts;  // by row

    AddedToPart from(int row) const { return {parts + row}; }
    Vec operator()(int row, Vec former, Vec product) const { return former * parts[row] + product; }
};

// c[MR][VECS * WIDTH] becomes `written` of itself and a b. Element (r, d) of a is at
// a[d * a_step + r * a_row], row d of b begins at b + d * b_step. The sums stay in registers, and
// are added to c when they are complete: one term at a time would be lost beside the sum of many
// tiles.
template <int VECS, typename Written>
[[gnu::always_inline]] inline void multiply(const float* __restrict a, int64_t a_step,
                                            int64_t a_row, const float* __restrict b,
                                            int64_t b_step, float* __restrict c, int64_t c_row,
                                            int depth, const Written& written) {
    Vec sums[MR][VECS];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++)
        for (int i = 0; i < VECS; i++) sums[r][i] = Vec{};
    for (int d = 0; d < depth; d++) {
        Vec column[VECS];
#pragma GCC unroll 2
        for (int i = 0; i < VECS; i++) column[i] = load_anywhere(b + i * WIDTH);
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) {
            const Vec x = splat(a[r * a_row]);
#pragma GCC unroll 2
            for (int i = 0; i < VECS; i++) sums[r][i] += x * column[i];
        }
        a += a_step;
        b += b_step;
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
        float* to = c + r * c_row;
#pragma GCC unroll 2
        for (int i = 0; i < VECS; i++, to += WIDTH) store(to, written(r, load(to), sums[r][i]));
    }
}

// to[d][r] = from[r][d], of 4 x 4 numbers.
inline void transpose_4(const float* from, int64_t from_row, float* to, int64_t to_row) {
    Four x[4];
    for (int r = 0; r < 4; r++) std::memcpy(&x[r], from + r * from_row, sizeof x[r]);
    const Four low0 = FLEXCP_SHUFFLE(x[0], x[1], 0, 4, 1, 5);
    const Four high0 = FLEXCP_SHUFFLE(x[0], x[1], 2, 6, 3, 7);
    const Four low1 = FLEXCP_SHUFFLE(x[2], x[3], 0, 4, 1, 5);
    const Four high1 = FLEXCP_SHUFFLE(x[2], x[3], 2, 6, 3, 7);
    const Four y[4] = {
        FLEXCP_SHUFFLE(low0, low1, 0, 1, 4, 5), FLEXCP_SHUFFLE(low0, low1, 2, 3, 6, 7),
        FLEXCP_SHUFFLE(high0, high1, 0, 1, 4, 5), FLEXCP_SHUFFLE(high0, high1, 2, 3, 6, 7)};
    for (int d = 0; d < 4; d++) std::memcpy(to + d * to_row, &y[d], sizeof y[d]);
}

struct Free {
    void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<float[], Free>;

// Memory that begins where a vector may; empty if there is none.
inline Buffer buffer(int64_t floats) {
    void* found = nullptr;
    const size_t bytes = (floats > 0 ? floats : 1) * sizeof(float);
    if (posix_memalign(&found, 64, bytes) != 0) return Buffer();
    return Buffer(static_cast<float*>(found));
}

}  // namespace
