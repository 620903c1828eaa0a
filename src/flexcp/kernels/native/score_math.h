// Functions of generated score functions, of a number and of vectors.
#pragma once

#include "score_steps.h"

namespace {

namespace step {

template <typename X>
inline X abs(X x) {
    if constexpr (std::is_same_v<X, Vec>) return (Vec)((IntVec)x & 0x7fffffff);
    else if constexpr (std::is_same_v<X, float>) return std::fabs(x);
    else return where(lt(x, 0), -x, x);
}

template <typename X>
inline auto sign(X x) {
    return where(gt(x, 0.0f), 1.0f, where(lt(x, 0.0f), -1.0f, 0.0f));
}

// Towards 0; numbers from 2**23 on are whole, and don't fit into 32 bits.
inline Vec truncated(Vec x) {
    return abs(x) < splat(8388608.0f) ? as<Vec>(as<IntVec>(x)) : x;
}
inline float truncated(float x) { return std::trunc(x); }

inline Vec floor(Vec x) {
    const Vec near = truncated(x);
    return near > x ? near - 1.0f : near;
}
inline float floor(float x) { return std::floor(x); }

inline Vec ceil(Vec x) {
    const Vec near = truncated(x);
    return near < x ? near + 1.0f : near;
}
inline float ceil(float x) { return std::ceil(x); }

template <typename X>
inline X sqrt(X x) {
    return each(x, [](float one) { return std::sqrt(one); });
}

template <typename X>
inline X rsqrt(X x) {
    return 1.0f / sqrt(x);
}

// 2 to the power of whole numbers from -252 to 254, times x: in two steps, since one would overflow.
inline Vec scaled(Vec x, IntVec power) {
    const IntVec half = power >> 1, other = power - half;
    return x * (Vec)((half + 127) << 23) * (Vec)((other + 127) << 23);
}

// The whole number next to x, if that is small.
inline Vec rounded(Vec x) {
    const Vec magic = splat(12582912.0f);
    return (x + magic) - magic;
}

// Cephes' polynomials for single precision, as those of logarithm, sine and cosine.
inline Vec exp(Vec x) {
    x = x < splat(-104.5f) ? splat(-104.5f) : x;
    x = x > splat(89.5f) ? splat(89.5f) : x;
    const Vec n = rounded(x * 1.44269504088896341f);
    const Vec f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Vec p = splat(1.9875691500e-4f);
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    return scaled(p * (f * f) + f + 1.0f, as<IntVec>(n));
}
inline float exp(float x) { return std::exp(x); }

inline Vec exp2(Vec x) {
    x = x < splat(-151.0f) ? splat(-151.0f) : x;
    x = x > splat(129.0f) ? splat(129.0f) : x;
    const Vec n = rounded(x);
    return scaled(exp((x - n) * 0.693147180559945309f), as<IntVec>(n));
}
inline float exp2(float x) { return std::exp2(x); }

inline Vec log(Vec x) {
    const IntVec small = x < splat(1.17549435e-38f);
    const Vec normal = small ? x * 8388608.0f : x;
    const IntVec bits = (IntVec)normal;
    IntVec power = (bits >> 23) - (small ? splat(126 + 23) : splat(126));
    Vec m = (Vec)((bits & 0x7fffff) | 0x3f000000);
    const IntVec low = m < splat(0.707106781186547524f);
    power += low;
    m = (low ? m + m : m) - 1.0f;
    const Vec square = m * m, e = as<Vec>(power);
    Vec p = splat(7.0376836292e-2f);
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    p = p * m * square - e * 2.12194440e-4f - square * 0.5f;
    Vec found = m + p + e * 0.693359375f;
    found = x == splat(INFINITY) ? x : found;
    found = x == splat(0.0f) ? splat(-INFINITY) : found;
    return x >= splat(0.0f) ? found : splat(NAN);
}
inline float log(float x) { return std::log(x); }

template <typename X>
inline X log2(X x) {
    return log(x) * 1.44269504088896341f;
}

template <typename X>
inline X log1p(X x) {
    const X above = 1.0f + x, left = above - 1.0f;
    const X found = log(above) * (x / where(eq(left, 0.0f), 1.0f, left));
    return where(eq(left, 0.0f), x, where(eq(above, INFINITY), above, found));
}

// sin of x, or of x plus a quarter of a turn.
inline Vec wave(Vec x, int32_t quarter) {
    const Vec n = rounded(x * 0.636619772367581343f);
    const Vec r = ((x - n * 1.5703125f) - n * 4.837512969970703125e-4f) - n * 7.54978995489188216e-8f;
    const Vec z = r * r;
    Vec s = splat(-1.9515295891e-4f), c = splat(2.443315711809948e-5f);
    s = (s * z + 8.3321608736e-3f) * z - 1.6666654611e-1f;
    c = (c * z - 1.388731625493765e-3f) * z + 4.166664568298827e-2f;
    s = s * z * r + r;
    c = c * z * z - 0.5f * z + 1.0f;
    const IntVec turn = as<IntVec>(n) + quarter;
    const Vec found = (turn & 1) == 1 ? c : s;
    return (Vec)((IntVec)found ^ ((turn & 2) << 30));
}

// Where that is not exact enough, as far out, and for what is not finite.
inline bool is_small(Vec x) {
    bool found = true;
    for (int i = 0; i < WIDTH; i++) found &= std::fabs(x[i]) < 8192.0f;
    return found;
}

inline float sin(float x) { return std::sin(x); }
inline float cos(float x) { return std::cos(x); }
inline Vec sin(Vec x) {
    return is_small(x) ? wave(x, 0) : each(x, [](float one) { return std::sin(one); });
}
inline Vec cos(Vec x) {
    return is_small(x) ? wave(x, 1) : each(x, [](float one) { return std::cos(one); });
}

// A quotient of polynomials: within 4e-7 of the hyperbolic tangent, of its size.
inline Vec tanh(Vec x) {
    const Vec given = x;
    x = x > splat(7.99881172180175781f) ? splat(7.99881172180175781f) : x;
    x = x < splat(-7.99881172180175781f) ? splat(-7.99881172180175781f) : x;
    const Vec z = x * x;
    Vec p = splat(-2.76076847742355e-16f), q = splat(1.19825839466702e-6f);
    p = p * z + 2.00018790482477e-13f;
    p = p * z - 8.60467152213735e-11f;
    p = p * z + 5.12229709037114e-8f;
    p = p * z + 1.48572235717979e-5f;
    p = p * z + 6.37261928875436e-4f;
    p = p * z + 4.89352455891786e-3f;
    q = q * z + 1.18534705686654e-4f;
    q = q * z + 2.26843463243900e-3f;
    q = q * z + 4.89352518554385e-3f;
    return abs(given) < splat(4e-4f) ? given : x * p / q;
}
inline float tanh(float x) { return std::tanh(x); }

template <typename X>
inline X sigmoid(X x) {
    return 1.0f / (1.0f + exp(-x));
}

// N. Juffa's polynomials, below and above 475 / 512.
inline Vec erf(Vec x) {
    const Vec t = abs(x), z = x * x;
    Vec low = splat(-5.96761703e-4f);
    low = low * z + 4.99119423e-3f;
    low = low * z - 2.67681349e-2f;
    low = low * z + 1.12819925e-1f;
    low = low * z - 3.76125336e-1f;
    low = low * z + 1.28379166e-1f;
    low = low * x + x;
    const Vec near = t > splat(9.3f) ? splat(9.3f) : t;  // 1 from 3.9 on
    Vec high = near * -1.72853470e-5f + 3.83197126e-4f;
    high = high * (near * near) + (near * -3.88396438e-3f + 2.42546219e-2f);
    high = high * near - 1.06777877e-1f;
    high = high * near - 6.34846687e-1f;
    high = high * near - 1.28717512e-1f;
    high = 1.0f - exp(high * near - near);
    high = x < splat(0.0f) ? -high : high;
    return t > splat(0.927734375f) ? high : low;
}
inline float erf(float x) { return std::erf(x); }

// NaN for negative numbers unless the power is 0, or a whole number.
template <typename X, typename P>
inline auto powered(X x, P power) {
    const auto found = exp2(power * log2(abs(x)));
    const auto half = power * 0.5f;
    const auto odd = where(eq(half, floor(half)), found, -found);
    const auto of_negative = where(eq(power, floor(power)), odd, NAN);
    return where(eq(power, 0.0f), 1.0f, where(lt(x, 0.0f), of_negative, found));
}

}  // namespace step

}  // namespace
