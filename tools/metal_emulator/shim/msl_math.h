// Scalar and componentwise functions. half and bfloat are computed in float and rounded once. fast:: and
// precise:: are equal here, so tests cannot find a result that depends on their difference.
#pragma once

namespace metal {

#define MSL_UNARY(NAME, EXPRESSION)                     \
  METAL_FUNC float NAME(float x) { return EXPRESSION; } \
  METAL_FUNC half NAME(half narrow) {                   \
    float x = narrow;                                   \
    return (half)(EXPRESSION);                          \
  }                                                     \
  METAL_FUNC bfloat NAME(bfloat narrow) {               \
    float x = narrow;                                   \
    return (bfloat)(EXPRESSION);                        \
  }                                                     \
  template <class T, int N>                             \
  METAL_FUNC vec<T, N> NAME(vec<T, N> v) {              \
    vec<T, N> r;                                        \
    for (int i = 0; i < N; ++i) r[i] = NAME(T(v[i]));   \
    return r;                                           \
  }
#define MSL_BINARY(NAME, EXPRESSION)                             \
  METAL_FUNC float NAME(float x, float y) { return EXPRESSION; } \
  METAL_FUNC half NAME(half narrow_x, half narrow_y) {           \
    float x = narrow_x, y = narrow_y;                            \
    return (half)(EXPRESSION);                                   \
  }                                                              \
  METAL_FUNC bfloat NAME(bfloat narrow_x, bfloat narrow_y) {     \
    float x = narrow_x, y = narrow_y;                            \
    return (bfloat)(EXPRESSION);                                 \
  }                                                              \
  template <class T, int N>                                      \
  METAL_FUNC vec<T, N> NAME(vec<T, N> a, vec<T, N> b) {          \
    vec<T, N> r;                                                 \
    for (int i = 0; i < N; ++i) r[i] = NAME(T(a[i]), T(b[i]));   \
    return r;                                                    \
  }
#define MSL_FLOAT_FUNCTIONS                                                                                  \
  MSL_UNARY(exp, __builtin_expf(x))                                                                          \
  MSL_UNARY(exp2, __builtin_exp2f(x))                                                                        \
  MSL_UNARY(exp10, __builtin_powf(10.0f, x))                                                                 \
  MSL_UNARY(log, __builtin_logf(x))                                                                          \
  MSL_UNARY(log2, __builtin_log2f(x))                                                                        \
  MSL_UNARY(log10, __builtin_log10f(x))                                                                      \
  MSL_UNARY(sqrt, __builtin_sqrtf(x))                                                                        \
  MSL_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x))                                                                \
  MSL_UNARY(sin, __builtin_sinf(x))                                                                          \
  MSL_UNARY(cos, __builtin_cosf(x))                                                                          \
  MSL_UNARY(tan, __builtin_tanf(x))                                                                          \
  MSL_UNARY(sinh, __builtin_sinhf(x))                                                                        \
  MSL_UNARY(cosh, __builtin_coshf(x))                                                                        \
  MSL_UNARY(tanh, __builtin_tanhf(x))                                                                        \
  MSL_UNARY(asin, __builtin_asinf(x))                                                                        \
  MSL_UNARY(acos, __builtin_acosf(x))                                                                        \
  MSL_UNARY(atan, __builtin_atanf(x))                                                                        \
  MSL_UNARY(asinh, __builtin_asinhf(x))                                                                      \
  MSL_UNARY(acosh, __builtin_acoshf(x))                                                                      \
  MSL_UNARY(atanh, __builtin_atanhf(x))                                                                      \
  MSL_UNARY(sinpi, __builtin_sinf(3.14159265f * x))                                                          \
  MSL_UNARY(cospi, __builtin_cosf(3.14159265f * x))                                                          \
  MSL_UNARY(tanpi, __builtin_tanf(3.14159265f * x))                                                          \
  MSL_UNARY(floor, __builtin_floorf(x))                                                                      \
  MSL_UNARY(ceil, __builtin_ceilf(x))                                                                        \
  MSL_UNARY(trunc, __builtin_truncf(x))                                                                      \
  MSL_UNARY(round, __builtin_roundf(x))                                                                      \
  MSL_UNARY(rint, __builtin_rintf(x))                                                                        \
  MSL_UNARY(fabs, __builtin_fabsf(x))                                                                        \
  MSL_UNARY(fract, x - __builtin_floorf(x))                                                                  \
  MSL_UNARY(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))                                       \
  MSL_UNARY(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : x)                                                          \
  MSL_BINARY(pow, __builtin_powf(x, y))                                                                      \
  MSL_BINARY(powr, __builtin_powf(x, y))                                                                     \
  MSL_BINARY(atan2, __builtin_atan2f(x, y))                                                                  \
  MSL_BINARY(fmod, __builtin_fmodf(x, y))                                                                    \
  MSL_BINARY(fmin, __builtin_fminf(x, y))                                                                    \
  MSL_BINARY(fmax, __builtin_fmaxf(x, y))                                                                    \
  MSL_BINARY(copysign, __builtin_copysignf(x, y))                                                            \
  MSL_BINARY(divide, x / y)                                                                                  \
  MSL_BINARY(nextafter, __builtin_nextafterf(x, y))                                                          \
  METAL_FUNC float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }                        \
  METAL_FUNC half fma(half a, half b, half c) { return (half)__builtin_fmaf((float)a, (float)b, (float)c); } \
  METAL_FUNC bfloat fma(bfloat a, bfloat b, bfloat c) { return (bfloat)__builtin_fmaf(a, b, c); }            \
  template <class T, int N>                                                                                  \
  METAL_FUNC vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {                                          \
    vec<T, N> r;                                                                                             \
    for (int i = 0; i < N; ++i) r[i] = fma(T(a[i]), T(b[i]), T(c[i]));                                       \
    return r;                                                                                                \
  }

MSL_FLOAT_FUNCTIONS
namespace precise {
MSL_FLOAT_FUNCTIONS
}
namespace fast {
MSL_FLOAT_FUNCTIONS
}

#define MSL_CLASSIFY(NAME, EXPRESSION)                    \
  METAL_FUNC bool NAME(float x) { return EXPRESSION; }    \
  METAL_FUNC bool NAME(half x) { return NAME(float(x)); } \
  METAL_FUNC bool NAME(bfloat x) { return NAME(float(x)); }
MSL_CLASSIFY(isnan, __builtin_isnan(x))
MSL_CLASSIFY(isinf, __builtin_isinf(x))
MSL_CLASSIFY(isfinite, __builtin_isfinite(x))
MSL_CLASSIFY(signbit, __builtin_signbit(x) != 0)
METAL_FUNC float ldexp(float x, int k) { return __builtin_ldexpf(x, k); }
METAL_FUNC half ldexp(half x, int k) { return (half)__builtin_ldexpf(x, k); }

// min, max and clamp: all arguments have one type, as Metal's overloads require.
template <class T>
using if_scalar_t = enable_if_t<!msl_detail::is_vector_v<T>, T>;
template <class T>
METAL_FUNC if_scalar_t<T> min(T a, T b) {
  if constexpr (is_floating_point_v<T>)
    return (T)__builtin_fminf((float)a, (float)b);
  else
    return b < a ? b : a;
}
template <class T>
METAL_FUNC if_scalar_t<T> max(T a, T b) {
  if constexpr (is_floating_point_v<T>)
    return (T)__builtin_fmaxf((float)a, (float)b);
  else
    return a < b ? b : a;
}
template <class T>
METAL_FUNC if_scalar_t<T> abs(T x) {
  if constexpr (is_floating_point_v<T>)
    return fabs(x);
  else
    return x < 0 ? T(-x) : x;
}
#define MSL_COMPONENTWISE(NAME)                                       \
  template <class T, int N>                                           \
  METAL_FUNC vec<T, N> NAME(vec<T, N> a, vec<T, N> b) {               \
    vec<T, N> r;                                                      \
    for (int i = 0; i < N; ++i) r[i] = metal::NAME(T(a[i]), T(b[i])); \
    return r;                                                         \
  }
MSL_COMPONENTWISE(min)
MSL_COMPONENTWISE(max)
template <class T, int N>
METAL_FUNC vec<T, N> abs(vec<T, N> v) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = metal::abs(T(v[i]));
  return r;
}
template <class T>
METAL_FUNC T min3(T a, T b, T c) {
  return metal::min(a, metal::min(b, c));
}
template <class T>
METAL_FUNC T max3(T a, T b, T c) {
  return metal::max(a, metal::max(b, c));
}
template <class T>
METAL_FUNC T clamp(T x, T low, T high) {
  return metal::min(metal::max(x, low), high);
}
template <class T>
METAL_FUNC T mix(T a, T b, T t) {
  return a + (b - a) * t;
}
template <class T>
METAL_FUNC T select(T a, T b, bool take_b) {
  return take_b ? b : a;
}
template <class T, int N, class C>
METAL_FUNC vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<C, N> take_b) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = take_b[i] ? b[i] : a[i];
  return r;
}
template <class T, int N>
METAL_FUNC T dot(vec<T, N> a, vec<T, N> b) {
  T r = a[0] * b[0];
  for (int i = 1; i < N; ++i) r += a[i] * b[i];
  return r;
}
template <class T, int N>
METAL_FUNC T length(vec<T, N> a) {
  return sqrt(dot(a, a));
}
template <class C, int N>
METAL_FUNC bool any(vec<C, N> c) {
  bool r = false;
  for (int i = 0; i < N; ++i) r |= c[i] != 0;
  return r;
}
template <class C, int N>
METAL_FUNC bool all(vec<C, N> c) {
  bool r = true;
  for (int i = 0; i < N; ++i) r &= c[i] != 0;
  return r;
}

METAL_FUNC uint popcount(uint x) { return __builtin_popcount(x); }
METAL_FUNC uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
METAL_FUNC uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
METAL_FUNC uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
METAL_FUNC uint mulhi(uint a, uint b) { return (uint)(((ulong)a * b) >> 32); }
METAL_FUNC uint rotate(uint a, uint b) { return __builtin_rotateleft32(a, b); }
METAL_FUNC uint extract_bits(uint x, uint offset, uint bits) {
  uint mask = bits >= 32 ? ~0u : (1u << bits) - 1;
  return bits == 0 ? 0 : (x >> offset) & mask;
}
METAL_FUNC uint insert_bits(uint base, uint insert, uint offset, uint bits) {
  uint mask = (bits >= 32 ? ~0u : (1u << bits) - 1) << offset;
  return (base & ~mask) | ((insert << offset) & mask);
}

}  // namespace metal
