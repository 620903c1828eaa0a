// What generated score functions are written in: steps on numbers, and on vectors of them.
//
// A number is float, int32_t, int64_t or bool; a vector Vec, IntVec or LongVec. Truth values of a
// vector are an IntVec of 0 and -1. Steps take numbers and vectors in any combination.
#pragma once

#include <tuple>
#include <type_traits>

#include "score_tile.h"
#include "vectors.h"

namespace {

typedef int64_t LongVec __attribute__((vector_size(8 * WIDTH)));

namespace step {

template <typename T>
constexpr bool is_vector =
    std::is_same_v<T, Vec> || std::is_same_v<T, IntVec> || std::is_same_v<T, LongVec>;

template <typename T>
constexpr auto vector_of() {
    if constexpr (is_vector<T>) return T{};
    else if constexpr (std::is_same_v<T, float>) return Vec{};
    else if constexpr (std::is_same_v<T, int64_t>) return LongVec{};
    else return IntVec{};  // of int32_t, or truth values
}
template <typename T>
using VectorOf = decltype(vector_of<T>());

template <typename T>
using ElementOf = std::remove_reference_t<decltype(std::declval<T&>()[0])>;

template <typename T, typename X>
inline T as(X x) {
    if constexpr (std::is_same_v<T, X>) return x;
    else if constexpr (is_vector<T> && is_vector<X>) return __builtin_convertvector(x, T);
    else if constexpr (is_vector<T> && std::is_same_v<X, bool>) return T{} - ElementOf<T>(x);
    else if constexpr (is_vector<T>) return static_cast<ElementOf<T>>(x) - T{};
    else return static_cast<T>(x);
}

template <typename T>
constexpr bool is_long = std::is_same_v<T, LongVec> || std::is_same_v<T, int64_t>;

// The type of what two make together.
template <typename A, typename B>
constexpr auto joined() {
    if constexpr (std::is_same_v<A, B>) return A{};
    else if constexpr ((is_vector<A> || is_vector<B>) && (is_long<A> || is_long<B>))
        return LongVec{};
    else if constexpr (is_vector<A>) return A{};
    else if constexpr (is_vector<B>) return B{};
    else return A{} + B{};
}
template <typename A, typename B>
using Joined = decltype(joined<A, B>());

// Truth values of lanes as wide as those of T.
template <typename T>
inline auto mask_for(IntVec x) {
    if constexpr (std::is_same_v<T, LongVec>) return as<LongVec>(x);
    else return x;
}

template <typename C, typename A, typename B>
inline auto where(C test, A a, B b) {
    using T = Joined<A, B>;
    if constexpr (is_vector<C>) {
        using V = VectorOf<T>;
        const V x = as<V>(a), y = as<V>(b);
        return mask_for<V>(test) ? x : y;
    } else {
        return test ? as<T>(a) : as<T>(b);
    }
}

#define FLEXCP_COMPARISON(name, sign)                             \
    template <typename A, typename B>                             \
    inline auto name(A a, B b) {                                  \
        using T = Joined<A, B>;                                   \
        const T x = as<T>(a), y = as<T>(b);                       \
        if constexpr (is_vector<T>) return as<IntVec>(x sign y);  \
        else return x sign y;                                     \
    }
FLEXCP_COMPARISON(eq, ==)
FLEXCP_COMPARISON(ne, !=)
FLEXCP_COMPARISON(lt, <)
FLEXCP_COMPARISON(le, <=)
FLEXCP_COMPARISON(gt, >)
FLEXCP_COMPARISON(ge, >=)

#define FLEXCP_OPERATION(name, sign)                    \
    template <typename A, typename B>                   \
    inline auto name(A a, B b) {                        \
        using T = Joined<A, B>;                         \
        return static_cast<T>(as<T>(a) sign as<T>(b));  \
    }
FLEXCP_OPERATION(plus, +)
FLEXCP_OPERATION(minus, -)
FLEXCP_OPERATION(times, *)
FLEXCP_OPERATION(over, /)
FLEXCP_OPERATION(bits_and, &)
FLEXCP_OPERATION(bits_or, |)
FLEXCP_OPERATION(bits_xor, ^)

template <typename A, typename B>
inline auto maximum(A a, B b) {
    return where(gt(b, a), b, a);  // a if it is NaN
}

template <typename A, typename B>
inline auto minimum(A a, B b) {
    return where(lt(b, a), b, a);
}

template <typename X>
inline auto to_float(X x) {
    if constexpr (is_vector<X>) return as<Vec>(x);
    else return static_cast<float>(x);
}

template <typename X>
inline auto to_int32(X x) {
    if constexpr (is_vector<X>) return as<IntVec>(x);
    else return static_cast<int32_t>(x);
}

template <typename X>
inline auto to_int64(X x) {
    if constexpr (is_vector<X>) return as<LongVec>(x);
    else return static_cast<int64_t>(x);
}

// A function of a float, lane by lane.
template <typename X, typename Of>
inline X each(X x, Of of) {
    if constexpr (is_vector<X>) {
        for (int i = 0; i < WIDTH; i++) x[i] = of(x[i]);
        return x;
    } else {
        return of(x);
    }
}

inline float from_bfloat16(uint32_t bits) {
    bits <<= 16;
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
}

// Rounded to the type, to the nearest and to even ones, and widened again.
template <typename X>
inline auto to_bfloat16(X x) {
    return each(to_float(x), [](float one) {
        uint32_t bits;
        std::memcpy(&bits, &one, 4);
        return one != one ? one : from_bfloat16((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    });
}

#if defined(__FLT16_MAX__)
template <typename X>
inline auto to_float16(X x) {
    return each(to_float(x), [](float one) { return static_cast<float>(static_cast<_Float16>(one)); });
}
#endif

// Quotients of whole numbers by a constant: towards 0, and down. What is left by the latter has the
// sign of the constant.
template <int64_t B, typename X>
inline X divided(X x) {
    if constexpr (is_vector<X>) return x / static_cast<ElementOf<X>>(B);
    else return x / static_cast<X>(B);
}

template <int64_t B, typename X>
inline X rest(X x) {
    if constexpr (is_vector<X>) return x - divided<B>(x) * static_cast<ElementOf<X>>(B);
    else return x - divided<B>(x) * static_cast<X>(B);
}

template <int64_t B, typename X>
inline X floor_divided(X x) {
    const X left = rest<B>(x);
    return where(B > 0 ? lt(left, 0) : gt(left, 0), divided<B>(x) - 1, divided<B>(x));
}

template <int64_t B, typename X>
inline X remainder(X x) {
    const X left = rest<B>(x);
    return where(B > 0 ? lt(left, 0) : gt(left, 0), left + as<X>(B), left);
}

template <typename X, typename N>
inline auto counted_from_end(X index, N size) {
    return where(lt(index, 0), plus(index, size), index);
}

// Numbers of a tensor: 0 where they are outside of it, of which nothing is read.

struct Bfloat16 {
    uint16_t bits;
};

template <typename T>
inline auto widened(T x) {
    if constexpr (std::is_same_v<T, Bfloat16>) return from_bfloat16(x.bits);
    else if constexpr (std::is_same_v<T, int64_t>) return x;
    else if constexpr (std::is_integral_v<T>) return static_cast<int32_t>(x);
    else return static_cast<float>(x);
}

template <typename T>
using Widened = decltype(widened(T{}));

template <typename T, typename Offset, typename Inside>
inline auto read(int64_t data, Offset offset, Inside inside) {
    const T* from = reinterpret_cast<const T*>(data);
    if constexpr (is_vector<Offset> || is_vector<Inside>) {
        const LongVec at = as<LongVec>(where(inside, offset, int64_t{0}));
        VectorOf<Widened<T>> found;
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++) found[i] = widened(from[at[i]]);
        return found;
    } else {
        return inside ? widened(from[offset]) : Widened<T>{};
    }
}

// The places of some columns in a row of a tensor: the same ones for many rows.
struct Places {
    int64_t at[WIDTH];
    bool side_by_side;
};

inline Places places(LongVec at) {
    Places found;
    std::memcpy(found.at, &at, sizeof found.at);
    found.side_by_side = true;
    for (int i = 1; i < WIDTH; i++) found.side_by_side &= found.at[i] == found.at[0] + i;
    return found;
}

inline bool all(bool x) { return x; }
inline bool all(IntVec x) {
    int64_t parts[WIDTH / 2], found = -1;
    std::memcpy(parts, &x, sizeof parts);
    for (int i = 0; i < WIDTH / 2; i++) found &= parts[i];
    return found == -1;
}

template <typename T, typename Inside>
inline auto read_row(int64_t data, int64_t row, const Places& places, Inside inside) {
    const T* from = reinterpret_cast<const T*>(data);
    VectorOf<Widened<T>> found;
    if (!all(inside)) {
        const IntVec lanes = as<IntVec>(inside);
        for (int i = 0; i < WIDTH; i++)
            found[i] = lanes[i] ? widened(from[row + places.at[i]]) : Widened<T>{};
    } else if (!places.side_by_side) {
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++) found[i] = widened(from[row + places.at[i]]);
    } else if constexpr (std::is_same_v<T, Widened<T>>) {
        std::memcpy(&found, from + row + places.at[0], sizeof found);
    } else {
        from += row + places.at[0];
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++) found[i] = widened(from[i]);
    }
    return found;
}

// Adds to elements, lane by lane.
inline void add_each(double* sums, LongVec element, Vec found) {
    for (int i = 0; i < WIDTH; i++) sums[element[i]] += found[i];
}

inline IntVec positions(const int32_t* from) {
    IntVec found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

// Values that depend on query and key by their distance alone, where both count up by 1: each row of
// a tile has those of the row above, one place further on.
template <int TILE, typename... Values>
struct Diagonals {
    template <typename V>
    struct Line {
        ElementOf<V> of[2 * TILE + WIDTH];
    };
    std::tuple<Line<Values>...> lines;

    template <typename Of>
    void fill(const int32_t* q_at, const int32_t* kv_at, const Of& of) {
        IntVec key = positions(kv_at);
        for (int n = 0; n < 2 * TILE; n += WIDTH, key += WIDTH) {
            const auto found = of(q_at[0] + TILE - 1, key);
            put(n, found, std::index_sequence_for<Values...>());
        }
    }

    std::tuple<Values...> at(int row, int column) const {
        return take(column - row + TILE - 1, std::index_sequence_for<Values...>());
    }

   private:
    template <size_t... I>
    void put(int n, const std::tuple<Values...>& found, std::index_sequence<I...>) {
        (std::memcpy(std::get<I>(lines).of + n, &std::get<I>(found), sizeof(Values)), ...);
    }
    template <size_t... I>
    std::tuple<Values...> take(int n, std::index_sequence<I...>) const {
        std::tuple<Values...> found;
        (std::memcpy(&std::get<I>(found), std::get<I>(lines).of + n, sizeof(Values)), ...);
        return found;
    }
};

// Sums of what belongs to pairs with the same distance.
template <int TILE>
struct DistanceSums {
    float of[2 * TILE + WIDTH] = {};

    void add(int row, int column, Vec found) {
        const int n = column - row + TILE - 1;
        const Vec sum = at(n) + found;
        std::memcpy(of + n, &sum, sizeof sum);
    }

    Vec at(int n) const {
        Vec found;
        std::memcpy(&found, of + n, sizeof found);
        return found;
    }
};

template <int TILE, typename... Values>
Diagonals<TILE, Values...> diagonals_of(const std::tuple<Values...>&);

}  // namespace step

}  // namespace
