// The forward pass: a task has some query tiles, which sweep through their key tiles together.
#pragma once

#include "scored.h"

namespace {

constexpr float LOWEST = -3.402823466e38f;  // no score is below it: a row that has seen nothing

// Places for a number of each row of a group, in whole vectors.
constexpr int PLACES = (MR + WIDTH - 1) / WIDTH * WIDTH;

// The state of a query tile's rows.
struct Softmax {
    float highest[TILE + PLACES] = {}, sum[TILE + PLACES] = {}, shrink[TILE + PLACES] = {};
    int64_t width;
    Buffer out;  // [TILE][width], to be divided by `sum`

    explicit Softmax(int64_t value_dim) : width(padded(value_dim)), out(buffer(TILE * width)) {}

    void begin(const Call& c, int64_t b, int64_t h, int64_t i0, int count) {
        std::memset(out.get(), 0, TILE * width * sizeof(float));
        for (int r = 0; r < TILE; r++) {
            highest[r] = LOWEST, sum[r] = 0, shrink[r] = 1;
            const float lse = c.has_former && r < count ? number(c.lse, b, h, i0 + r) : -INFINITY;
            if (lse == -INFINITY) continue;
            highest[r] = lse, sum[r] = 1;
            const float* from = row_of<float>(c.out, b, h, i0 + r);
            for (int64_t d = 0; d < c.value_dim; d++) out[r * width + d] = from[d * c.out.element];
        }
    }

    void end(const Call& c, int64_t b, int64_t h, int64_t i0, int count) {
        for (int r = 0; r < count; r++) {
            const bool nothing = sum[r] == 0;
            float* row = out.get() + r * width;
            if (nothing) std::memset(row, 0, width * sizeof(float));
            write_row(c.out, b, h, i0 + r, row, c.value_dim, nothing ? 1.0f : 1.0f / sum[r]);
            number(c.lse, b, h, i0 + r) = nothing ? -INFINITY : highest[r] + std::log(sum[r]);
            if (c.largest.data)
                number(c.largest, b, h, i0 + r) =
                    nothing ? -INFINITY : std::isnan(sum[r]) ? sum[r] : highest[r];
        }
    }

    // Takes in the highest scores of a group's rows: where they are higher than all before, what was
    // summed up is to be made smaller. Rows past the group are given LOWEST, and stay. `less` is what
    // to subtract from scores: a row that has seen nothing has no highest one.
    void raise(int r0, Vec* tops, float* less, const Limits& limits) {
        for (int i = 0; i < MR; i += WIDTH) {
            const Vec before = load_anywhere(highest + r0 + i), top = joined(tops + i, larger);
            const IntVec higher = top > before;
            const Vec now = higher ? top : before;
            store_anywhere(highest + r0 + i, now);
            store_anywhere(shrink + r0 + i, higher ? exp_of(before - top, limits) : splat(1.0f));
            store(less + i, now > splat(LOWEST) ? now : Vec{});
        }
    }

    // Takes in the sums of a group's weights; those of rows past it are 0.
    void add(int r0, Vec* sums) {
        for (int i = 0; i < MR; i += WIDTH) {
            const Vec before = load_anywhere(sum + r0 + i) * load_anywhere(shrink + r0 + i);
            store_anywhere(sum + r0 + i, before + joined(sums + i, sum_of));
        }
    }

    // Makes the sums of values as much smaller, where no product does.
    void shrink_out(const Outline& outline, int count) {
        for (int r = 0; r < count; r++) {
            float* row = out.get() + r * width;
            if (!outline.vectors[r / MR]) continue;
            for (int64_t d = 0; d < width; d += WIDTH) store(row + d, load(row + d) * shrink[r]);
        }
    }
};

// Fills the places past those of `rows`, of which there are mostly MR.
inline void fill_past(Vec* of_rows, int rows, Vec with) {
#pragma GCC unroll 16
    for (int i = MR; i < PLACES; i++) of_rows[i] = with;
    for (int i = rows; __builtin_expect(i < MR, 0); i++) of_rows[i] = with;
}

// Scores of a tile to weights, in place. All rows of a group have their highest score before the
// first has its weights: the processor does several at a time, which one row alone can't offer.
template <bool PARTIAL, bool DROPS>
void weigh(float* s, Softmax& rows, const Tile& tile, const Outline& outline, int count,
           const Kept* kept, float factor) {
    const Limits limits;
    for (int r0 = 0; r0 < count; r0 += MR) {
        const int begin = PARTIAL ? outline.first[r0 / MR] : 0;
        const int end = PARTIAL ? outline.last[r0 / MR] : TILE;
        if (PARTIAL && begin == end) continue;
        const int upto = std::min(r0 + MR, count);
        for (int j = begin; PARTIAL && j < end; j += WIDTH) {
            if (outline.whole[r0 / MR] >> j / WIDTH & 1) continue;
            for (int r = r0; r < upto; r++) {
                float* x = s + r * TILE + j;
                store(x, tile.allowed(r, j) ? load(x) : splat(-INFINITY));
            }
        }
        Vec of_rows[PLACES];
        fill_past(of_rows, upto - r0, splat(LOWEST));
        for (int r = r0; r < upto; r++) {
            const float* row = s + r * TILE;
            Vec top = splat(LOWEST);
#pragma GCC unroll 6
            for (int j = begin; j < end; j += WIDTH) top = larger(load(row + j), top);
            of_rows[r - r0] = top;
        }
        alignas(sizeof(Vec)) float less[PLACES];
        rows.raise(r0, of_rows, less, limits);
        fill_past(of_rows, upto - r0, Vec{});
        for (int r = r0; r < upto; r++) {
            float* row = s + r * TILE;
            const Vec lower = splat(less[r - r0]);
            Vec sum = {};
#pragma GCC unroll 6
            for (int j = begin; j < end; j += WIDTH) {
                Vec p = exp_of(load(row + j) - lower, limits);
                sum += p;
                if (DROPS) p = kept->of(r, j) ? p * factor : Vec{};
                store(row + j, p);
            }
            of_rows[r - r0] = sum;
        }
        rows.add(r0, of_rows);
    }
}

// A query tile and what has come together for it.
struct ForwardTile {
    QueryTile tile;
    Softmax rows;
    Buffer queries;  // scaled

    explicit ForwardTile(const Call& c)
        : rows(c.value_dim), queries(buffer(TILE * padded(c.head_dim))) {}

    static int64_t bytes(const Call& c) {
        return TILE * (padded(c.head_dim) + padded(c.value_dim)) * int64_t{sizeof(float)};
    }

    void begin(const Call& c, int64_t b, float* copy) {
        const TileRows given = tile_rows(c.q, b, tile.h, tile.i0, c.q_len, c.head_dim, copy, true);
        scale_rows(given, c.head_dim, static_cast<float>(c.scale), queries.get());
        rows.begin(c, b, tile.h, tile.i0, tile.count);
    }
};

// What one thread computes query tiles with.
template <bool DROPS>
struct ForwardSweeps {
    const Call& c;
    FoundTiles found;
    std::vector<ForwardTile> places;  // for the query tiles of a sweep
    const Buffer copy, s;

    ForwardSweeps(const Call& call, KeyTiles* shared, int64_t own, int64_t most)
        : c(call), found(call, false, shared, own),
          copy(buffer(TILE * padded(call.head_dim))), s(buffer(TILE * TILE)) {
        for (int64_t i = 0; i < most; i++) places.emplace_back(call);
    }

    bool complete() const {
        bool all = found.complete() && copy && s;
        for (const ForwardTile& x : places) all &= x.rows.out && x.queries;
        return all;
    }

    // Query tiles [begin, end) of a key head, the `head`-th of those that are packed.
    void compute(int64_t head, const QueryTiles& queries, int64_t begin, int64_t end) {
        const int64_t most = static_cast<int64_t>(places.size());
        for (; begin < end; begin += most)
            compute_sweep(head, queries, begin, std::min(begin + most, end),
                          std::min(begin + 2 * most, end));
    }

   private:
    // Query tiles [begin, end); those up to `next` come after them.
    void compute_sweep(int64_t head, const QueryTiles& queries, int64_t begin, int64_t end,
                       int64_t next) {
        const int64_t b = queries.b, g = queries.g;
        Errands errands;
        ForwardTile* last = places.data();
        int64_t visits = 0;
        for (int64_t n = begin; n < end; n++) {
            last->tile = queries.at(n);
            const int64_t tiles = tiles_of(c, last->tile.place);
            if (c.has_former && tiles == 0) continue;
            last->begin(c, b, copy.get());
            errands.add(c.out, b, last->tile.h, last->tile.i0, c.q_len, c.value_dim, true);
            visits += tiles, last++;
        }
        for (int64_t n = end; n < next; n++)
            errands.add(c.q, b, queries.head(n), queries.line_of(n) * TILE, c.q_len, c.head_dim,
                        false);
        errands.spread(visits * (TURNS_OF_PRODUCTS + turns_of_rows(padded(c.value_dim))));
        sweep(places.data(), last, [&](ForwardTile& x, const Tile& tile, bool is_first) {
            add_tile(x, b, tile, found.at(head, b, g, tile.j), is_first, errands);
        });
        for (ForwardTile* x = places.data(); x != last; x++)
            x->rows.end(c, b, x->tile.h, x->tile.i0, x->tile.count);
    }

    void add_tile(ForwardTile& x, int64_t b, const Tile& tile, const KeyTile& key, bool is_first,
                  Errands& errands) {
        const QueryTile& at = x.tile;
        Softmax& rows = x.rows;
        const Outline outline(tile, at.groups);
        products({x.queries.get(), padded(c.head_dim)}, key.keys, outline, at.groups, c.head_dim,
                 is_first ? &key.next_keys : nullptr, s.get(), errands);
        Scored(c, b, at.h, at.line, tile.j, outline, at.count).change(s.get());
        const Kept kept(c, b, at.h, at.i0, tile.j * TILE);
        const auto weighed = tile.bits ? weigh<true, DROPS> : weigh<false, DROPS>;
        weighed(s.get(), rows, tile, outline, at.count, &kept, static_cast<float>(c.factor));
        if (tile.bits && !key.finite) {
            rows.shrink_out(outline, at.count);
            add_pairs(tile, s.get(), key.rows, at.count, false, rows.width, rows.out.get());
        } else {
            add_products(s.get(), key.rows, outline, at.groups, rows.width, rows.out.get(),
                         AddedToPart{rows.shrink}, is_first, errands);
        }
    }
};

// The query tiles of a key head in stretches, those with the most key tiles first.
inline std::vector<int64_t> longest_first(const QueryTiles& queries, int64_t size) {
    const int64_t count = queries.group() * queries.c.lines;
    std::vector<std::pair<int64_t, int64_t>> stretches;
    for (int64_t begin = 0; begin < count; begin += size) {
        int64_t tiles = 0;
        for (int64_t n = begin; n < std::min(begin + size, count); n++)
            tiles += tiles_of(queries.c, queries.at(n).place);
        stretches.emplace_back(-tiles, begin);
    }
    std::sort(stretches.begin(), stretches.end());
    std::vector<int64_t> found;
    for (const auto& stretch : stretches) found.push_back(stretch.second);
    return found;
}

// Key heads [first, last), in tasks of `size` query tiles. `shared` has their key tiles; without it
// threads have `own` places each.
template <bool DROPS>
int forward_heads(const Call& c, int64_t first, int64_t last, KeyTiles* shared, int64_t own,
                  int64_t size) {
    const int64_t most = std::min(size, swept_at_once(ForwardTile::bytes(c)));
    const bool alike = planes_of(c) == 1;
    std::vector<std::vector<int64_t>> begins;  // of the tasks of every head, or one for all
    for (int64_t head = first; head < (alike ? first + 1 : last); head++)
        begins.push_back(longest_first({c, head / c.kv_heads, head % c.kv_heads}, size));
    const int64_t tasks = static_cast<int64_t>(begins[0].size());
    const int64_t end = c.heads / c.kv_heads * c.lines;
    int failed = 0;
#pragma omp parallel num_threads(c.threads) reduction(| : failed)
    {
        ForwardSweeps<DROPS> sweeps(c, shared, own, most);
        failed |= !sweeps.complete();
#pragma omp for schedule(dynamic, 1)
        for (int64_t n = 0; n < (last - first) * tasks; n++) {
            if (failed) continue;
            const int64_t head = n / tasks, begin = begins[alike ? 0 : head][n % tasks];
            const QueryTiles queries{c, (first + head) / c.kv_heads, (first + head) % c.kv_heads};
            sweeps.compute(head, queries, begin, std::min(begin + size, end));
        }
    }
    return failed;
}

constexpr int64_t LINES_OF_THREAD = 16;  // so many are even enough, the longest first
constexpr int64_t STRETCHES_OF_THREAD = 8, LINES_OF_STRETCH = 16;

template <bool DROPS>
int forward(const Call& c) {
    const int64_t heads = c.batch * c.kv_heads, tiles = ceil_div(c.kv_len, TILE);
    const int64_t of_head = c.heads / std::max<int64_t>(c.kv_heads, 1) * c.lines;
    if (heads == 0 || of_head == 0) return 0;
    const TilesOfLine line(c);
    if (!line.are_many()) {
        // Stretches of lines, whose key tiles are mostly those of the line before.
        const int64_t lines = std::clamp<int64_t>(
            heads * c.lines / (c.threads * STRETCHES_OF_THREAD), 1, LINES_OF_STRETCH);
        return forward_heads<DROPS>(c, 0, heads, nullptr, line.own(), lines * of_head / c.lines);
    }
    const int64_t head_bytes = tiles * KeyTiles::floats(c, false) * 4;
    const int64_t step = heads_at_once(c, head_bytes, of_head, LINES_OF_THREAD);
    const int64_t most = swept_at_once(ForwardTile::bytes(c));
    const int64_t size =
        c.threads == 1 ? most
                       : std::clamp<int64_t>(step * of_head / (c.threads * LINES_OF_THREAD), 1, most);
    KeyTiles shared(c, false, true, step * tiles);
    if (!shared.memory) return 1;
    const std::vector<char> seen = seen_tiles(c);
    for (int64_t first = 0; first < heads; first += step) {
        const int64_t last = std::min(first + step, heads);
        if (!pack_all(c, seen, first, last, shared)) return 1;
        if (forward_heads<DROPS>(c, first, last, &shared, 0, size)) return 1;
    }
    return 0;
}

}  // namespace
