// The backward pass: one task per key head, or share of one, which goes through its query tiles in order and adds to
// the gradients of keys and values in memory of its own; five products for each tile.
#pragma once

#include "scored.h"

namespace {

constexpr double BUSY = 0.8;  // share of the threads' time that is not to be waited for others

// Scores and the weights' gradients of a tile to weights and the scores' gradients, in place.
template <bool PARTIAL, bool DROPS>
void weigh_back(float* s, float* dp, const Tile& tile, const Outline& outline, int count,
                int groups, const float* lse, const float* delta, const Kept* kept, float factor) {
    const Limits limits;
    for (int r = 0; r < groups * MR; r++) {
        float *row = s + r * TILE, *grad = dp + r * TILE;
        const int begin = r >= count ? TILE : PARTIAL ? outline.first[r / MR] : 0;
        const int end = r >= count || !PARTIAL ? TILE : outline.last[r / MR];
        for (int j = 0; j < begin; j += WIDTH) store(row + j, Vec{}), store(grad + j, Vec{});
        for (int j = end; j < TILE; j += WIDTH) store(row + j, Vec{}), store(grad + j, Vec{});
        if (begin == end) continue;
        const Vec less = splat(lse[r]), mean = splat(delta[r]);
        for (int j = begin; j < end; j += WIDTH) {
            const Vec p = exp_of(load(row + j) - less, limits);
            Vec weight = p, g = load(grad + j);
            if (DROPS) {
                const IntVec stays = kept->of(r, j);
                weight = stays ? p * factor : Vec{};
                g = stays ? g * factor : Vec{};
            }
            g = p * (g - mean);
            if (PARTIAL && !(outline.whole[r / MR] >> j / NR & 1)) {
                const IntVec seen = tile.allowed(r, j);
                weight = seen ? weight : Vec{};
                g = seen ? g : Vec{};
            }
            store(row + j, weight);
            store(grad + j, g);
        }
    }
}

// A query tile: q and the result's gradient, both ways, and what has come together for its own.
struct QueryTile {
    Widened read;
    Buffer q, q_rows, g, g_rows, dq, s, dp;
    Buffer given;  // scores before the score function
    double* lookup_sums = nullptr;
    bool q_finite = true, g_finite = true;
    float lse[TILE], delta[TILE];

    explicit QueryTile(const Call& c)
        : read(std::max(c.head_dim, c.value_dim)),
          q(buffer(TILE * c.head_dim)), q_rows(buffer(TILE * padded(c.head_dim))),
          g(buffer(TILE * c.value_dim)), g_rows(buffer(TILE * padded(c.value_dim))),
          dq(buffer(TILE * padded(c.head_dim))), s(buffer(TILE * TILE)), dp(buffer(TILE * TILE)),
          given(buffer(c.score ? TILE * TILE : 0)) {}

    bool complete() const {
        return read.data && q && q_rows && g && g_rows && dq && s && dp && given;
    }

    void begin(const Call& c, int64_t b, int64_t h, int64_t i0, int count) {
        read.read(c.q, b, h, i0, c.q_len, c.head_dim);
        read.copy_rows(q.get(), static_cast<float>(c.scale));
        q_finite = read.pack_along(q_rows.get());
        read.read(c.grad_out, b, h, i0, c.q_len, c.value_dim);
        read.copy_rows(g.get(), 1.0f);
        g_finite = read.pack_along(g_rows.get());
        std::memset(dq.get(), 0, TILE * padded(c.head_dim) * sizeof(float));
        for (int r = 0; r < count; r++) {
            const float x = number(c.lse, b, h, i0 + r);
            lse[r] = x == -INFINITY ? INFINITY : x;  // a row without scores has weights of 0
            delta[r] = number(c.delta, b, h, i0 + r);
        }
    }

    void end(const Call& c, int64_t b, int64_t h, int64_t i0, int count) const {
        for (int r = 0; r < count; r++)
            write_row(c.grad_q, b, h, i0 + r, dq.get() + r * padded(c.head_dim), c.head_dim,
                      static_cast<float>(c.scale), c.has_former);
    }
};

// Adds a product of weights: over all of a tile, or over its pairs where the rest may not be finite.
inline void add(bool transposed, bool finite, const Tile& tile, const Outline& outline, int count,
                int groups, const float* weights, const float* values, int64_t width, float* to) {
    if (tile.bits && !finite)
        add_pairs(tile, weights, values, count, transposed, width, to);
    else if (transposed)
        add_transposed(weights, values, outline, groups, width, to);
    else
        add_products(weights, values, outline, groups, width, to, Added{});
}

// One tile's part of the gradients of a key head, whose sums are `dk` and `dv`.
template <bool DROPS>
void add_tile(const Call& c, QueryTile& own, const Tile& tile, int64_t b, int64_t h, int64_t i0,
              int count, const float* k, const float* k_rows, bool k_finite, const float* v,
              float* dk, float* dv) {
    const int groups = static_cast<int>(ceil_div(count, MR));
    const int64_t D = padded(c.head_dim), V = padded(c.value_dim);
    const Outline outline(tile, groups);
    float *s = own.s.get(), *dp = own.dp.get();
    products(own.q.get(), k, outline, groups, c.head_dim, s);
    products(own.g.get(), v, outline, groups, c.value_dim, dp);
    const Scored scored(c, b, h, i0 / TILE, tile.j, outline, count);
    scored.change(s, own.given.get());
    const Kept kept(c, b, h, i0, tile.j * TILE);
    const auto weighed = tile.bits ? weigh_back<true, DROPS> : weigh_back<false, DROPS>;
    weighed(s, dp, tile, outline, count, groups, own.lse, own.delta, &kept,
            static_cast<float>(c.factor));
    scored.add_lookups(own.given.get(), dp, own.lookup_sums);
    scored.pull_back(own.given.get(), dp, tile);
    const auto sum = [&](bool transposed, bool finite, const float* weights, const float* values,
                         int64_t width, float* to) {
        add(transposed, finite, tile, outline, count, groups, weights, values, width, to);
    };
    sum(true, own.g_finite, s, own.g_rows.get(), V, dv + tile.j * TILE * V);
    sum(true, own.q_finite, dp, own.q_rows.get(), D, dk + tile.j * TILE * D);
    sum(false, k_finite, dp, k_rows, D, own.dq.get());
}

// What the key tiles of some heads are packed to.
struct KeyPanels {
    Panels across, along, values;

    KeyPanels(const Call& c, int64_t tiles)
        : across(tiles, c.head_dim), along(tiles, padded(c.head_dim)), values(tiles, c.value_dim) {}

    bool complete() const { return across.data && along.data && values.data; }

    void pack(const Call& c, int64_t b, int64_t g, int64_t j, int64_t n, Widened& rows) const {
        rows.read(c.k, b, g, j * TILE, c.kv_len, c.head_dim);
        rows.pack_across(across.at(n));
        across.finite[n] = rows.pack_along(along.at(n));
        rows.read(c.v, b, g, j * TILE, c.kv_len, c.value_dim);
        rows.pack_across(values.at(n));
    }
};

// Into how many shares, with sums of their own, the lines of each of some key heads are cut: enough
// to keep the threads busy.
inline int64_t shares_of(const Call& c, int64_t heads, int64_t sum_size) {
    int64_t shares = 1;
    const auto busy = [&] {
        const int64_t tasks = heads * shares;
        return static_cast<double>(tasks) / (ceil_div(tasks, c.threads) * c.threads);
    };
    while (busy() < BUSY && shares * 2 <= c.lines &&
           heads * shares * 2 * sum_size * int64_t{sizeof(float)} <= 4 * MOST_BYTES)
        shares *= 2;
    return shares;
}

// The gradients of key heads [first, last) and their query heads.
template <bool DROPS>
int backward_heads(const Call& c, int64_t first, int64_t last, const KeyPanels& keys,
                   int64_t shares, int64_t sum_size, float* sums) {
    const int64_t D = padded(c.head_dim), V = padded(c.value_dim), group = c.heads / c.kv_heads;
    const int64_t tiles = ceil_div(c.kv_len, TILE);
    const int64_t size = c.sum_lookups ? c.lookup_sums_size : 0, tasks = (last - first) * shares;
    std::vector<double> lookup_sums(tasks * size, 0.0);
    int failed = 0;
#pragma omp parallel num_threads(c.threads) reduction(| : failed)
    {
        QueryTile own(c);
        failed |= !own.complete();
#pragma omp for schedule(dynamic, 1)
        for (int64_t n = 0; n < (last - first) * shares; n++) {
            if (failed) continue;
            const int64_t head = n / shares, b = (first + head) / c.kv_heads;
            const int64_t g = (first + head) % c.kv_heads;
            float *dk = sums + n * sum_size, *dv = dk + tiles * TILE * D;
            std::memset(dk, 0, sum_size * sizeof(float));
            own.lookup_sums = lookup_sums.data() + n * size;
            for (int64_t h = g * group; h < (g + 1) * group; h++)
                for (int64_t place = n % shares; place < c.lines; place += shares) {
                    const int64_t plane = plane_of(c, b, h) * c.lines;
                    const int64_t line = c.order[plane + place], i0 = line * TILE;
                    const int count = static_cast<int>(std::min<int64_t>(TILE, c.q_len - i0));
                    own.begin(c, b, h, i0, count);
                    for_tiles(c, plane + line, [&](const Tile& tile) {
                        const int64_t at = head * tiles + tile.j;
                        add_tile<DROPS>(c, own, tile, b, h, i0, count, keys.across.at(at),
                                        keys.along.at(at), keys.across.finite[at],
                                        keys.values.at(at), dk, dv);
                    });
                    own.end(c, b, h, i0, count);
                }
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < size; i++)
            for (int64_t n = 0; n < tasks; n++) c.lookup_sums[i] += lookup_sums[n * size + i];
        // What the shares have summed up, in their order.
#pragma omp for schedule(static)
        for (int64_t n = 0; n < (last - first) * c.kv_len; n++) {
            if (failed) continue;
            const int64_t head = n / c.kv_len, b = (first + head) / c.kv_heads;
            const int64_t g = (first + head) % c.kv_heads, i = n % c.kv_len;
            float* own_sums = sums + head * shares * sum_size;
            const auto write = [&](const Rows& x, float* sum, int64_t width, float factor) {
                for (int64_t m = 1; m < shares; m++)
                    for (int64_t d = 0; d < width; d++) sum[d] += sum[m * sum_size + d];
                write_row(x, b, g, i, sum, width, factor);
            };
            write(c.grad_k, own_sums + i * D, c.head_dim, static_cast<float>(c.scale));
            write(c.grad_v, own_sums + tiles * TILE * D + i * V, c.value_dim, 1.0f);
        }
    }
    return failed;
}

template <bool DROPS>
int backward(const Call& c) {
    const int64_t D = padded(c.head_dim), V = padded(c.value_dim);
    const int64_t tiles = ceil_div(c.kv_len, TILE), sum_size = tiles * TILE * (D + V);
    const int64_t heads = c.batch * c.kv_heads;
    if (heads == 0) return 0;
    const int64_t head_bytes = tiles * TILE * (c.head_dim + D + c.value_dim + D + V) * 4;
    const int64_t step = heads_at_once(c, head_bytes, 1, 1);
    const int64_t shares = shares_of(c, step, sum_size);
    const KeyPanels keys(c, step * tiles);
    const Buffer sums = buffer(step * shares * sum_size);
    if (!keys.complete() || !sums) return 1;
    const std::vector<char> seen = seen_tiles(c);
    for (int64_t first = 0; first < heads; first += step) {
        const int64_t last = std::min(first + step, heads);
        const auto pack = [&](int64_t b, int64_t g, int64_t j, int64_t n, Widened& rows) {
            keys.pack(c, b, g, j, n, rows);
        };
        if (!for_key_tiles(c, seen, first, last, pack)) return 1;
        if (backward_heads<DROPS>(c, first, last, keys, shares, sum_size, sums.get())) return 1;
    }
    return 0;
}

}  // namespace
