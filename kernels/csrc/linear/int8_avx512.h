// Common parts of AVX-512 and AMX for affine weights in integers. Results of both levels are bit-identical.
//
// Weights keep their unsigned codes q. Activations are rounded to signed 8-bit codes xq with a scale a per
// row and group. So
//
//   y = sum over groups of  a s (q . xq)  +  a b sum(xq)
//
// Integer sums are exact in any order, and groups are added in order. Rounding changes an activation by at
// most a / 2, which is max|x| / 254 of its group. Hence
//   |error| <= sum over groups of  max|x| / 254 * sum|w|.
// Internal linkage: see numeric.h.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cmath>

#include "linear/common.h"
#include "runtime/dots_avx512.h"
#include "runtime/loads_avx512.h"
#include "runtime/row_items.h"
#include "runtime/unrolled.h"

namespace octavo {
namespace {

// Activations in 8 bits, in blocks of inputs: codes [rows / together][blocks][together][block], so that
// `together` rows of a block are adjacent.
struct CodeRows {
  int8_t* codes;
  int together, blocks, block;

  // Returns how many rows of a block precede `row` of block `index`.
  std::size_t place(int index, int row) const {
    if (row < together) return static_cast<std::size_t>(index) * together + row;
    const std::size_t first = static_cast<std::size_t>(row / together) * blocks + index;
    return first * together + row % together;
  }
  // Returns the codes of `row` in block `index`.
  int8_t* at(int index, int row) const { return codes + place(index, row) * block; }
  std::size_t block_stride() const { return static_cast<std::size_t>(together) * block; }
};

// Activations with a scale for each row and block: scales a and a * sum(codes), [rows /
// together][blocks][2][together]; sums of codes by place.
struct Int8Rows : CodeRows {
  float* scales;
  int32_t* sums;

  float* scales_at(int index, int row) const { return scales + 2 * place(index, row) - row % together; }
};

// Returns the largest magnitude of activations [at, at + count); NaN if any is not finite. Bits of magnitudes
// are compared as integers, which have the same order and put NaNs last.
inline float largest_magnitude(const LinearCall& call, std::size_t at, int count) {
  const uint8_t* const from = static_cast<const uint8_t*>(call.x) + at * float_size(call.x_type);
  __m512i largest = _mm512_setzero_si512();
  if (call.x_type == Float::f32) {
    for (int k = 0; k < count; k += 16) {
      const __m512i bits = _mm512_loadu_si512(from + 4 * k);
      largest = _mm512_max_epi32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(INT32_MAX)));
    }
  } else {
    const auto add = [&](__m512i bits) {
      largest = _mm512_max_epu16(largest, _mm512_and_si512(bits, _mm512_set1_epi16(INT16_MAX)));
    };
    for (int k = 0; k + 32 <= count; k += 32) add(_mm512_loadu_si512(from + 2 * k));
    if (count % 32 != 0) {  // 16 values are left
      const uint8_t* const last = from + 2 * (count - 16);
      add(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(last))));
    }
    largest = _mm512_max_epi32(_mm512_srli_epi32(largest, 16),
                               _mm512_and_si512(largest, _mm512_set1_epi32(UINT16_MAX)));
  }
  const int32_t top = _mm512_reduce_max_epi32(largest);
  const float magnitude = call.x_type == Float::f32    ? std::bit_cast<float>(top)
                          : call.x_type == Float::bf16 ? bf16_to_float(static_cast<bf16_t>(top))
                                                       : f16_to_float(static_cast<f16_t>(top));
  constexpr int32_t kInfinity = 0x7f800000;
  return std::bit_cast<int32_t>(magnitude) < kInfinity ? magnitude : NAN;
}

// Returns the factor that turns activations into codes, given their largest magnitude. Below 1e-30 the factor
// could overflow, so such activations become zeros.
inline float inverse_scale(float limit) { return limit > 1e-30f ? 127.0f / limit : 0.0f; }

// Converts `count` activations to codes (x * inverse, rounded) and returns sums of codes. Also prefetches
// activations `ahead` bytes further on, unless `ahead` is 0.
template <Float kType>
__attribute__((always_inline)) inline __m512i round_codes_of(const uint8_t* x, int count, float inverse,
                                                             int8_t* codes, std::size_t ahead) {
  constexpr std::size_t kBytes = float_size(kType);
  // Pack instructions work within 128 bits; this puts word w of 128-bit lane l at 4 l + w.
  const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512 factor = _mm512_set1_ps(inverse);
  const auto round16 = [&](std::size_t at) __attribute__((always_inline)) {
    return _mm512_cvtps_epi32(_mm512_mul_ps(load16(x, kType, at), factor));
  };
  __m512i sum = _mm512_setzero_si512();
  int k = 0;
  for (; k + 64 <= count; k += 64) {
    __m512i words[4];
    unrolled<4>([&](auto i) __attribute__((always_inline)) { words[i] = round16(k + 16 * i); });
    if (ahead != 0)
      unrolled<kBytes>([&](auto line) __attribute__((always_inline)) {
        _mm_prefetch(x + k * kBytes + 64 * line + ahead, _MM_HINT_T0);
      });
    const __m512i packed =
        _mm512_packs_epi16(_mm512_packs_epi32(words[0], words[1]), _mm512_packs_epi32(words[2], words[3]));
    const __m512i bytes = _mm512_permutexvar_epi32(in_order, packed);
    add_dots(sum, _mm512_set1_epi8(1), bytes);
    _mm512_storeu_si512(codes + k, bytes);
  }
  for (; k < count; k += 16) {
    const __m512i code = round16(k);
    sum = _mm512_add_epi32(sum, code);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + k), _mm512_cvtsepi32_epi8(code));
  }
  return sum;
}

// Does the same as round_codes_of for activations of any type; the first one is element `at` of x.
__attribute__((always_inline)) inline __m512i round_codes(const LinearCall& call, std::size_t at, int count,
                                                          float inverse, int8_t* codes,
                                                          std::size_t ahead = 0) {
  const uint8_t* const x = static_cast<const uint8_t*>(call.x) + at * float_size(call.x_type);
  switch (call.x_type) {
    case Float::bf16: return round_codes_of<Float::bf16>(x, count, inverse, codes, ahead);
    case Float::f16: return round_codes_of<Float::f16>(x, count, inverse, codes, ahead);
    default: return round_codes_of<Float::f32>(x, count, inverse, codes, ahead);
  }
}

// Converts all rows to codes, with `together` adjacent rows (0: all); rows past the last are zeros. `block`:
// size of the weights' groups, or of blocks inside a group.
inline Int8Rows quantize_rows(const LinearCall& call, int block, int together = 0) {
  const std::size_t inputs = call.weight->shape.inputs, blocks = inputs / block;
  if (together == 0) together = std::max(1, call.rows);
  const std::size_t rows = (static_cast<std::size_t>(call.rows) + together - 1) / together * together,
                    code_bytes = (rows * inputs + 63) / 64 * 64;
  uint8_t* scratch = static_cast<uint8_t*>(thread_scratch(code_bytes + 12 * rows * blocks, 1));
  float* const scales = reinterpret_cast<float*>(scratch + code_bytes);
  const Int8Rows out{{reinterpret_cast<int8_t*>(scratch), together, static_cast<int>(blocks), block},
                     scales,
                     reinterpret_cast<int32_t*>(scales + 2 * rows * blocks)};
  const auto quantize = [&](int m) {
    const bool exists = m < call.rows;
    std::size_t place = out.place(0, m), at = m * inputs;
    float* scale = out.scales_at(0, m);
    for (std::size_t b = 0; b < blocks; ++b, place += together, at += block, scale += 2 * together) {
      int8_t* const codes = out.codes + place * block;
      const float limit = exists ? largest_magnitude(call, at, block) : 0.0f;
      if (!exists) std::memset(codes, 0, block);
      const __m512i sum = exists ? round_codes(call, at, block, inverse_scale(limit), codes) : __m512i{};
      out.sums[place] = _mm512_reduce_add_epi32(sum);
      scale[0] = limit / 127.0f;
      scale[together] = scale[0] * static_cast<float>(out.sums[place]);
    }
  };
  constexpr int kRows = 16;  // most rows per item: the scales of 16 rows share a cache line
  for_row_items(static_cast<int64_t>(rows), kRows, [&](int first, int last) {
    for (int m = first; m < last; ++m) quantize(m);
  });
  return out;
}

// Returns `sums` plus products of one group, with a scale and a bias per output. `dots`: integer products;
// `x_scale`: scale of the activations; `code_sum`: x_scale times the sum of their codes.
inline __m512 plus_products(__m512i dots, __m512 scale, __m512 bias, float x_scale, float code_sum,
                            __m512 sums) {
  const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(dots), scale);
  const __m512 sum = _mm512_fmadd_ps(product, _mm512_set1_ps(x_scale), sums);
  return _mm512_fmadd_ps(bias, _mm512_set1_ps(code_sum), sum);
}

// Does the same as plus_products with sums in memory.
inline void add_products(__m512i dots, __m512 scale, __m512 bias, float x_scale, float code_sum,
                         float* sums) {
  _mm512_storeu_ps(sums, plus_products(dots, scale, bias, x_scale, code_sum, _mm512_loadu_ps(sums)));
}

}  // namespace
}  // namespace octavo
