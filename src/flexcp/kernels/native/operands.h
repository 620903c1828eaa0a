// Operands: rows of tensors in float32 as products take them, and key tiles that are packed.
#pragma once

#include "sweep.h"

namespace {

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

template <typename T>
inline void copy_rows(const Rows& x, int64_t b, int64_t h, int64_t first, int64_t rows,
                      int64_t columns, float* to) {
    const int64_t width = padded(columns);
    for (int64_t r = 0; r < rows; r++, to += width) {
        const T* row = row_of<const T>(x, b, h, first + r);
        if (x.element == 1)
            for (int64_t d = 0; d < columns; d++) to[d] = widened(row[d]);
        else
            for (int64_t d = 0; d < columns; d++) to[d] = widened(row[d * x.element]);
        for (int64_t d = columns; d < width; d++) to[d] = 0;
    }
    std::memset(to, 0, (TILE - rows) * width * sizeof(float));
}

// Rows [first, first + TILE) of a tensor in float32: where they lie if products can read them there,
// else in `copy`, in whole vectors; numbers past the end of a row or of the tensor are 0. Rows far
// apart share few places of the first cache: only those that are read `once` are left there.
inline TileRows tile_rows(const Rows& x, int64_t b, int64_t h, int64_t first, int64_t length,
                          int64_t columns, float* copy, bool once = false) {
    const int64_t rows = std::min<int64_t>(TILE, length - first);
    const bool readable = once || (columns % WIDTH == 0 && x.row < 2 * columns);
    if (x.type == 0 && x.element == 1 && rows == TILE && readable)
        return {row_of<float>(x, b, h, first), x.row};
    if (x.type == 0)
        copy_rows<float>(x, b, h, first, rows, columns, copy);
    else if (x.type == 1)
        copy_rows<Bfloat16>(x, b, h, first, rows, columns, copy);
#if defined(__FLT16_MAX__)
    else if (x.type == 2)
        copy_rows<_Float16>(x, b, h, first, rows, columns, copy);
#endif
    return {copy, padded(columns)};
}

// `factor` times each row, in whole vectors: [TILE][padded(columns)].
inline void scale_rows(const TileRows& from, int64_t columns, float factor, float* __restrict to) {
    const int64_t width = padded(columns);
    for (int64_t r = 0; r < TILE; r++, to += width) {
        for (int64_t d = 0; d < columns; d++) to[d] = factor * from.data[r * from.step + d];
        for (int64_t d = columns; d < width; d++) to[d] = 0;
    }
}

// As panels of NR rows: [TILE / NR][columns][NR].
inline void pack_across(const TileRows& from, int64_t columns, float* to) {
    const int64_t whole = columns / 4 * 4;
    for (int64_t i = 0; i < TILE; i += NR, to += columns * NR) {
        const float* rows = from.data + i * from.step;
        for (int64_t r = 0; r < NR; r += 4)
            for (int64_t d = 0; d < whole; d += 4)
                transpose_4(rows + r * from.step + d, from.step, to + d * NR + r, NR);
        for (int64_t d = whole; d < columns; d++)
            for (int64_t r = 0; r < NR; r++) to[d * NR + r] = rows[r * from.step + d];
    }
}

// Whether no number of rows that products can read is NaN or infinite.
inline bool are_finite(const TileRows& rows, int64_t columns) {
    constexpr int32_t exponent = 0x7f800000;
    IntVec special = {};
    for (int64_t r = 0; r < TILE; r++)
        for (int64_t d = 0; d < columns; d += WIDTH) {
            const IntVec x = (IntVec)load_anywhere(rows.at(r, d));
            special |= (x & exponent) == exponent;
        }
    bool finite = true;
    for (int i = 0; i < WIDTH; i++) finite &= !special[i];
    return finite;
}

// The rows after those of tile j, as they lie: where they are is all that is asked, so what lies in
// half a float counts as such.
inline TileRows after(const Rows& x, int64_t b, int64_t g, int64_t j) {
    if (x.type == 0) return {row_of<float>(x, b, g, (j + 1) * TILE), x.row};
    return {reinterpret_cast<float*>(row_of<uint16_t>(x, b, g, (j + 1) * TILE)), x.row / 2};
}

// A key tile as a pass takes it.
struct KeyTile {
    const float* keys;  // packed across
    const float* values;  // packed across; of the backward pass
    TileRows rows;  // what weights are multiplied with: values, in the backward pass keys
    bool finite;  // whether those are
    TileRows next_keys, next_values;  // what the next tile is read from, or packed from
};

// Key tiles that are packed, each in a place of its own.
struct KeyTiles {
    const Call& call;
    const bool back, for_all;
    const int64_t size;  // floats of one tile
    Buffer memory;
    std::vector<KeyTile> tiles;

    KeyTiles(const Call& c, bool is_back, bool is_for_all, int64_t places)
        : call(c), back(is_back), for_all(is_for_all), size(floats(c, is_back)),
          memory(buffer(places * size)), tiles(places) {}

    static int64_t floats(const Call& c, bool back) {
        const int64_t rows = padded(back ? c.head_dim : c.value_dim);
        return padded(TILE * (c.head_dim + rows + (back ? c.value_dim : 0)));
    }

    // Puts tile j of key head (b, g) to a place; `copy` is memory for the rows of a tile.
    void pack(int64_t place, int64_t b, int64_t g, int64_t j, float* copy) {
        const Call& c = call;
        KeyTile& tile = tiles[place];
        float* across = memory.get() + place * size;
        pack_across(tile_rows(c.k, b, g, j * TILE, c.kv_len, c.head_dim, copy, true), c.head_dim,
                    across);
        tile.keys = across;
        float* values = across + TILE * c.head_dim;
        if (back) {
            pack_across(tile_rows(c.v, b, g, j * TILE, c.kv_len, c.value_dim, copy, true),
                        c.value_dim, values);
            tile.values = values;
        }
        const int64_t columns = back ? c.head_dim : c.value_dim;
        tile.rows = tile_rows(back ? c.k : c.v, b, g, j * TILE, c.kv_len, columns,
                              values + (back ? TILE * c.value_dim : 0));
        tile.finite = are_finite(tile.rows, columns);
        if (for_all) {
            tile.next_keys = {across + size, c.head_dim};
            tile.next_values = {values + size, c.value_dim};
        } else {
            tile.next_keys = after(c.k, b, g, j);
            tile.next_values = after(c.v, b, g, j);
        }
    }
};

// How many key tiles a line of query tiles has.
struct TilesOfLine {
    double mean;
    int64_t most;

    explicit TilesOfLine(const Call& c) : most(0) {
        const int64_t lines = c.lines * planes_of(c);
        int64_t sum = 0;
        for (int64_t line = 0; line < lines; line++) {
            const int64_t here = tiles_of(c, line);
            sum += here, most = std::max(most, here);
        }
        mean = static_cast<double>(sum) / std::max<int64_t>(lines, 1);
    }

    // Whether key tiles are packed once, for all threads, or by each for itself, which takes a
    // twelfth of the time of one tile's products; what is packed for all goes through memory. With 11
    // tiles in a line (a window of 1,024) neither is faster, with 3 packing for itself by a fifth.
    bool are_many() const { return mean > 8; }

    // Places for a thread's own key tiles: those of a line and the next one, as far as the second
    // cache holds them.
    int64_t own() const { return std::min<int64_t>(most + 1, 24); }
};

// Key tiles as one thread finds them: among those that are packed for all, or else its own.
struct FoundTiles {
    KeyTiles* all;  // of some heads, one after the other; null if every thread has its own
    KeyTiles own;
    std::vector<int64_t> which;  // the head and tile that each of its own is
    Buffer copy;

    FoundTiles(const Call& c, bool back, KeyTiles* shared, int64_t places)
        : all(shared), own(c, back, false, shared ? 0 : places), which(own.tiles.size(), -1),
          copy(buffer(TILE * padded(std::max(c.head_dim, c.value_dim)))) {}

    bool complete() const { return own.memory && copy; }

    // Tile j of key head (b, g), which is the `head`-th of those that are packed.
    const KeyTile& at(int64_t head, int64_t b, int64_t g, int64_t j) {
        const int64_t tiles = ceil_div(own.call.kv_len, TILE);
        if (all) return all->tiles[head * tiles + j];
        const int64_t place = j % static_cast<int64_t>(which.size());
        const int64_t name = (b * own.call.kv_heads + g) * tiles + j;
        if (which[place] != name) {
            own.pack(place, b, g, j, copy.get());
            which[place] = name;
        }
        return own.tiles[place];
    }
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
    const int64_t tiles = ceil_div(c.kv_len, TILE), planes = planes_of(c);
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

// Packs every tile of key heads [first, last) that some query of the head's group sees. Whether
// there was memory.
inline bool pack_all(const Call& c, const std::vector<char>& seen, int64_t first, int64_t last,
                     KeyTiles& to) {
    const int64_t tiles = ceil_div(c.kv_len, TILE), group = c.heads / c.kv_heads;
    int failed = 0;
#pragma omp parallel num_threads(c.threads) reduction(| : failed)
    {
        const Buffer copy = buffer(TILE * padded(std::max(c.head_dim, c.value_dim)));
        failed |= !copy;
#pragma omp for schedule(static)
        for (int64_t n = 0; n < (last - first) * tiles; n++) {
            if (failed) continue;
            const int64_t head = first + n / tiles, b = head / c.kv_heads, g = head % c.kv_heads;
            bool needed = false;
            for (int64_t h = g * group; h < (g + 1) * group; h++)
                needed |= seen[plane_of(c, b, h) * tiles + n % tiles];
            if (needed) to.pack(n, b, g, n % tiles, copy.get());
        }
    }
    return !failed;
}

}  // namespace
