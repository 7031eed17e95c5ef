// Quantized weights for AVX2's integer kernels: bytes of codes, and float32 scales and biases. Internal
// linkage: see numeric.h.
#pragma once

#include <immintrin.h>

#include "linear/packed.h"

namespace octavo::avx2 {
namespace {

// Unpacking of codes: four codes of each of eight outputs become the bytes of a register.
template <int kCodeBits, bool kE2m1 = false>
struct Format {
  static constexpr bool kAffine = !kE2m1;
  static constexpr bool kDirect = kCodeBits == 4 || kCodeBits == 8;  // else bytes are unpacked first
  static constexpr bool kWide = kCodeBits > 4;    // 16-bit lanes hold sums of only two products
  static constexpr bool kPairs = kCodeBits == 8;  // activations must be rounded with `pairs`
  static constexpr int kLow = kCodeBits >= 4 && kCodeBits < 8 ? 4 : kCodeBits == 3 ? 2 : kCodeBits;
  static constexpr int kHigh = kCodeBits - kLow;
  static constexpr int kMiddle = kE2m1 ? 12 : kWide ? 0 : 1 << (kCodeBits - 1);
  // Number of quads of inputs after which every plane is at the start of a word again.
  static constexpr int kQuads = kE2m1                          ? 2
                                : kHigh == 1 || kCodeBits == 1 ? 8
                                : kLow == 2 || kHigh == 2      ? 4
                                                               : 2;

  static __m256i plane(const uint8_t* words, int bits, int quad, int above) {
    const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + quad * bits / 8 * 256));
    const int right = quad * bits % 8 - above;
    const __m256i mask = _mm256_set1_epi8(static_cast<char>(((1 << bits) - 1) << above));
    if (bits == 8) return word;
    return _mm256_and_si256(right < 0 ? _mm256_slli_epi16(word, -right) : _mm256_srli_epi16(word, right),
                            mask);
  }

  static __m256i load(const uint8_t* low, const uint8_t* high, int quad) {
    __m256i codes = plane(low, kLow, quad, 0);
    if constexpr (kHigh > 0) codes = _mm256_or_si256(codes, plane(high, kHigh, quad, kLow));
    if constexpr (kE2m1) {
      const __m128i values = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
      codes = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), codes);
    }
    return codes;
  }
};

// Scales and biases of a block for 64 outputs, as the sums need them.
struct Parameters {
  alignas(32) float scale[kPanel];
  alignas(32) float bias[kPanel];
};

// Loads eight affine scales or biases.
inline __m256 load_eight(const uint8_t* from, Float type, int at) {
  if (type == Float::f32) return _mm256_loadu_ps(reinterpret_cast<const float*>(from) + at);
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * at));
  if (type == Float::f16) return _mm256_cvtph_ps(halves);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

// Loads eight scales of E2M1 groups, as fp4_scale decodes them.
inline __m256 load_eight_fp4(const uint8_t* from, bool e8m0, int at) {
  const __m256i bits = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + at)));
  if (e8m0) {
    const __m256i zero = _mm256_cmpeq_epi32(bits, _mm256_setzero_si256());
    const __m256i least = _mm256_and_si256(zero, _mm256_set1_epi32(0x00400000));
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(bits, 23), least));
  }
  const __m256i magnitude = _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(127)), 20);
  const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(bits, 7), 31);
  const __m256 value = _mm256_mul_ps(_mm256_castsi256_ps(magnitude), _mm256_set1_ps(0x1p120f));
  return _mm256_or_ps(value, _mm256_castsi256_ps(sign));
}

struct Eight {
  __m256 scale, bias;
};

// Loads parameters of outputs [at, at + 8), of this type if affine. For E2M1, scales are halved, because F
// loads codes as twice their values.
template <class F>
inline __attribute__((always_inline)) Eight load_parameters_of_eight(const uint8_t* from, Float type,
                                                                     bool e8m0, int at) {
  if constexpr (!F::kAffine)
    return {_mm256_mul_ps(_mm256_set1_ps(0.5f), load_eight_fp4(from, e8m0, at)), _mm256_setzero_ps()};
  const __m256 middle = _mm256_set1_ps(static_cast<float>(F::kMiddle));
  const __m256 scale = load_eight(from, type, at);
  return {scale, _mm256_fmadd_ps(middle, scale, load_eight(from, type, kPanel + at))};
}

template <class F>
inline void load_parameters(const PackedShape& shape, const uint8_t* from, Parameters& out) {
  for (int n = 0; n < kPanel; n += 8) {
    const Eight eight =
        load_parameters_of_eight<F>(from, shape.scale_type, shape.kind == WeightKind::mxfp4, n);
    _mm256_store_ps(out.scale + n, eight.scale);
    _mm256_store_ps(out.bias + n, eight.bias);
  }
}

}  // namespace
}  // namespace octavo::avx2
