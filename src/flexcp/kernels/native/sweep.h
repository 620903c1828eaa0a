// Sweeps: query tiles that go through the key tiles together. A key tile, and the sums of its
// gradients, then come from the third cache once for all of them, and stay in the second one between.
// Query tiles one by one, where 4 ranks shared 2 cores, waited for them a seventh of the time.
#pragma once

#include "tiles.h"

namespace {

// What a query tile keeps until its sweep ends is at most so much of the second cache, in all.
constexpr int64_t SWEEP_BYTES = 384 << 10;
constexpr int64_t MOST_SWEPT = 8;

// How many query tiles of so many bytes a sweep has.
inline int64_t swept_at_once(int64_t bytes) {
    return std::clamp<int64_t>(SWEEP_BYTES / std::max<int64_t>(bytes, 1), 1, MOST_SWEPT);
}

constexpr int64_t NO_TILE = INT64_MAX;

// The tiles of a line in the order of keys, one after the other.
class LineTiles {
    const Call* c = nullptr;
    int64_t run = 0, last_run = 0, partial = 0, last_partial = 0;
    int64_t full = NO_TILE;  // the next full one

    int64_t begin_of_run() const { return run < last_run ? c->full_tile[run] : NO_TILE; }
    int64_t next_partial() const { return partial < last_partial ? c->partial_tile[partial] : NO_TILE; }

   public:
    LineTiles() = default;
    LineTiles(const Call& call, int64_t place)
        : c(&call), run(call.full_start[place]), last_run(call.full_start[place + 1]),
          partial(call.partial_start[place]), last_partial(call.partial_start[place + 1]),
          full(begin_of_run()) {}

    // Which key tile the next one is: NO_TILE after the last.
    int64_t next() const { return std::min(full, next_partial()); }

    Tile take() {
        if (next_partial() < full) {
            const int64_t pattern = c->partial_pattern[partial];
            return {c->partial_tile[partial++], c->patterns + pattern * WORDS * TILE};
        }
        const Tile found{full, nullptr};
        if (++full == c->full_stop[run]) run++, full = begin_of_run();
        return found;
    }
};

// A query tile: where it is, and which of its key tiles are still to come.
struct QueryTile {
    int64_t h = 0, line = 0, i0 = 0;
    int64_t place = 0;  // of its line, among those of all planes
    int count = 0, groups = 0;
    LineTiles left;

    QueryTile() = default;
    QueryTile(const Call& c, int64_t b, int64_t query_head, int64_t its_line)
        : h(query_head), line(its_line), i0(its_line * TILE),
          place(plane_of(c, b, query_head) * c.lines + its_line),
          count(static_cast<int>(std::min<int64_t>(TILE, c.q_len - i0))),
          groups(static_cast<int>(ceil_div(count, MR))), left(c, place) {}
};

// The query tiles of a key head, or every `step`-th line of them from `line` on: all heads of a line,
// then those of the next one.
struct QueryTiles {
    const Call& c;
    int64_t b, g, line = 0, step = 1;

    int64_t group() const { return c.heads / c.kv_heads; }
    int64_t head(int64_t n) const { return g * group() + n % group(); }
    int64_t line_of(int64_t n) const { return line + n / group() * step; }
    QueryTile at(int64_t n) const { return QueryTile(c, b, head(n), line_of(n)); }
    bool has(int64_t n) const { return line_of(n) < c.lines; }
};

// Calls `each` with every query tile in [first, last), and a key tile that it sees: one key tile
// after the other, and whether it is the first to see this one. What is swept has a `tile`.
template <typename Swept, typename Each>
inline void sweep(Swept* first, Swept* last, Each each) {
    for (;;) {
        int64_t j = NO_TILE;
        for (Swept* x = first; x != last; x++) j = std::min(j, x->tile.left.next());
        if (j == NO_TILE) return;
        bool is_first = true;
        for (Swept* x = first; x != last; x++) {
            if (x->tile.left.next() != j) continue;
            each(*x, x->tile.left.take(), is_first);
            is_first = false;
        }
    }
}

}  // namespace
