// Scalar number formats. Everything has internal linkage, because the same source is compiled for several
// instruction sets and the linker must not merge their functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace octavo {

using bf16_t = uint16_t;  // the upper half of a float32
using f16_t = uint16_t;   // IEEE binary16

enum class Float { bf16, f16, f32 };

namespace {

constexpr std::size_t float_size(Float type) { return type == Float::f32 ? 4 : 2; }

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float bf16_to_float(bf16_t value) { return as_float(static_cast<uint32_t>(value) << 16); }

// Rounds to nearest, ties to even; a NaN stays a (quiet) NaN.
inline bf16_t float_to_bf16(float value) {
  const uint32_t bits = as_bits(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40;
  return static_cast<bf16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

// Corrects the exponent by multiplying by 2^112, which is exact for subnormals, too.
inline float f16_to_float(f16_t value) {
  const uint32_t magnitude = static_cast<uint32_t>(value & 0x7fff) << 13;
  const uint32_t finite = as_bits(as_float(magnitude) * 0x1p112f);
  const uint32_t special = magnitude | 0x7f800000;
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000) << 16;
  return as_float((magnitude >= 0x0f800000 ? special : finite) | sign);
}

// Rounds to nearest, ties to even; overflow becomes infinity. VCVTPS2PH differs in a NaN's bits alone.
inline f16_t float_to_f16(float value) {
  const uint32_t bits = as_bits(value), magnitude = bits & 0x7fffffff;
  const uint32_t sign = (bits >> 16) & 0x8000;
  // Below 2^-14 the result is subnormal: adding 0.5 leaves its 10 rounded bits in the low mantissa.
  const uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000;
  const uint32_t normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  uint32_t result = magnitude < 0x38800000 ? subnormal : normal;
  result = magnitude >= 0x477ff000 ? 0x7c00 : result;
  result = magnitude > 0x7f800000 ? 0x7e00 : result;
  return static_cast<f16_t>(result | sign);
}

// Returns an integer key with the order of floats. Both zeros have the same key, and every NaN has the
// largest.
inline int32_t ordered_key(float value) {
  const uint32_t bits = as_bits(value + 0.0f);
  const int32_t below_zero = static_cast<int32_t>(bits) >> 31;  // -1 or 0, which compilers vectorize
  const int32_t key = static_cast<int32_t>(bits ^ (static_cast<uint32_t>(below_zero) >> 1));
  return (bits & 0x7fffffff) > 0x7f800000 ? INT32_MAX : key;
}

// Returns the float of an ordered_key; INT32_MAX gives a NaN.
inline float float_of_key(int32_t key) {
  const uint32_t bits = static_cast<uint32_t>(key);
  return as_float(key < 0 ? ~bits | 0x80000000 : bits);
}

// Values of E2M1 codes. Shifting their bits into place would be slow, because 1/2 would pass through a
// subnormal float32, which takes Intel's CPUs a hundred cycles.
inline constexpr float kE2M1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// Returns a group's scale: E8M0, 2^(bits - 127), also for 255 as in MLX; or E4M3.
inline float fp4_scale(bool e8m0, uint32_t bits) {
  if (e8m0) return as_float(bits == 0 ? 0x00400000 : bits << 23);
  return as_float((bits & 0x80) << 24 | as_bits(as_float((bits & 0x7f) << 20) * 0x1p120f));
}

// Loads `count` values of `type`, from element `offset` of `source`, as float32. Not inlined, because
// copies of these loops in every caller would take a tenth of the build.
[[gnu::noinline]] inline void load_floats(const void* source, Float type, std::size_t offset, int count,
                                          float* out) {
  if (type == Float::f32) {
    std::memcpy(out, static_cast<const float*>(source) + offset, sizeof(float) * count);
  } else if (type == Float::bf16) {
    const bf16_t* from = static_cast<const bf16_t*>(source) + offset;
    for (int i = 0; i < count; ++i) out[i] = bf16_to_float(from[i]);
  } else {
    const f16_t* from = static_cast<const f16_t*>(source) + offset;
    int i = 0;
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8)
      _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
    for (; i < count; ++i) out[i] = f16_to_float(from[i]);
  }
}

#if defined(__AVX512BF16__)
// Whether one of these 16 values has a subnormal bf16 result. The instruction that converts rounds like
// float_to_bf16, but replaces subnormal numbers by zero.
inline bool has_subnormal(__m512 values) {
  constexpr int kSubnormal = 0x20;
  return _mm512_fpclass_ps_mask(values, kSubnormal) != 0;
}
#endif

inline void store_bf16(const float* values, int count, bf16_t* to) {
  int i = 0;
#if defined(__AVX512BF16__)
  for (; i + 32 <= count; i += 32) {
    const __m512 low = _mm512_loadu_ps(values + i), high = _mm512_loadu_ps(values + i + 16);
    if (has_subnormal(low) || has_subnormal(high)) break;
    _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
#endif
  for (; i < count; ++i) to[i] = float_to_bf16(values[i]);
}

[[gnu::noinline]] inline void store_floats(void* target, Float type, std::size_t offset, int count,
                                           const float* values) {
  if (type == Float::f32) {
    std::memcpy(static_cast<float*>(target) + offset, values, sizeof(float) * count);
  } else if (type == Float::bf16) {
    store_bf16(values, count, static_cast<bf16_t*>(target) + offset);
  } else {
    f16_t* to = static_cast<f16_t*>(target) + offset;
    int i = 0;
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(values + i), 0));
#endif
    for (; i < count; ++i) to[i] = float_to_f16(values[i]);
  }
}

}  // namespace
}  // namespace octavo
