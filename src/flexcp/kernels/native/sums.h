// Sums of gradients of keys and values: where they are, how long, and of which tasks.
#pragma once

#include "operands.h"

namespace {

// From when to when the tiles of a key head are summed up: query tiles come in blocks of lines, which
// are taken in order.
struct Life {
    struct End {
        int32_t block, tile;  // the last block that sees a tile, -1 for none

        // Of tiles that end together the last is first: the next ones to begin are given their
        // places in order.
        bool operator<(const End& x) const {
            return block != x.block ? block < x.block : tile > x.tile;
        }
    };
    std::vector<End> ends;  // ascending
    int64_t most = 0;  // tiles that are summed up at the same time

    // Of query heads [h0, h1), which share a key head, in blocks of so many lines.
    Life(const Call& c, int64_t b, int64_t h0, int64_t h1, int64_t lines)
        : ends(ceil_div(c.kv_len, TILE)) {
        for (size_t j = 0; j < ends.size(); j++) ends[j] = {-1, static_cast<int32_t>(j)};
        const int64_t blocks = ceil_div(c.lines, lines);
        std::vector<int32_t> begun(blocks, 0);  // by block
        for (int64_t line = 0; line < c.lines; line++)
            for (int64_t h = h0; h < h1; h++) {
                if (h > h0 && plane_of(c, b, h) == plane_of(c, b, h - 1)) continue;
                const int32_t block = static_cast<int32_t>(line / lines);
                LineTiles tiles(c, plane_of(c, b, h) * c.lines + line);
                while (tiles.next() != NO_TILE) {
                    End& end = ends[tiles.take().j];
                    begun[block] += end.block < 0;
                    end.block = block;
                }
            }
        std::sort(ends.begin(), ends.end());
        size_t ended = 0;
        while (ended < ends.size() && ends[ended].block < 0) ended++;
        int64_t now = 0;
        for (int64_t block = 0; block < blocks; block++) {
            most = std::max(most, now += begun[block]);
            for (; ended < ends.size() && ends[ended].block == block; ended++) now--;
        }
    }
};

// Where the gradients of a key head are summed up, by key tile. The place of a tile that is complete
// is given to the next one that begins: it is still in the cache.
class Sums {
    const Call& c;
    const int64_t places, D, V;
    float* const memory;
    std::vector<int32_t> place_of, free;  // places by tile, -1 for none; and those that are free

   public:
    Sums(const Call& call, int64_t count, float* given)
        : c(call), places(count), D(padded(call.head_dim)), V(padded(call.value_dim)),
          memory(given), place_of(ceil_div(call.kv_len, TILE), -1) {
        // It never grows: what is put back later was taken.
        for (int64_t i = places; i > 0; i--) free.push_back(static_cast<int32_t>(i - 1));
    }

    // Floats of a number of places.
    static int64_t floats(const Call& c, int64_t places) {
        return places * TILE * (padded(c.head_dim) + padded(c.value_dim));
    }

    bool has(int64_t j) const { return place_of[j] >= 0; }
    // All sums for keys come before those for values: those of one place after the other's.
    float* keys(int64_t j) const { return memory + int64_t{place_of[j]} * TILE * D; }
    float* values(int64_t j) const {
        return memory + TILE * (places * D + int64_t{place_of[j]} * V);
    }

    void begin(int64_t j) {
        if (has(j)) return;
        place_of[j] = free.back();
        free.pop_back();
        std::memset(keys(j), 0, TILE * D * sizeof(float));
        std::memset(values(j), 0, TILE * V * sizeof(float));
    }

    void give_back(int64_t j) {
        if (has(j)) free.push_back(place_of[j]);
        place_of[j] = -1;
    }

    // Writes the gradients of tile j of key head (b, g): the sums of some tasks, or 0 if it has none.
    static void write(const Call& c, int64_t b, int64_t g, int64_t j, Sums* first, Sums* last) {
        const auto write_to = [&](const Rows& x, bool of_values, int64_t columns) {
            float* total = nullptr;
            for (Sums* sums = first; sums != last; sums++) {
                if (!sums->has(j)) continue;
                float* part = of_values ? sums->values(j) : sums->keys(j);
                for (int64_t i = 0; total && i < TILE * padded(columns); i++) total[i] += part[i];
                total = total ? total : part;
            }
            const int64_t count = std::min<int64_t>(TILE, c.kv_len - j * TILE);
            for (int64_t r = 0; r < count; r++) {
                if (total) {
                    write_row(x, b, g, j * TILE + r, total + r * padded(columns), columns, 1.0f);
                    continue;
                }
                float* to = row_of<float>(x, b, g, j * TILE + r);
                for (int64_t d = 0; d < columns; d++) to[d * x.element] = 0;
            }
        };
        write_to(c.grad_k, false, c.head_dim);
        write_to(c.grad_v, true, c.value_dim);
    }
};

constexpr double BUSY = 0.8;  // share of the threads' time that is not to be waited for others

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

// How the backward pass is cut into tasks: key heads, or with `shares` parts of one, whose sums are
// added up in the end.
struct Tasks {
    std::vector<Life> lives;  // of every key head, or one for all; none if there are shares
    int64_t heads;  // key heads at once
    int64_t shares, threads;
    int64_t places;  // of a task's sums
    int64_t group;  // query heads of a key head
    int64_t lines;  // of a block: those of a sweep, or one if it has no more than the heads of a line

    Tasks(const Call& c, int64_t packed_bytes, int64_t swept)
        : heads(heads_at_once(c, packed_bytes, 1, 1)), threads(c.threads),
          places(ceil_div(c.kv_len, TILE)), group(c.heads / c.kv_heads),
          lines(std::max<int64_t>(swept / std::max<int64_t>(group, 1), 1)) {
        shares = shares_of(c, heads, Sums::floats(c, places));
        if (shares > 1) return;
        places = 0;
        for (int64_t n = 0; n < (planes_of(c) == 1 ? 1 : c.batch * c.kv_heads); n++) {
            const int64_t h0 = n % c.kv_heads * group;
            lives.emplace_back(c, n / c.kv_heads, h0, h0 + group, lines);
            places = std::max(places, lives.back().most);
        }
        const int64_t bytes = Sums::floats(c, places) * int64_t{sizeof(float)};
        const int64_t fit = 4 * MOST_BYTES / std::max<int64_t>(bytes, 1);
        threads = std::clamp<int64_t>(std::min(fit, heads), 1, c.threads);
    }

    // How many have sums of their own: every share of some key heads, or every thread.
    int64_t sums() const { return shares > 1 ? heads * shares : threads; }

    const Life& life(int64_t head) const { return lives[lives.size() == 1 ? 0 : head]; }
};

}  // namespace
