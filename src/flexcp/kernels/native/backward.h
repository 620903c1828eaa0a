// The backward pass: one task per key head, or share of one, which goes through its query tiles in
// order and adds to the gradients of keys and values in memory of its own; five products for each
// tile.
#pragma once

#include "scored.h"
#include "sums.h"

namespace {

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
                float* to, Errands& errands) {
    if (tile.bits && !finite)
        add_pairs(tile, weights, values, count, transposed, width, to);
    else if (transposed)
        add_transposed(weights, values, outline, groups, width, to, errands);
    else
        add_products(weights, values, outline, groups, width, to, Added{}, errands);
}

// One tile's part of the gradients of a key head, whose sums for this tile are `dk` and `dv`.
template <bool DROPS>
void add_tile(const Call& c, QueryTile& own, const Tile& tile, int64_t b, int64_t h, int64_t i0,
              int count, const KeyTile& key, float* dk, float* dv, Errands& errands) {
    const int groups = static_cast<int>(ceil_div(count, MR));
    const int64_t D = padded(c.head_dim), V = padded(c.value_dim);
    const Outline outline(tile, groups);
    float *s = own.s.get(), *dp = own.dp.get();
    products({own.scaled.get(), c.head_dim}, key.keys, outline, groups, c.head_dim, key.next_keys,
             s, errands);
    products(own.g, key.values, outline, groups, c.value_dim, key.next_values, dp, errands);
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
        add(transposed, finite, tile, outline, count, groups, weights, values, width, to, errands);
    };
    sum(true, own.g_finite, s, own.g, V, dv);
    sum(true, own.q_finite, dp, own.q, D, dk);
    sum(false, key.finite, dp, key.rows, D, own.dq.get());
}

// What one thread computes the gradients of key heads with.
template <bool DROPS>
struct BackwardLines {
    const Call& c;
    FoundTiles found;
    QueryTile own;

    BackwardLines(const Call& call, KeyTiles* shared, int64_t own_tiles)
        : c(call), found(call, true, shared, own_tiles), own(call) {}

    bool complete() const { return found.complete() && own.complete(); }

    // All lines of key head (b, g), the `head`-th of those that are packed. A tile is written as soon
    // as it is complete.
    void compute(int64_t head, int64_t b, int64_t g, const Life& life, Sums& sums) {
        size_t ended = 0;
        const auto write_until = [&](int64_t line) {
            for (; ended < life.ends.size() && life.ends[ended].line <= line; ended++) {
                Sums::write(c, b, g, life.ends[ended].tile, &sums, &sums + 1);
                sums.give_back(life.ends[ended].tile);
            }
        };
        write_until(-1);
        for (int64_t line = 0; line < c.lines; line++) {
            Errands errands;
            for (size_t i = ended; i < life.ends.size() && life.ends[i].line == line; i++) {
                const int64_t j0 = int64_t{life.ends[i].tile} * TILE;
                if (errands.left() < 2 + 3) break;  // three are every line's own
                errands.add(c.grad_k, b, g, j0, c.kv_len, c.head_dim, true);
                errands.add(c.grad_v, b, g, j0, c.kv_len, c.value_dim, true);
            }
            compute_line(head, b, g, line, 1, sums, errands);
            write_until(line);
        }
    }

    // Every `shares`-th line, from `share` on: its sums are a part of the gradients.
    void compute_share(int64_t head, int64_t b, int64_t g, int64_t share, int64_t shares,
                       Sums& sums) {
        for (int64_t line = share; line < c.lines; line += shares)
            compute_line(head, b, g, line, shares, sums, Errands());
    }

   private:
    // A line of all query heads of a key head. Line after line: its tiles are mostly those of the
    // line before. `last` is what to ask for in the last one.
    void compute_line(int64_t head, int64_t b, int64_t g, int64_t line, int64_t step, Sums& sums,
                      const Errands& last) {
        const int64_t group = c.heads / c.kv_heads, h0 = g * group, h1 = h0 + group;
        for (int64_t h = h0; h < h1; h++) {
            const bool is_last = h + 1 == h1;
            const int64_t next_h = is_last ? h0 : h + 1;
            const int64_t i0 = line * TILE, next = (is_last ? line + step : line) * TILE;
            const int64_t place = plane_of(c, b, h) * c.lines + line, tiles = tiles_of(c, place);
            if (c.has_former && tiles == 0) continue;
            Errands errands = is_last ? last : Errands();
            errands.add(c.q, b, next_h, next, c.q_len, c.head_dim, false);
            errands.add(c.grad_out, b, next_h, next, c.q_len, c.value_dim, false);
            errands.add(c.grad_q, b, h, i0, c.q_len, c.head_dim, true);
            errands.spread(tiles * (2 * TURNS_OF_PRODUCTS + 2 * turns_of_rows(c.head_dim) +
                                    turns_of_rows(c.value_dim)));
            const int count = static_cast<int>(std::min<int64_t>(TILE, c.q_len - i0));
            own.begin(c, b, h, i0, count);
            for_tiles(c, place, [&](const Tile& tile) {
                sums.begin(tile.j);
                add_tile<DROPS>(c, own, tile, b, h, i0, count, found.at(head, b, g, tile.j),
                                sums.keys(tile.j), sums.values(tile.j), errands);
            });
            own.end(c, b, h, i0, count);
        }
    }
};

// The gradients of key heads [first, last) and their query heads; `shared` has their key tiles, if
// threads have none of their own.
template <bool DROPS>
int backward_heads(const Call& c, int64_t first, int64_t last, KeyTiles* shared, int64_t own_tiles,
                   const Tasks& cut, std::vector<Sums>& sums) {
    const int64_t tiles = ceil_div(c.kv_len, TILE), shares = cut.shares;
    const int64_t tasks = (last - first) * shares;
    const int64_t size = c.sum_lookups ? c.lookup_sums_size : 0;
    std::vector<double> lookup_sums(tasks * size, 0.0);
    int64_t begun = 0;
    int failed = 0;
#pragma omp parallel num_threads(cut.threads) reduction(| : failed)
    {
        int64_t thread;
#pragma omp atomic capture
        thread = begun++;
        BackwardLines<DROPS> lines(c, shared, own_tiles);
        failed |= !lines.complete();
#pragma omp for schedule(dynamic, 1)
        for (int64_t n = 0; n < tasks; n++) {
            if (failed) continue;
            const int64_t head = n / shares, b = (first + head) / c.kv_heads;
            const int64_t g = (first + head) % c.kv_heads;
            lines.own.lookup_sums = lookup_sums.data() + n * size;
            if (shares == 1)
                lines.compute(head, b, g, cut.life(first + head), sums[thread]);
            else
                lines.compute_share(head, b, g, n % shares, shares, sums[n]);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < size; i++)
            for (int64_t n = 0; n < tasks; n++) c.lookup_sums[i] += lookup_sums[n * size + i];
        // What the shares have summed up, in their order.
#pragma omp for schedule(static)
        for (int64_t n = 0; n < (shares > 1 ? last - first : 0) * tiles; n++) {
            if (failed) continue;
            const int64_t head = n / tiles, b = (first + head) / c.kv_heads;
            Sums* of_head = sums.data() + head * shares;
            Sums::write(c, b, (first + head) % c.kv_heads, n % tiles, of_head, of_head + shares);
        }
    }
    for (int64_t n = 0; shares > 1 && n < tasks; n++)
        for (int64_t j = 0; j < tiles; j++) sums[n].give_back(j);
    return failed;
}

template <bool DROPS>
int backward(const Call& c) {
    const int64_t tiles = ceil_div(c.kv_len, TILE), heads = c.batch * c.kv_heads;
    if (heads == 0) return 0;
    const TilesOfLine line(c);
    const bool for_all = line.are_many();
    const Tasks cut(c, for_all ? tiles * KeyTiles::floats(c, true) * int64_t{sizeof(float)} : 0);
    KeyTiles shared(c, true, true, for_all ? cut.heads * tiles : 0);
    const int64_t size = Sums::floats(c, cut.places);
    const Buffer memory = buffer(cut.sums() * size);
    if (!shared.memory || !memory) return 1;
    std::vector<Sums> sums;
    for (int64_t n = 0; n < cut.sums(); n++) sums.emplace_back(c, cut.places, memory.get() + n * size);
    const std::vector<char> seen = for_all ? seen_tiles(c) : std::vector<char>();
    for (int64_t first = 0; first < heads; first += cut.heads) {
        const int64_t last = std::min(first + cut.heads, heads);
        if (for_all && !pack_all(c, seen, first, last, shared)) return 1;
        if (backward_heads<DROPS>(c, first, last, for_all ? &shared : nullptr, line.own(), cut,
                                  sums))
            return 1;
    }
    return 0;
}

}  // namespace
