// The forward pass: one task per query tile and head, which goes through its tiles in order.
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

// What one thread computes lines with.
template <bool DROPS>
struct ForwardLines {
    const Call& c;
    FoundTiles found;
    Softmax rows;
    const Buffer copy, queries, s;

    ForwardLines(const Call& call, KeyTiles* shared, int64_t own)
        : c(call), found(call, false, shared, own), rows(call.value_dim),
          copy(buffer(TILE * padded(call.head_dim))), queries(buffer(TILE * call.head_dim)),
          s(buffer(TILE * TILE)) {}

    bool complete() const { return found.complete() && rows.out && copy && queries && s; }

    // A line of query head (b, h), whose key head is the `head`-th of those that are packed; after it
    // comes a line of another head or the same one, or none if it is past the last.
    void compute(int64_t head, int64_t b, int64_t h, int64_t line, int64_t next_h,
                 int64_t next_line) {
        const int64_t g = h / (c.heads / c.kv_heads), i0 = line * TILE;
        const int count = static_cast<int>(std::min<int64_t>(TILE, c.q_len - i0));
        const int groups = static_cast<int>(ceil_div(count, MR));
        const int64_t place = plane_of(c, b, h) * c.lines + line, tiles = tiles_of(c, place);
        if (c.has_former && tiles == 0) return;
        const TileRows given = tile_rows(c.q, b, h, i0, c.q_len, c.head_dim, copy.get(), true);
        scale_rows(given, c.head_dim, static_cast<float>(c.scale), queries.get());
        rows.begin(c, b, h, i0, count);
        Errands errands;
        errands.add(c.out, b, h, i0, c.q_len, c.value_dim, true);
        errands.add(c.q, b, next_h, next_line * TILE, c.q_len, c.head_dim, false);
        errands.spread(tiles * (TURNS_OF_PRODUCTS + turns_of_rows(rows.width)));
        for_tiles(c, place, [&](const Tile& tile) {
            const KeyTile& key = found.at(head, b, g, tile.j);
            const Outline outline(tile, groups);
            products({queries.get(), c.head_dim}, key.keys, outline, groups, c.head_dim,
                     key.next_keys, s.get(), errands);
            Scored(c, b, h, line, tile.j, outline, count).change(s.get());
            const Kept kept(c, b, h, i0, tile.j * TILE);
            const auto weighed = tile.bits ? weigh<true, DROPS> : weigh<false, DROPS>;
            weighed(s.get(), rows, tile, outline, count, &kept, static_cast<float>(c.factor));
            if (tile.bits && !key.finite) {
                rows.shrink_out(outline, count);
                add_pairs(tile, s.get(), key.rows, count, false, rows.width, rows.out.get());
            } else {
                add_products(s.get(), key.rows, outline, groups, rows.width, rows.out.get(),
                             AddedToPart{rows.shrink}, errands);
            }
        });
        rows.end(c, b, h, i0, count);
    }
};

constexpr int64_t LINES_OF_THREAD = 16;  // so many are even enough, the longest first

// The query heads of key heads [first, last), of which `shared` has the key tiles: line by line, the
// longest first.
template <bool DROPS>
int forward_heads(const Call& c, int64_t first, int64_t last, KeyTiles& shared) {
    const int64_t group = c.heads / c.kv_heads;
    int failed = 0;
#pragma omp parallel num_threads(c.threads) reduction(| : failed)
    {
        ForwardLines<DROPS> lines(c, &shared, 0);
        failed |= !lines.complete();
#pragma omp for schedule(dynamic, 1)
        for (int64_t n = 0; n < (last - first) * group * c.lines; n++) {
            if (failed) continue;
            const int64_t head = n / c.lines / group, b = (first + head) / c.kv_heads;
            const int64_t h = (first + head) % c.kv_heads * group + n / c.lines % group;
            const int64_t line = c.order[plane_of(c, b, h) * c.lines + n % c.lines];
            lines.compute(head, b, h, line, h, c.lines);
        }
    }
    return failed;
}

constexpr int64_t STRETCHES_OF_THREAD = 8, LINES_OF_STRETCH = 16;

// All heads, each thread with key tiles of its own: stretches of lines, whose tiles are mostly those
// of the line before.
template <bool DROPS>
int forward_stretches(const Call& c, int64_t own) {
    const int64_t group = c.heads / c.kv_heads, heads = c.batch * c.kv_heads;
    const int64_t size = std::clamp<int64_t>(heads * c.lines / (c.threads * STRETCHES_OF_THREAD), 1,
                                             LINES_OF_STRETCH);
    const int64_t stretches = ceil_div(c.lines, size);
    int failed = 0;
#pragma omp parallel num_threads(c.threads) reduction(| : failed)
    {
        ForwardLines<DROPS> lines(c, nullptr, own);
        failed |= !lines.complete();
#pragma omp for schedule(dynamic, 1)
        for (int64_t n = 0; n < heads * stretches; n++) {
            if (failed) continue;
            const int64_t b = n / stretches / c.kv_heads, g = n / stretches % c.kv_heads;
            const int64_t begin = n % stretches * size, end = std::min(begin + size, c.lines);
            for (int64_t line = begin; line < end; line++)
                for (int64_t h = g * group; h < (g + 1) * group; h++) {
                    const bool is_last = h + 1 == (g + 1) * group;
                    lines.compute(0, b, h, line, is_last ? g * group : h + 1, line + is_last);
                }
        }
    }
    return failed;
}

template <bool DROPS>
int forward(const Call& c) {
    const int64_t heads = c.batch * c.kv_heads, tiles = ceil_div(c.kv_len, TILE);
    if (heads == 0) return 0;
    const TilesOfLine line(c);
    if (!line.are_many()) return forward_stretches<DROPS>(c, line.own());
    const int64_t head_bytes = tiles * KeyTiles::floats(c, false) * 4;
    const int64_t step = heads_at_once(c, head_bytes, c.heads / c.kv_heads * c.lines,
                                       LINES_OF_THREAD);
    KeyTiles shared(c, false, true, step * tiles);
    if (!shared.memory) return 1;
    const std::vector<char> seen = seen_tiles(c);
    for (int64_t first = 0; first < heads; first += step) {
        const int64_t last = std::min(first + step, heads);
        if (!pack_all(c, seen, first, last, shared)) return 1;
        if (forward_heads<DROPS>(c, first, last, shared)) return 1;
    }
    return 0;
}

}  // namespace
