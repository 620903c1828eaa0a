// The backward pass: one task per key head, or share of one, whose query tiles sweep through its key
// tiles in order, some together, and add to gradients of keys and values in memory of its own; five
// products for each tile.
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
struct BackwardTile {
    QueryTile tile;
    Buffer scaled, g_copy, dq;
    TileRows g;
    bool q_finite = true, g_finite = true;
    float lse[TILE], delta[TILE];

    explicit BackwardTile(const Call& c)
        : scaled(buffer(TILE * padded(c.head_dim))),
          g_copy(buffer(TILE * padded(c.value_dim))), dq(buffer(TILE * padded(c.head_dim))) {}

    bool complete() const { return scaled && g_copy && dq; }

    static int64_t bytes(const Call& c) {
        return TILE * (2 * padded(c.head_dim) + padded(c.value_dim)) * int64_t{sizeof(float)};
    }

    TileRows q(const Call& c) const { return {scaled.get(), padded(c.head_dim)}; }

    void begin(const Call& c, int64_t b, float* copy) {
        const int64_t h = tile.h, i0 = tile.i0;
        const TileRows given = tile_rows(c.q, b, h, i0, c.q_len, c.head_dim, copy, true);
        scale_rows(given, c.head_dim, static_cast<float>(c.scale), scaled.get());
        q_finite = are_finite(q(c), c.head_dim);
        g = tile_rows(c.grad_out, b, h, i0, c.q_len, c.value_dim, g_copy.get());
        g_finite = are_finite(g, c.value_dim);
        std::memset(dq.get(), 0, TILE * padded(c.head_dim) * sizeof(float));
        for (int r = 0; r < tile.count; r++) {
            const float x = number(c.lse, b, h, i0 + r);
            lse[r] = x == -INFINITY ? INFINITY : x;  // a row without scores has weights of 0
            delta[r] = number(c.delta, b, h, i0 + r);
        }
    }

    void end(const Call& c, int64_t b) const {
        for (int r = 0; r < tile.count; r++)
            write_row(c.grad_q, b, tile.h, tile.i0 + r, dq.get() + r * padded(c.head_dim),
                      c.head_dim, static_cast<float>(c.scale), c.has_former);
    }
};

// What one thread computes the gradients of key heads with.
template <bool DROPS>
struct BackwardSweeps {
    const Call& c;
    FoundTiles found;
    std::vector<BackwardTile> places;  // for the query tiles of a sweep
    const Buffer copy, s, dp;
    const Buffer given;  // scores before the score function
    double* lookup_sums = nullptr;

    BackwardSweeps(const Call& call, KeyTiles* shared, int64_t own, int64_t most)
        : c(call), found(call, true, shared, own), copy(buffer(TILE * padded(call.head_dim))),
          s(buffer(TILE * TILE)), dp(buffer(TILE * TILE)),
          given(buffer(call.score ? TILE * TILE : 0)) {
        for (int64_t i = 0; i < most; i++) places.emplace_back(call);
    }

    bool complete() const {
        bool all = found.complete() && copy && s && dp && given;
        for (const BackwardTile& x : places) all &= x.complete();
        return all;
    }

    // All lines of key head (b, g), the `head`-th of those that are packed, in blocks of `lines`. A
    // key tile is written as soon as it is complete.
    void compute(int64_t head, int64_t b, int64_t g, const Life& life, int64_t lines, Sums& sums) {
        const QueryTiles queries{c, b, g};
        size_t ended = 0;
        const auto write_until = [&](int64_t block) {
            for (; ended < life.ends.size() && life.ends[ended].block <= block; ended++) {
                Sums::write(c, b, g, life.ends[ended].tile, &sums, &sums + 1);
                sums.give_back(life.ends[ended].tile);
            }
        };
        write_until(-1);
        for (int64_t block = 0; block * lines < c.lines; block++) {
            Errands errands;
            for (size_t i = ended; i < life.ends.size() && life.ends[i].block == block; i++) {
                const int64_t j0 = int64_t{life.ends[i].tile} * TILE;
                if (errands.left() < 2 + 3 * MOST_SWEPT) break;  // three are each query tile's own
                errands.add(c.grad_k, b, g, j0, c.kv_len, c.head_dim, true);
                errands.add(c.grad_v, b, g, j0, c.kv_len, c.value_dim, true);
            }
            const int64_t end = std::min((block + 1) * lines, c.lines) * queries.group();
            compute_block(head, queries, block * lines * queries.group(), end, sums, errands);
            write_until(block);
        }
    }

    // Some lines of a key head: the sums are a part of its gradients.
    void compute_share(int64_t head, const QueryTiles& queries, Sums& sums) {
        const int64_t lines = ceil_div(c.lines - queries.line, queries.step);
        compute_block(head, queries, 0, lines * queries.group(), sums, Errands());
    }

   private:
    // Query tiles [begin, end), as many at once as there are places. `last` is what to ask for in the
    // last sweep.
    void compute_block(int64_t head, const QueryTiles& queries, int64_t begin, int64_t end,
                       Sums& sums, const Errands& last) {
        const int64_t most = static_cast<int64_t>(places.size());
        for (; begin < end; begin += most) {
            const bool is_last = begin + most >= end;
            compute_sweep(head, queries, begin, std::min(begin + most, end), sums,
                          is_last ? last : Errands());
        }
    }

    void compute_sweep(int64_t head, const QueryTiles& queries, int64_t begin, int64_t end,
                       Sums& sums, Errands errands) {
        const int64_t b = queries.b, g = queries.g;
        BackwardTile* last = places.data();
        int64_t visits = 0;
        for (int64_t n = begin; n < end; n++) {
            last->tile = queries.at(n);
            const int64_t h = last->tile.h, i0 = last->tile.i0;
            const int64_t tiles = tiles_of(c, last->tile.place);
            if (c.has_former && tiles == 0) continue;
            last->begin(c, b, copy.get());
            errands.add(c.grad_q, b, h, i0, c.q_len, c.head_dim, true);
            visits += tiles, last++;
        }
        for (int64_t n = end; n < 2 * end - begin && queries.has(n); n++) {
            const int64_t h = queries.head(n), i0 = queries.line_of(n) * TILE;
            errands.add(c.q, b, h, i0, c.q_len, c.head_dim, false);
            errands.add(c.grad_out, b, h, i0, c.q_len, c.value_dim, false);
        }
        errands.spread(visits * (2 * TURNS_OF_PRODUCTS + 2 * turns_of_rows(c.head_dim) +
                                 turns_of_rows(c.value_dim)));
        sweep(places.data(), last, [&](BackwardTile& x, const Tile& tile, bool is_first) {
            sums.begin(tile.j);
            add_tile(x, b, tile, found.at(head, b, g, tile.j), sums.keys(tile.j),
                     sums.values(tile.j), is_first, errands);
        });
        for (BackwardTile* x = places.data(); x != last; x++) x->end(c, b);
    }

    // One tile's part of the gradients of a key head, whose sums for this tile are `dk` and `dv`.
    void add_tile(BackwardTile& x, int64_t b, const Tile& tile, const KeyTile& key, float* dk,
                  float* dv, bool is_first, Errands& errands) {
        const QueryTile& at = x.tile;
        const int64_t D = padded(c.head_dim), V = padded(c.value_dim);
        const Outline outline(tile, at.groups);
        float *weights = s.get(), *slopes = dp.get();
        products(x.q(c), key.keys, outline, at.groups, c.head_dim,
                 is_first ? &key.next_keys : nullptr, weights, errands);
        products(x.g, key.values, outline, at.groups, c.value_dim,
                 is_first ? &key.next_values : nullptr, slopes, errands);
        const Scored scored(c, b, at.h, at.line, tile.j, outline, at.count);
        scored.change(weights, given.get());
        const Kept kept(c, b, at.h, at.i0, tile.j * TILE);
        const auto weighed = tile.bits ? weigh_back<true, DROPS> : weigh_back<false, DROPS>;
        weighed(weights, slopes, tile, outline, at.count, at.groups, x.lse, x.delta, &kept,
                static_cast<float>(c.factor));
        scored.add_lookups(given.get(), slopes, lookup_sums);
        scored.pull_back(given.get(), slopes, tile);
        // Over all of the tile, or over its pairs where the rest may not be finite.
        const auto add = [&](bool transposed, bool finite, const float* of, const TileRows& values,
                             int64_t width, float* to) {
            if (tile.bits && !finite)
                add_pairs(tile, of, values, at.count, transposed, width, to);
            else if (transposed)
                add_transposed(of, values, outline, at.groups, width, to, is_first, errands);
            else
                add_products(of, values, outline, at.groups, width, to, Added{}, is_first, errands);
        };
        add(true, x.g_finite, weights, x.g, V, dv);
        add(true, x.q_finite, slopes, x.q(c), D, dk);
        add(false, key.finite, slopes, key.rows, D, x.dq.get());
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
        BackwardSweeps<DROPS> sweeps(c, shared, own_tiles, swept_at_once(BackwardTile::bytes(c)));
        failed |= !sweeps.complete();
#pragma omp for schedule(dynamic, 1)
        for (int64_t n = 0; n < tasks; n++) {
            if (failed) continue;
            const int64_t head = n / shares, b = (first + head) / c.kv_heads;
            const int64_t g = (first + head) % c.kv_heads;
            sweeps.lookup_sums = lookup_sums.data() + n * size;
            if (shares == 1)
                sweeps.compute(head, b, g, cut.life(first + head), cut.lines, sums[thread]);
            else
                sweeps.compute_share(head, {c, b, g, n % shares, shares}, sums[n]);
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
    const Tasks cut(c, for_all ? tiles * KeyTiles::floats(c, true) * int64_t{sizeof(float)} : 0,
                    swept_at_once(BackwardTile::bytes(c)));
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
