// Vector types under their Intel names, and functions with which the instructions are written.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

// The types have the shapes and the aliasing of GCC's types.
typedef float __m128 __attribute__((vector_size(16), may_alias));
typedef long long __m128i __attribute__((vector_size(16), may_alias));
typedef long long __m256i __attribute__((vector_size(32), may_alias));
typedef float __m256 __attribute__((vector_size(32), may_alias));
typedef short __m256bh __attribute__((vector_size(32), may_alias));
typedef float __m512 __attribute__((vector_size(64), may_alias));
typedef double __m512d __attribute__((vector_size(64), may_alias));
typedef long long __m512i __attribute__((vector_size(64), may_alias));
typedef short __m512bh __attribute__((vector_size(64), may_alias));
typedef uint16_t __mmask16;
typedef uint32_t __mmask32;
typedef uint64_t __mmask64;

#define OCTAVO_EMULATED static inline __attribute__((always_inline))

namespace x86_emulator {

template <class T, int kBytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes), may_alias));
};

// A register of 512 (128) bits as lanes of T.
template <class T>
using Lanes = typename VectorOf<T, 64>::type;
template <class T>
using Lanes128 = typename VectorOf<T, 16>::type;

// Ends the program, where the hardware would raise a fault.
[[noreturn]] inline void fault(const char* what) {
  std::fprintf(stderr, "x86 emulator: %s\n", what);
  std::abort();
}

template <class To, class From>
OCTAVO_EMULATED To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

template <class Vector>
OCTAVO_EMULATED Vector read(const void* from) {
  Vector value;
  std::memcpy(&value, from, sizeof(Vector));
  return value;
}

template <class Vector>
OCTAVO_EMULATED Vector read_aligned(const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof(Vector) != 0) fault("an aligned load is not aligned");
  return read<Vector>(from);
}

template <class Vector>
OCTAVO_EMULATED void write(void* to, const Vector& value) {
  std::memcpy(to, &value, sizeof(Vector));
}

// Loads elements of T if their bit in `mask` is 1; other elements are zero, and their memory is not read.
template <class T>
OCTAVO_EMULATED Lanes<T> read_masked(uint64_t mask, const void* from) {
  Lanes<T> value = {};
  for (int i = 0; i < int(64 / sizeof(T)); ++i) {
    if (!(mask >> i & 1)) continue;
    T element;
    std::memcpy(&element, static_cast<const char*>(from) + i * sizeof(T), sizeof(T));
    value[i] = element;
  }
  return value;
}

// ---- single values ----

// IEEE binary16 to float32, exact. Subnormals become normal numbers.
OCTAVO_EMULATED float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
  if (exponent == 31)  // infinity, or a NaN made quiet
    return bits_as<float>(sign | 0x7f800000 | fraction << 13 | (fraction != 0 ? 0x400000u : 0u));
  const float magnitude = exponent == 0 ? std::ldexp(float(fraction), -24)
                                        : bits_as<float>((exponent + 112) << 23 | fraction << 13);
  return bits_as<float>(sign | bits_as<uint32_t>(magnitude));
}

// Replaces a subnormal number by a zero of its sign: DAZ for operands, FTZ for results.
OCTAVO_EMULATED float flush(float value) {
  const uint32_t bits = bits_as<uint32_t>(value);
  return (bits & 0x7f800000) == 0 ? bits_as<float>(bits & 0x80000000) : value;
}

// VCVTNE2PS2BF16: rounds to nearest, ties to even; subnormals become zeros, and NaNs become quiet.
OCTAVO_EMULATED int16_t float_to_bf16(float value) {
  const uint32_t bits = bits_as<uint32_t>(flush(value));
  if ((bits & 0x7fffffff) > 0x7f800000) return int16_t(bits >> 16 | 0x40);
  return int16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// VCVTPS2DQ: rounds to nearest, ties to even; NaNs and values out of range become the smallest integer.
OCTAVO_EMULATED int32_t float_to_int(float value) {
  return value >= -2147483648.0f && value < 2147483648.0f ? int32_t(std::nearbyintf(value)) : INT32_MIN;
}

// One accumulation of VDPBF16PS and TDPBF16PS.
OCTAVO_EMULATED float flushed_fma(float a, float b, float sum) {
  return flush(std::fmaf(flush(a), flush(b), flush(sum)));
}

OCTAVO_EMULATED float upper_bf16(uint32_t pair) { return bits_as<float>(pair & 0xffff0000); }
OCTAVO_EMULATED float lower_bf16(uint32_t pair) { return bits_as<float>(pair << 16); }

}  // namespace x86_emulator
