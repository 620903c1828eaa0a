// Tiles of pairs: what a call is given, and products of one tile.
#pragma once

#include <algorithm>
#include <vector>

#include "score_tile.h"
#include "vectors.h"

extern "C" {

// A tensor of rows: element (b, h, i, d) is at data[b * batch + h * head + i * row + d * element].
// q, k, v and grad_out may be of a half type.
struct Rows {
    void* data;
    int64_t type;  // 0 float32, 1 bfloat16, 2 float16
    int64_t batch, head, row, element;
};

// What both passes take; `library.py` has the same fields.
struct Call {
    Rows q, k, v, out, lse, largest, grad_out, delta, grad_q, grad_k, grad_v;
    int64_t batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim;
    int64_t lines, planes_batch, planes_heads;
    const int32_t *full_start, *full_tile, *full_stop;  // runs of full tiles, by line
    const int32_t *partial_start, *partial_tile, *partial_pattern, *patterns, *plane_of;
    const int32_t *row_hash, *second_hash, *key_hash;  // of dropout; null without
    int64_t key_hash_batch, threshold;
    double factor, scale;
    int64_t has_former;  // whether out and lse, or grad_q, hold what is to be merged with
    int64_t threads;
    ScoreFunction score;  // with all below; null without
    ScorePullBack pull_back;
    const int64_t *score_given, *score_whole;
    const float* score_real;
    const int32_t *q_at, *kv_at;  // global positions, in whole tiles
    const uint8_t *q_consecutive, *kv_consecutive;  // by tile: whether they count up by 1
    ScoreSums sum_lookups;  // of the backward pass, with all below; null if nothing has a gradient
    double* lookup_sums;
    const int64_t* lookup_sums_at;
    int64_t lookup_sums_size;
};

}  // extern "C"

namespace {

constexpr int TILE = 96;  // a multiple of every MR and NR, and of 32; `library.py` has it too
constexpr int GROUPS = TILE / MR, WORDS = TILE / 32;
static_assert(TILE % MR == 0 && TILE % NR == 0 && TILE % 32 == 0);

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t padded(int64_t width) { return ceil_div(width, WIDTH) * WIDTH; }

inline int64_t plane_of(const Call& c, int64_t b, int64_t h) {
    const int64_t pb = c.planes_batch > 1 ? b : 0, ph = c.planes_heads > 1 ? h : 0;
    return c.plane_of[pb * c.planes_heads + ph];
}

// How many planes there are: masks of batch elements and heads that differ.
inline int64_t planes_of(const Call& c) {
    return 1 + *std::max_element(c.plane_of, c.plane_of + c.planes_batch * c.planes_heads);
}

template <typename T>
inline T* row_of(const Rows& x, int64_t b, int64_t h, int64_t i) {
    return static_cast<T*>(x.data) + b * x.batch + h * x.head + i * x.row;
}

inline float& number(const Rows& x, int64_t b, int64_t h, int64_t i) {
    return *row_of<float>(x, b, h, i);
}

// Row i of a tensor of float32 is `factor` times some numbers, or with `adds` so much more.
inline void write_row(const Rows& x, int64_t b, int64_t h, int64_t i, const float* __restrict from,
                      int64_t width, float factor, bool adds = false) {
    float* __restrict to = row_of<float>(x, b, h, i);
    if (x.element != 1)
        for (int64_t d = 0; d < width; d++)
            to[d * x.element] = (adds ? to[d * x.element] : 0.0f) + from[d] * factor;
    else if (adds)
        for (int64_t d = 0; d < width; d++) to[d] += from[d] * factor;
    else
        for (int64_t d = 0; d < width; d++) to[d] = from[d] * factor;
}

// One tile of a line: which key tile it is, and its bits if it is partial.
struct Tile {
    int64_t j;
    const int32_t* bits;  // [WORDS][TILE], bit i of a word for column 32 * word + i; null if full

    bool sees(int row, int column) const {
        return !bits || (bits[column / 32 * TILE + row] >> (column % 32) & 1);
    }
    // The same for WIDTH columns from a multiple of WIDTH on.
    IntVec allowed(int row, int column) const {
        IntVec each;
        std::memcpy(&each, BITS.each + column % 32, sizeof each);
        return (splat(bits[column / 32 * TILE + row]) & each) == each;
    }
};

// How many tiles a line has.
inline int64_t tiles_of(const Call& c, int64_t line) {
    int64_t found = c.partial_start[line + 1] - c.partial_start[line];
    for (int64_t t = c.full_start[line]; t < c.full_start[line + 1]; t++)
        found += c.full_stop[t] - c.full_tile[t];
    return found;
}

// Where the pairs of a tile are, by groups of MR rows and vectors of columns: the rest of a tile is
// not computed.
struct Outline {
    uint32_t vectors[GROUPS];  // those with pairs
    uint32_t whole[GROUPS];  // those in which every row sees every column
    uint32_t columns[GROUPS][WORDS];  // a bit for each column that some row sees
    int from[GROUPS], upto[GROUPS];  // the columns with pairs lie in [from, upto)
    int first[GROUPS], last[GROUPS];  // the same in whole vectors

    Outline(const Tile& tile, int groups) {
        for (int g = 0; g < GROUPS; g++) {
            vectors[g] = whole[g] = g < groups ? (1u << TILE / WIDTH) - 1 : 0;
            for (uint32_t& word : columns[g]) word = g < groups ? ~0u : 0;
            from[g] = first[g] = 0, upto[g] = last[g] = g < groups ? TILE : 0;
            if (tile.bits && g < groups) trace(tile.bits + g * MR, g);
        }
    }

    // Whether some row of a group sees one of the MR columns from `column` on.
    bool sees(int g, int column) const {
        const int word = column / 32, bit = column % 32;
        uint64_t bits = columns[g][word];
        if (bit + MR > 32) bits |= static_cast<uint64_t>(columns[g][word + 1]) << 32;
        return bits >> bit & ((1u << MR) - 1);
    }

   private:
    void trace(const int32_t* bits, int g) {
        vectors[g] = whole[g] = 0, from[g] = TILE, upto[g] = 0;
        for (int w = 0; w < WORDS; w++) {
            uint32_t any = 0, all = ~0u;
            for (int r = 0; r < MR; r++) {
                const uint32_t word = bits[w * TILE + r];
                any |= word, all &= word;
            }
            columns[g][w] = any;
            if (!any) continue;
            from[g] = std::min(from[g], w * 32 + __builtin_ctz(any));
            upto[g] = w * 32 + 32 - __builtin_clz(any);
            for (int i = 0; i < 32; i += WIDTH) {
                constexpr uint32_t low = (1u << WIDTH) - 1;
                const uint32_t vector = 1u << (w * 32 + i) / WIDTH;
                if (any >> i & low) vectors[g] |= vector;
                if ((all >> i & low) == low) whole[g] |= vector;
            }
        }
        from[g] = std::min(from[g], upto[g]);
        first[g] = from[g] / WIDTH * WIDTH;
        last[g] = static_cast<int>(ceil_div(upto[g], WIDTH)) * WIDTH;
    }
};

// Rows of a tile, readable in whole vectors.
struct TileRows {
    const float* data;
    int64_t step;  // from one row to the next

    const float* at(int64_t row, int64_t column) const { return data + row * step + column; }
};

// Tiles are mostly taken in order: while one is computed, the processor fetches what the next one
// needs, which is further away than a product can wait for; sums of key tiles mostly lie in their
// order too. There may be nothing there: such a request is not carried out.
constexpr int CACHE_LINE = 64 / sizeof(float);

// Asks for `floats` numbers, from a column on, of every `step`-th row in [row, upto).
inline void ask_for(const TileRows& rows, int row, int upto, int step, int64_t column,
                    int64_t floats) {
    for (; row < upto; row += step)
        for (int64_t i = 0; i < floats; i += CACHE_LINE)
            __builtin_prefetch(rows.at(row, column + i), 0, 2);
}

// Rows that a line will write, or the next one read: asked for a few at a time, in the turns of its
// products. Where lines have few tiles, waiting for them takes a twelfth of the time.
class Errands {
    static constexpr int MOST = 32;
    struct Errand {
        const char* data;
        int64_t step, bytes, rows;
        bool written;
    };
    Errand errands[MOST];
    int count = 0, now = 0;
    int64_t row = 0, rows_of_turn = 0, turns_before = 0;

   public:
    // How many more can be added.
    int left() const { return MOST - count; }

    // Rows [first, first + TILE) of a tensor, if they are to be asked for one by one.
    void add(const Rows& x, int64_t b, int64_t h, int64_t first, int64_t length, int64_t columns,
             bool written) {
        const int64_t size = x.type == 0 ? sizeof(float) : sizeof(uint16_t);
        const int64_t rows = std::min<int64_t>(TILE, length - first);
        if (count == MOST || x.element != 1 || rows <= 0) return;
        const int64_t at = b * x.batch + h * x.head + first * x.row;
        errands[count++] = {static_cast<const char*>(x.data) + at * size, x.row * size,
                            columns * size, rows, written};
    }

    // All are to be done after so many turns; not long before, or the cache has lost them again.
    void spread(int64_t turns) {
        int64_t rows = 0;
        for (int i = 0; i < count; i++) rows += errands[i].rows;
        rows_of_turn = ceil_div(rows, std::max<int64_t>(turns, 1));
        turns_before = turns - 2 * ceil_div(rows, std::max<int64_t>(rows_of_turn, 1));
    }

    void take_turn() {
        if (turns_before-- > 0) return;
        for (int64_t n = 0; n < rows_of_turn && now < count; n++) {
            const Errand& x = errands[now];
            const char* at = x.data + row * x.step;
            for (int64_t i = 0; i < x.bytes; i += CACHE_LINE * sizeof(float)) {
                if (x.written)
                    __builtin_prefetch(at + i, 1, 2);
                else
                    __builtin_prefetch(at + i, 0, 2);
            }
            if (++row == x.rows) row = 0, now++;
        }
    }
};

// Turns of the products of one tile: with packed tiles, and of weights with rows of some width.
constexpr int64_t TURNS_OF_PRODUCTS = TILE / NR * GROUPS;
inline int64_t turns_of_rows(int64_t width) { return ceil_div(width, NR) * GROUPS; }

// to[TILE][TILE] = a b, where the tile has pairs: b is packed across, in panels of NR columns.
// `ahead` are rows of `depth` that the next tile needs; null if they have been asked for.
inline void products(const TileRows& a, const float* b, const Outline& outline, int groups,
                     int64_t depth, const TileRows* ahead, float* to, Errands& errands) {
    for (int p = 0; p < TILE / NR; p++, b += NR * depth)
        for (int g = 0; g < groups; g++) {
            if (ahead) ask_for(*ahead, p * NR + g, p * NR + NR, groups, 0, depth);
            errands.take_turn();
            const uint32_t seen = outline.vectors[g] >> 2 * p & 3;
            if (!seen) continue;
            const float* rows = a.data + g * MR * a.step;
            float* here = to + g * MR * TILE + p * NR;
            const int skipped = seen == 2 ? WIDTH : 0, steps = static_cast<int>(depth);
            if (seen == 3)
                multiply<2>(rows, 1, a.step, b, NR, here, TILE, steps, Replaced{});
            else
                multiply<1>(rows, 1, a.step, b + skipped, NR, here + skipped, TILE, steps,
                            Replaced{});
        }
}

// `multiply` of NR columns, or of one vector if no more are left. Not inlined, the backward pass
// takes 3 % longer.
template <typename Written>
[[gnu::always_inline]] inline void multiply_rows(const float* a, int64_t a_step, int64_t a_row,
                                                 const float* b, int64_t b_step, float* c,
                                                 int64_t c_row, int depth, int64_t left,
                                                 const Written& written) {
    if (left > WIDTH)
        multiply<2>(a, a_step, a_row, b, b_step, c, c_row, depth, written);
    else
        multiply<1>(a, a_step, a_row, b, b_step, c, c_row, depth, written);
}

// to[TILE][width] += weights values, or to a part of what was there; width is in whole vectors. With
// `asks`, for the rows after these.
template <typename Written>
inline void add_products(const float* weights, const TileRows& values, const Outline& outline,
                         int groups, int64_t width, float* to, const Written& written, bool asks,
                         Errands& errands) {
    for (int64_t d = 0; d < width; d += NR)
        for (int g = 0; g < groups; g++) {
            errands.take_turn();
            if (!outline.vectors[g]) continue;
            if (asks) ask_for(values, TILE + g, 2 * TILE, groups, d, NR);
            multiply_rows(weights + g * MR * TILE + outline.from[g], 1, TILE,
                          values.at(outline.from[g], d), values.step,
                          to + g * MR * width + d, width, outline.upto[g] - outline.from[g],
                          width - d, written.from(g * MR));
        }
}

// to[TILE][width] += transposed(weights) rows; width is in whole vectors. With `asks`, for the sums
// after these.
inline void add_transposed(const float* weights, const TileRows& rows, const Outline& outline,
                           int groups, int64_t width, float* to, bool asks, Errands& errands) {
    int begin[GROUPS], end[GROUPS];  // of every MR columns, the groups that see one of them
    for (int j = 0; j < GROUPS; j++) {
        begin[j] = 0, end[j] = groups;
        while (begin[j] < end[j] && !outline.sees(begin[j], j * MR)) begin[j]++;
        while (begin[j] < end[j] && !outline.sees(end[j] - 1, j * MR)) end[j]--;
    }
    for (int64_t d = 0; d < width; d += NR)
        for (int j = 0; j < GROUPS; j++) {
            errands.take_turn();
            const int from = begin[j] * MR, upto = end[j] * MR;
            if (from == upto) continue;
            float* sums = to + j * MR * width + d;
            for (int r = 0; asks && r < MR; r++)
                for (int i = 0; i < NR; i += CACHE_LINE)
                    __builtin_prefetch(sums + (TILE + r) * width + i, 1, 2);
            multiply_rows(weights + from * TILE + j * MR, TILE, 1, rows.at(from, d), rows.step,
                          sums, width, upto - from, width - d, Added{});
        }
}

// `add_products` or `add_transposed` over the pairs of the tile alone: the others have a weight of
// 0, but 0 times what is not finite is NaN.
inline void add_pairs(const Tile& tile, const float* weights, const TileRows& values, int count,
                      bool transposed, int64_t width, float* to) {
    for (int r = 0; r < count; r++)
        for (int n = 0; n < TILE; n++) {
            if (!tile.sees(r, n)) continue;
            const float* from = values.at(transposed ? r : n, 0);
            float* sum = to + (transposed ? n : r) * width;
            for (int64_t d = 0; d < width; d++) sum[d] += weights[r * TILE + n] * from[d];
        }
}

// Which weights of a tile dropout keeps: see dropout.py.
struct Kept {
    const int32_t *row, *second, *key;
    IntVec threshold;

    Kept(const Call& c, int64_t b, int64_t h, int64_t i0, int64_t j0)
        : row(nullptr), second(nullptr), key(nullptr),
          threshold(splat(static_cast<int32_t>(c.threshold))) {
        if (!c.row_hash) return;
        row = c.row_hash + (b * c.heads + h) * c.q_len + i0;
        second = c.second_hash + (b * c.heads + h) * c.q_len + i0;
        key = c.key_hash + b * c.key_hash_batch + j0;
    }

    IntVec of(int r, int column) const {
        WrappingVec x;
        std::memcpy(&x, key + column, sizeof x);
        x = x * static_cast<uint32_t>(row[r]);
        x = x * (x + x + 1u);
        x = x * static_cast<uint32_t>(second[r]);
        return (IntVec)x >= threshold;
    }
};

}  // namespace
