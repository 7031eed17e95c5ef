// Quantized weights as the integer kernels of AVX2 and AVX-512 need them: bytes of codes, and float32 scales
// and biases, a vector at a time. Internal linkage: see numeric.h.
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "linear/packed.h"
#include "runtime/unrolled.h"
#include "runtime/vectors.h"
#if defined(__AVX512F__)
#include "runtime/loads_avx512.h"
#endif

namespace octavo {
namespace {

typedef uint16_t HalfVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

#if defined(__AVX512F__)
inline Vec multiply_add(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline UintVec look_up(__m128i table, UintVec indices) {
  return (UintVec)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)indices);
}
inline UintVec load_bytes(const uint8_t* from) {
  return (UintVec)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Vec load(const uint8_t* from, Float type, int at) { return load16(from, type, at); }
#else
inline Vec multiply_add(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline UintVec look_up(__m128i table, UintVec indices) {
  return (UintVec)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)indices);
}
inline UintVec load_bytes(const uint8_t* from) {
  return (UintVec)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
inline Vec load(const uint8_t* from, Float type, int at) {
  if (type == Float::f32) return load(reinterpret_cast<const float*>(from) + at);
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * at));
  if (type == Float::f16) return _mm256_cvtph_ps(halves);
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
}
#endif

// Loads scales of E2M1 groups, as fp4_scale decodes them.
inline Vec load_fp4_scales(const uint8_t* from, bool e8m0) {
  const UintVec bits = load_bytes(from);
  if (e8m0) {
    const UintVec least = UintVec{} + 0x00400000, scale = bits << 23;  // 2^-127, which is subnormal
    return (Vec)(scale > least ? scale : least);
  }
  const Vec value = (Vec)((bits & 127) << 20) * 0x1p120f;
  return (Vec)((UintVec)value | bits >> 7 << 31);
}

// Scales of a vector of outputs, and what is added for the sum of the activations.
struct ScaleAndBias {
  Vec scale, bias;
};

// Unpacking of codes: four codes of each of kLanes outputs become the bytes of a vector. With kPlainCodes,
// sums of 4-bit codes need no middle, because they have 32 bits.
template <int kCodeBits, bool kE2m1 = false, bool kPlainCodes = false>
struct Format {
  static constexpr bool kAffine = !kE2m1;
  static constexpr bool kPlain = kPlainCodes;
  static constexpr bool kDirect = kCodeBits == 4 || kCodeBits == 8;  // else bytes are unpacked first
  static constexpr bool kWide = kCodeBits > 4;    // at AVX2, 16-bit lanes hold sums of only two products
  static constexpr bool kPairs = kCodeBits == 8;  // activations must be rounded with `pairs`
  static constexpr int kBits = kCodeBits;
  static constexpr int kLow = kCodeBits >= 4 && kCodeBits < 8 ? 4 : kCodeBits == 3 ? 2 : kCodeBits;
  static constexpr int kHigh = kCodeBits - kLow;
  static constexpr int kMiddle = kE2m1 ? 12 : kPlain || kCodeBits > 4 ? 0 : 1 << (kCodeBits - 1);
  // Number of quads of inputs after which every plane is at the start of a word again.
  static constexpr int kQuads = kHigh == 1 || kCodeBits == 1 ? 8 : kLow == 2 || kHigh == 2 ? 4 : 2;

  // Returns a plane's bits for four inputs (number `quad`), shifted by `above` to leave space for lower bits.
  static UintVec plane(const uint8_t* words, int bits, int quad, int above) {
    const HalfVec word = *reinterpret_cast<const HalfVec*>(words + quad * bits / 8 * 256);
    const int right = quad * bits % 8 - above;
    const uint16_t left = right < 0 ? -right : 0, mask = (((1 << bits) - 1) << above) * 0x0101;
    return (UintVec)((right < 0 ? word << left : word >> static_cast<uint16_t>(right)) & mask);
  }

  static UintVec load_codes(const uint8_t* low, const uint8_t* high, int quad) {
    UintVec codes = plane(low, kLow, quad, 0);
    if constexpr (kHigh > 0) codes |= plane(high, kHigh, quad, kLow);
    if constexpr (kE2m1)
      codes = look_up(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0), codes);
    return codes;
  }

  // Loads parameters of outputs [at, at + kLanes). For E2M1, scales are halved, because codes are loaded as
  // twice their values.
  static inline __attribute__((always_inline)) ScaleAndBias parameters(const uint8_t* from, Float type,
                                                                       bool e8m0, int at) {
    if constexpr (kE2m1) return {load_fp4_scales(from + at, e8m0) * 0.5f, Vec{}};
    const Vec scale = load(from, type, at), bias = load(from, type, kPanel + at);
    if constexpr (kPlain) return {scale, bias};
    return {scale, multiply_add(Vec{} + static_cast<float>(kMiddle), scale, bias)};
  }
};

// Scales and biases of a block for 64 outputs.
struct Parameters {
  alignas(64) float scale[kPanel];
  alignas(64) float bias[kPanel];
};

template <class F>
inline void load_parameters(const PackedShape& shape, const uint8_t* from, Parameters& out) {
  for (int n = 0; n < kPanel; n += kLanes) {
    const ScaleAndBias found = F::parameters(from, shape.scale_type, shape.kind == WeightKind::mxfp4, n);
    store(out.scale + n, found.scale);
    store(out.bias + n, found.bias);
  }
}

// Unpacks a block of `quads` quads of inputs to bytes [quads][64 outputs][4], the codes of Format<8>.
template <class F>
inline void unpack(const uint8_t* low, const uint8_t* high, int quads, uint8_t* to) {
  for (; quads > 0; quads -= F::kQuads, to += F::kQuads * 256) {
    unrolled<F::kQuads>([&](auto quad) __attribute__((always_inline)) {
      unrolled<kPanel / kLanes>([&](auto c) __attribute__((always_inline)) {
        constexpr int kAt = 4 * kLanes * c;
        *reinterpret_cast<UintVec*>(to + quad * 256 + kAt) =
            (UintVec)F::load_codes(low + kAt, high + kAt, quad);
      });
    });
    low += F::kQuads * F::kLow / 8 * 256;
    high += F::kQuads * F::kHigh / 8 * 256;
  }
}

}  // namespace
}  // namespace octavo
