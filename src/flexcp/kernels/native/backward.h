// The backward pass: one task per key head, or share of one, which goes through its query tiles in
// order and adds to the gradients of keys and values in memory of its own; five products for each
// tile.
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
            if (PARTIAL && !(outline.whole[r / MR] >> j / WIDTH & 1)) {
                const IntVec seen = tile.allowed(r, j);
                weight = seen ? weight : Vec{};
                g = seen ? g : Vec{};
            }
            store(row + j, weight);
            store(grad + j, g);
        }
    }
}

// What the backward pass needs of each row: the result times its gradient, less the gradient of lse,
// which is given as `lse` if there is one.
inline int find_deltas(const Call& c) {
    const int64_t lines = ceil_div(c.q_len, TILE);
    int failed = 0;
#pragma omp parallel num_threads(c.threads) reduction(| : failed)
    {
        const Buffer out_copy = buffer(TILE * padded(c.value_dim));
        const Buffer g_copy = buffer(TILE * padded(c.value_dim));
        failed |= !out_copy || !g_copy;
#pragma omp for schedule(static)
        for (int64_t n = 0; n < c.batch * c.heads * lines; n++) {
            if (failed) continue;
            const int64_t b = n / lines / c.heads, h = n / lines % c.heads, i0 = n % lines * TILE;
            const auto rows = [&](const Rows& x, const Buffer& copy) {
                return tile_rows(x, b, h, i0, c.q_len, c.value_dim, copy.get());
            };
            const TileRows out = rows(c.out, out_copy), g = rows(c.grad_out, g_copy);
            for (int64_t r = 0; r < std::min<int64_t>(TILE, c.q_len - i0); r++) {
                Vec sum = {};
                for (int64_t d = 0; d < c.value_dim; d += WIDTH)
                    sum += load_anywhere(out.at(r, d)) * load_anywhere(g.at(r, d));
                number(c.delta, b, h, i0 + r) =
                    total(sum) - (c.lse.data ? number(c.lse, b, h, i0 + r) : 0.0f);
            }
        }
    }
    return failed;
}

// A query tile: q and the result's gradient, and what has come together for its own.
struct QueryTile {
    Buffer q_copy, g_copy, scaled, dq, s, dp;
    Buffer given;  // scores before the score function
    TileRows q, g;
    double* lookup_sums = nullptr;
    bool q_finite = true, g_finite = true;
    float lse[TILE], delta[TILE];

    explicit QueryTile(const Call& c)
        : q_copy(buffer(TILE * padded(c.head_dim))), g_copy(buffer(TILE * padded(c.value_dim))),
          scaled(buffer(TILE * c.head_dim)), dq(buffer(TILE * padded(c.head_dim))),
          s(buffer(TILE * TILE)), dp(buffer(TILE * TILE)),
          given(buffer(c.score ? TILE * TILE : 0)) {}

    bool complete() const { return q_copy && g_copy && scaled && dq && s && dp && given; }

    void begin(const Call& c, int64_t b, int64_t h, int64_t i0, int count) {
        q = tile_rows(c.q, b, h, i0, c.q_len, c.head_dim, q_copy.get());
        scale_rows(q, c.head_dim, static_cast<float>(c.scale), scaled.get());
        q_finite = are_finite(q, c.head_dim);
        g = tile_rows(c.grad_out, b, h, i0, c.q_len, c.value_dim, g_copy.get());
        g_finite = are_finite(g, c.value_dim);
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
                int groups, const float* weights, const TileRows& values, int64_t width,
                float* to) {
    if (tile.bits && !finite)
        add_pairs(tile, weights, values, count, transposed, width, to);
    else if (transposed)
        add_transposed(weights, values, outline, groups, width, to);
    else
        add_products(weights, values, outline, groups, width, to, Added{});
}

// One tile's part of the gradients of a key head, whose sums for this tile are `dk` and `dv`.
template <bool DROPS>
void add_tile(const Call& c, QueryTile& own, const Tile& tile, int64_t b, int64_t h, int64_t i0,
              int count, const KeyTile& key, float* dk, float* dv) {
    const int groups = static_cast<int>(ceil_div(count, MR));
    const int64_t D = padded(c.head_dim), V = padded(c.value_dim);
    const Outline outline(tile, groups);
    float *s = own.s.get(), *dp = own.dp.get();
    products({own.scaled.get(), c.head_dim}, key.keys, outline, groups, c.head_dim, key.next_keys,
             s);
    products(own.g, key.values, outline, groups, c.value_dim, key.next_values, dp);
    const Scored scored(c, b, h, i0 / TILE, tile.j, outline, count);
    scored.change(s, own.given.get());
    const Kept kept(c, b, h, i0, tile.j * TILE);
    const auto weighed = tile.bits ? weigh_back<true, DROPS> : weigh_back<false, DROPS>;
    weighed(s, dp, tile, outline, count, groups, own.lse, own.delta, &kept,
            static_cast<float>(c.factor));
    scored.add_lookups(own.given.get(), dp, own.lookup_sums);
    scored.pull_back(own.given.get(), dp, tile);
    const auto sum = [&](bool transposed, bool finite, const float* weights,
                         const TileRows& values, int64_t width, float* to) {
        add(transposed, finite, tile, outline, count, groups, weights, values, width, to);
    };
    sum(true, own.g_finite, s, own.g, V, dv);
    sum(true, own.q_finite, dp, own.q, D, dk);
    sum(false, key.finite, dp, key.rows, D, own.dq.get());
}

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

// `count` rows of a tensor from row `first` on: `factor` times some sums, or 0 if there are none.
inline void write_tile(const Rows& x, int64_t b, int64_t g, int64_t first, int64_t count,
                       const float* sums, int64_t columns, float factor) {
    for (int64_t r = 0; r < count; r++) {
        if (sums) {
            write_row(x, b, g, first + r, sums + r * padded(columns), columns, factor);
            continue;
        }
        float* to = row_of<float>(x, b, g, first + r);
        for (int64_t d = 0; d < columns; d++) to[d * x.element] = 0;
    }
}

// The gradients of key heads [first, last) and their query heads; `shared` has their key tiles, if
// threads have none of their own.
template <bool DROPS>
int backward_heads(const Call& c, int64_t first, int64_t last, KeyTiles* shared, int64_t own_tiles,
                   int64_t shares, int64_t sum_size, float* sums) {
    const int64_t D = padded(c.head_dim), V = padded(c.value_dim), group = c.heads / c.kv_heads;
    const int64_t tiles = ceil_div(c.kv_len, TILE), tasks = (last - first) * shares;
    const int64_t size = c.sum_lookups ? c.lookup_sums_size : 0;
    std::vector<double> lookup_sums(tasks * size, 0.0);
    std::vector<char> begun(tasks * tiles, 0);  // sums of the others are not there
    // A task's sums for key tile j: all those of keys come before those of values.
    const auto sums_of = [&](int64_t n, int64_t j, bool of_values) {
        return sums + n * sum_size + (of_values ? tiles * D + j * V : j * D) * TILE;
    };
    int failed = 0;
#pragma omp parallel num_threads(c.threads) reduction(| : failed)
    {
        QueryTile own(c);
        FoundTiles found(c, true, shared, own_tiles);
        failed |= !own.complete() || !found.complete();
#pragma omp for schedule(dynamic, 1)
        for (int64_t n = 0; n < tasks; n++) {
            if (failed) continue;
            const int64_t head = n / shares, b = (first + head) / c.kv_heads;
            const int64_t g = (first + head) % c.kv_heads;
            own.lookup_sums = lookup_sums.data() + n * size;
            // Line after line: its tiles are mostly those of the line before.
            for (int64_t line = n % shares; line < c.lines; line += shares)
                for (int64_t h = g * group; h < (g + 1) * group; h++) {
                    const int64_t i0 = line * TILE;
                    const int count = static_cast<int>(std::min<int64_t>(TILE, c.q_len - i0));
                    own.begin(c, b, h, i0, count);
                    for_tiles(c, plane_of(c, b, h) * c.lines + line, [&](const Tile& tile) {
                        float* dk = sums_of(n, tile.j, false);
                        float* dv = sums_of(n, tile.j, true);
                        if (!begun[n * tiles + tile.j]) {
                            std::memset(dk, 0, TILE * D * sizeof(float));
                            std::memset(dv, 0, TILE * V * sizeof(float));
                            begun[n * tiles + tile.j] = 1;
                        }
                        add_tile<DROPS>(c, own, tile, b, h, i0, count,
                                        found.at(head, b, g, tile.j), dk, dv);
                    });
                    own.end(c, b, h, i0, count);
                }
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < size; i++)
            for (int64_t n = 0; n < tasks; n++) c.lookup_sums[i] += lookup_sums[n * size + i];
        // What the shares have summed up, in their order.
#pragma omp for schedule(static)
        for (int64_t n = 0; n < (last - first) * tiles; n++) {
            if (failed) continue;
            const int64_t head = n / tiles, j = n % tiles;
            const int64_t b = (first + head) / c.kv_heads, g = (first + head) % c.kv_heads;
            const int64_t count = std::min<int64_t>(TILE, c.kv_len - j * TILE);
            const auto write = [&](const Rows& x, bool of_values, int64_t columns, float factor) {
                float* total = nullptr;
                for (int64_t m = head * shares; m < (head + 1) * shares; m++) {
                    if (!begun[m * tiles + j]) continue;
                    float* part = sums_of(m, j, of_values);
                    for (int64_t i = 0; total && i < TILE * padded(columns); i++)
                        total[i] += part[i];
                    total = total ? total : part;
                }
                write_tile(x, b, g, j * TILE, count, total, columns, factor);
            };
            write(c.grad_k, false, c.head_dim, static_cast<float>(c.scale));
            write(c.grad_v, true, c.value_dim, 1.0f);
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
    const TilesOfLine line(c);
    const bool for_all = line.are_many();
    const int64_t packed = for_all ? tiles * KeyTiles::floats(c, true) : 0;
    const int64_t step = heads_at_once(c, (packed + sum_size) * 4, 1, 1);
    const int64_t shares = shares_of(c, step, sum_size);
    KeyTiles shared(c, true, true, for_all ? step * tiles : 0);
    const Buffer sums = buffer(step * shares * sum_size);
    if (!shared.memory || !sums) return 1;
    const std::vector<char> seen = for_all ? seen_tiles(c) : std::vector<char>();
    for (int64_t first = 0; first < heads; first += step) {
        const int64_t last = std::min(first + step, heads);
        if (for_all && !pack_all(c, seen, first, last, shared)) return 1;
        if (backward_heads<DROPS>(c, first, last, for_all ? &shared : nullptr, line.own(), shares,
                                  sum_size, sums.get()))
            return 1;
    }
    return 0;
}

}  // namespace
