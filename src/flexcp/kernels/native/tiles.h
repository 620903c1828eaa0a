// Tiles of pairs: what a call is given, operands side by side, and products of one tile.
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
    const int32_t *partial_start, *partial_tile, *partial_pattern, *patterns, *order, *plane_of;
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
constexpr int GROUPS = TILE / MR, PANELS = TILE / NR, WORDS = TILE / 32;
static_assert(TILE % MR == 0 && TILE % NR == 0 && TILE % 32 == 0);

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t padded(int64_t width) { return ceil_div(width, NR) * NR; }

inline int64_t plane_of(const Call& c, int64_t b, int64_t h) {
    const int64_t pb = c.planes_batch > 1 ? b : 0, ph = c.planes_heads > 1 ? h : 0;
    return c.plane_of[pb * c.planes_heads + ph];
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

struct Bfloat16 {
    uint16_t bits;
};

inline float widened(float x) { return x; }
inline float widened(Bfloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
}
#if defined(__FLT16_MAX__)
inline float widened(_Float16 x) { return static_cast<float>(x); }
constexpr bool HAS_FLOAT16 = true;
#else
constexpr bool HAS_FLOAT16 = false;
#endif

// Rows [first, first + TILE) of a tensor in float32; rows past the end are 0.
struct Widened {
    Buffer data;
    const float* from = nullptr;  // data, or the tensor itself if it is float32
    int64_t width = 0, stride = 0;

    explicit Widened(int64_t most) : data(buffer(TILE * most)) {}

    void read(const Rows& x, int64_t b, int64_t h, int64_t first, int64_t length,
              int64_t columns) {
        const int64_t rows = std::min<int64_t>(TILE, length - first);
        from = data.get(), width = stride = columns;
        if (x.type == 0 && x.element == 1 && rows == TILE)
            from = row_of<float>(x, b, h, first), stride = x.row;
        else if (x.type == 0)
            copy<float>(x, b, h, first, rows);
        else if (x.type == 1)
            copy<Bfloat16>(x, b, h, first, rows);
#if defined(__FLT16_MAX__)
        else if (x.type == 2)
            copy<_Float16>(x, b, h, first, rows);
#endif
    }

    // `factor` times each row: [TILE][width].
    void copy_rows(float* to, float factor) const {
        for (int64_t r = 0; r < TILE; r++, to += width)
            for (int64_t d = 0; d < width; d++) to[d] = factor * from[r * stride + d];
    }

    // As panels of NR rows: [TILE / NR][width][NR].
    void pack_across(float* to) const {
        const int64_t whole = width / 4 * 4;
        for (int64_t i = 0; i < TILE; i += NR, to += width * NR) {
            const float* rows = from + i * stride;
            for (int64_t r = 0; r < NR; r += 4)
                for (int64_t d = 0; d < whole; d += 4)
                    transpose_4(rows + r * stride + d, stride, to + d * NR + r, NR);
            for (int64_t d = whole; d < width; d++)
                for (int64_t r = 0; r < NR; r++) to[d * NR + r] = rows[r * stride + d];
        }
    }

    // As panels of NR columns: [padded(width) / NR][TILE][NR]; columns past the end are 0. Whether
    // none is NaN or infinite.
    bool pack_along(float* to) const {
        constexpr int32_t exponent = 0x7f800000;
        IntVec special = {};
        for (int64_t r = 0; r < TILE; r++)
            for (int64_t d = 0; d < width; d += NR) {
                const float* row = from + r * stride + d;
                float* panel = to + d * TILE + r * NR;
                const int64_t here = std::min<int64_t>(NR, width - d);
                if (here == NR)
                    std::memcpy(panel, row, NR * sizeof(float));
                else
                    for (int64_t i = 0; i < NR; i++) panel[i] = i < here ? row[i] : 0;
                for (int i = 0; i < NR; i += WIDTH)
                    special |= ((IntVec)load(panel + i) & exponent) == exponent;
            }
        bool finite = true;
        for (int i = 0; i < WIDTH; i++) finite &= !special[i];
        return finite;
    }

   private:
    template <typename T>
    void copy(const Rows& x, int64_t b, int64_t h, int64_t first, int64_t rows) {
        float* to = data.get();
        for (int64_t r = 0; r < rows; r++, to += width) {
            const T* row = row_of<const T>(x, b, h, first + r);
            if (x.element == 1)
                for (int64_t d = 0; d < width; d++) to[d] = widened(row[d]);
            else
                for (int64_t d = 0; d < width; d++) to[d] = widened(row[d * x.element]);
        }
        std::memset(to, 0, (TILE - rows) * width * sizeof(float));
    }
};

// What the key tiles of some heads are packed to, and which of them are finite.
struct Panels {
    int64_t size;
    Buffer data;
    std::unique_ptr<bool[]> finite;

    Panels(int64_t tiles, int64_t width)
        : size(TILE * width), data(buffer(tiles * size)), finite(new bool[tiles]) {}

    float* at(int64_t tile) const { return data.get() + tile * size; }
};

// Key heads are taken a few at a time, so that what is packed of them is still in the cache when it
// is read, and memory is reused; yet enough to give every thread its share, as far as memory allows.
constexpr int64_t CACHE_BYTES = 8 << 20, MOST_BYTES = 256 << 20;

inline int64_t heads_at_once(const Call& c, int64_t bytes_of_head, int64_t tasks_of_head,
                             int64_t tasks_of_thread) {
    const int64_t bytes = std::max<int64_t>(bytes_of_head, 1);
    const int64_t tasks = c.threads > 1 ? c.threads * tasks_of_thread : 1;
    const int64_t busy = ceil_div(tasks, std::max<int64_t>(tasks_of_head, 1));
    const int64_t found = std::max(CACHE_BYTES / bytes, std::min(busy, MOST_BYTES / bytes));
    return std::clamp<int64_t>(found, 1, std::max<int64_t>(c.batch * c.kv_heads, 1));
}

// Which key tiles of each plane some query sees: [planes][tiles].
inline std::vector<char> seen_tiles(const Call& c) {
    const int64_t tiles = ceil_div(c.kv_len, TILE);
    const int32_t* last = c.plane_of + c.planes_batch * c.planes_heads;
    const int64_t planes = 1 + *std::max_element(c.plane_of, last);
    std::vector<char> seen(planes * tiles, 0);
    std::vector<int64_t> change(tiles + 1);
    for (int64_t p = 0; p < planes; p++) {
        std::fill(change.begin(), change.end(), 0);
        const int64_t begin = p * c.lines, end = begin + c.lines;
        for (int64_t t = c.full_start[begin]; t < c.full_start[end]; t++)
            change[c.full_tile[t]]++, change[c.full_stop[t]]--;
        for (int64_t t = c.partial_start[begin]; t < c.partial_start[end]; t++)
            change[c.partial_tile[t]]++, change[c.partial_tile[t] + 1]--;
        int64_t open = 0;
        for (int64_t j = 0; j < tiles; j++) seen[p * tiles + j] = (open += change[j]) > 0;
    }
    return seen;
}

// Calls `each(b, g, j, tile, rows)` for every tile of key heads [first, last) that some query of the
// head's group sees; tiles are numbered over these heads. Whether there was memory.
template <typename Each>
bool for_key_tiles(const Call& c, const std::vector<char>& seen, int64_t first, int64_t last,
                   Each each) {
    const int64_t tiles = ceil_div(c.kv_len, TILE), group = c.heads / c.kv_heads;
    int failed = 0;
#pragma omp parallel num_threads(c.threads) reduction(| : failed)
    {
        Widened rows(std::max(c.head_dim, c.value_dim));
        failed |= !rows.data;
#pragma omp for schedule(static)
        for (int64_t n = 0; n < (last - first) * tiles; n++) {
            if (failed) continue;
            const int64_t head = first + n / tiles, b = head / c.kv_heads, g = head % c.kv_heads;
            const int64_t j = n % tiles;
            bool needed = false;
            for (int64_t h = g * group; h < (g + 1) * group; h++)
                needed |= seen[plane_of(c, b, h) * tiles + j];
            if (needed) each(b, g, j, n, rows);
        }
    }
    return !failed;
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

// Calls `each` with the full tiles of a line, then with the partial ones.
template <typename Each>
inline void for_tiles(const Call& c, int64_t line, Each each) {
    for (int64_t t = c.full_start[line]; t < c.full_start[line + 1]; t++)
        for (int64_t j = c.full_tile[t]; j < c.full_stop[t]; j++) each(Tile{j, nullptr});
    for (int64_t t = c.partial_start[line]; t < c.partial_start[line + 1]; t++)
        each(Tile{c.partial_tile[t], c.patterns + int64_t{c.partial_pattern[t]} * WORDS * TILE});
}

// Where the pairs of a tile are, by groups of MR rows and panels of NR columns: the rest of a tile
// is not computed.
struct Outline {
    uint32_t panels[GROUPS];  // those with pairs
    uint32_t whole[GROUPS];  // those in which every row sees every column
    int from[GROUPS], upto[GROUPS];  // the columns with pairs lie in [from, upto)
    int first[GROUPS], last[GROUPS];  // the same in whole vectors

    Outline(const Tile& tile, int groups) {
        for (int g = 0; g < GROUPS; g++) {
            panels[g] = whole[g] = g < groups ? (1u << PANELS) - 1 : 0;
            from[g] = first[g] = 0, upto[g] = last[g] = g < groups ? TILE : 0;
            if (tile.bits && g < groups) trace(tile.bits + g * MR, g);
        }
    }

   private:
    void trace(const int32_t* bits, int g) {
        panels[g] = whole[g] = 0, from[g] = TILE, upto[g] = 0;
        for (int w = 0; w < WORDS; w++) {
            uint32_t any = 0, all = ~0u;
            for (int r = 0; r < MR; r++) {
                const uint32_t word = bits[w * TILE + r];
                any |= word, all &= word;
            }
            if (!any) continue;
            from[g] = std::min(from[g], w * 32 + __builtin_ctz(any));
            upto[g] = w * 32 + 32 - __builtin_clz(any);
            for (int p = 0; p < 32 / NR; p++) {
                constexpr uint32_t low = NR == 32 ? ~0u : (1u << (NR % 32)) - 1;
                const uint32_t panel = 1u << (w * 32 / NR + p);
                if (any >> (p * NR) & low) panels[g] |= panel;
                if ((all >> (p * NR) & low) == low) whole[g] |= panel;
            }
        }
        from[g] = std::min(from[g], upto[g]);
        first[g] = from[g] / WIDTH * WIDTH;
        last[g] = static_cast<int>(ceil_div(upto[g], WIDTH)) * WIDTH;
    }
};

// Tiles are mostly taken in order: while one is computed, the processor fetches what the next one
// needs, which stands behind it in memory and is further away than a product can wait for. There may
// be nothing behind it: such a request is not carried out.
constexpr int CACHE_LINE = 64 / sizeof(float);

// Asks for the `which`-th of `parts` parts of some memory.
inline void ask_for(const float* from, int64_t floats, int which, int parts) {
    for (int64_t i = which * CACHE_LINE; i < floats; i += parts * CACHE_LINE)
        __builtin_prefetch(from + i, 0, 2);
}

// to[TILE][TILE] = a b, where the tile has pairs: a has rows of `depth`, b is packed across.
inline void products(const float* a, const float* b, const Outline& outline, int groups,
                     int64_t depth, float* to) {
    for (int p = 0; p < PANELS; p++)
        for (int g = 0; g < groups; g++)
            if (outline.panels[g] >> p & 1) {
                ask_for(b + (TILE + p * NR) * depth, NR * depth, g, groups);
                multiply(a + g * MR * depth, 1, depth, b + p * NR * depth,
                         to + g * MR * TILE + p * NR, TILE, static_cast<int>(depth), Replaced{});
            }
}

// to[TILE][width] += weights values, or to a part of what was there: values are packed along.
template <typename Written>
inline void add_products(const float* weights, const float* values, const Outline& outline,
                         int groups, int64_t width, float* to, const Written& written) {
    for (int64_t d = 0; d < width; d += NR)
        for (int g = 0; g < groups; g++)
            if (outline.panels[g]) {
                ask_for(values + (width + d) * TILE, TILE * NR, g, groups);
                multiply(weights + g * MR * TILE + outline.from[g], 1, TILE,
                         values + d * TILE + outline.from[g] * NR, to + g * MR * width + d, width,
                         outline.upto[g] - outline.from[g], written.from(g * MR));
            }
}

// to[TILE][width] += transposed(weights) rows: rows are packed along.
inline void add_transposed(const float* weights, const float* rows, const Outline& outline,
                           int groups, int64_t width, float* to) {
    int begin[PANELS], end[PANELS];
    for (int p = 0; p < PANELS; p++) {
        begin[p] = TILE, end[p] = 0;
        for (int g = 0; g < groups; g++)
            if (outline.panels[g] >> p & 1) {
                begin[p] = std::min(begin[p], g * MR);
                end[p] = g * MR + MR;
            }
    }
    for (int64_t d = 0; d < width; d += NR)
        for (int j = 0; j < TILE; j += MR) {
            const int p = j / NR, q = (j + MR - 1) / NR;
            const int from = std::min(begin[p], begin[q]), upto = std::max(end[p], end[q]);
            if (from < upto) {
                for (int r = 0; r < MR; r++)
                    for (int i = 0; i < NR; i += CACHE_LINE)
                        __builtin_prefetch(to + (TILE + j + r) * width + d + i, 1, 2);
                multiply(weights + from * TILE + j, TILE, 1, rows + d * TILE + from * NR,
                         to + j * width + d, width, upto - from, Added{});
            }
        }
}

// `add_products` or `add_transposed` over the pairs of the tile alone: the others have a weight of
// 0, but 0 times what is not finite is NaN.
inline void add_pairs(const Tile& tile, const float* weights, const float* values, int count,
                      bool transposed, int64_t width, float* to) {
    for (int r = 0; r < count; r++)
        for (int n = 0; n < TILE; n++) {
            if (!tile.sees(r, n)) continue;
            const float* from = values + (transposed ? r : n) * NR;
            float* sum = to + (transposed ? n : r) * width;
            for (int64_t d = 0; d < width; d++)
                sum[d] += weights[r * TILE + n] * from[d / NR * TILE * NR + d % NR];
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
