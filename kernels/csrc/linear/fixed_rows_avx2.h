// bf16 activations in 16-bit fixed point, in tiles of rows, for linear/fixed_avx2.cpp. Internal linkage: see
// numeric.h.
#pragma once

#include <immintrin.h>

#include "linear/common.h"

namespace octavo::avx2 {
namespace {

// Activations in tiles of rows. Each tile of R rows has codes [inputs / 2][R], two inputs per word and zero
// padding, and steps [groups][R], the values of a code of 1.
struct FixedRows {
  int groups;
  int32_t* codes;
  float* steps;

  const int32_t* codes_of(int row, int inputs) const {
    return codes + static_cast<std::size_t>(row) * (inputs / 2);
  }
  const float* steps_of(int row) const { return steps + static_cast<std::size_t>(row) * groups; }
};

// The power of two that scales a group's largest value to [2^13, 2^14), and its inverse. If a value is not
// finite, or is so large that products could overflow, codes become zeros and the inverse NaN.
struct FixedScale {
  float factor, step;
};

inline FixedScale fixed_scale(const bf16_t* x, int count) {
  __m256i largest = _mm256_setzero_si256();
  for (int k = 0; k < count; k += 16) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + k));
    largest = _mm256_max_epu16(largest, _mm256_and_si256(bits, _mm256_set1_epi16(0x7fff)));
  }
  const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  // Searches for a maximum by complements, because the instruction finds a minimum.
  const int inverse = _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1))), 0);
  const int exponent = (0xffff - inverse) >> 7;
  constexpr int kTooLarge = 127 + 110;  // 2^110: sums over weight codes are up to 2^17 times as large
  if (exponent >= kTooLarge) return {0.0f, as_float(0x7fc00000)};
  const uint32_t field = std::min(2 * 127 + 13 - exponent, 253);  // capped: tiny groups get smaller codes
  return {as_float(field << 23), as_float((254 - field) << 23)};
}

// Converts `count` values to codes, two per word.
inline void fixed_codes(const bf16_t* x, int count, float factor, int32_t* words) {
  const __m256 by = _mm256_set1_ps(factor), none = _mm256_setzero_ps();
  for (int k = 0; k < count; k += 16) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + k));
    const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(0xffff0000)));
    const __m256i first = _mm256_cvtps_epi32(factor == 0 ? none : _mm256_mul_ps(even, by));
    const __m256i second = _mm256_cvtps_epi32(factor == 0 ? none : _mm256_mul_ps(odd, by));
    _mm256_store_si256(reinterpret_cast<__m256i*>(words + k / 2),
                       _mm256_blend_epi16(first, _mm256_slli_epi32(second, 16), 0xaa));
  }
}

inline void fix_tile(const LinearCall& call, const RowTiles& tiles, int tile, const FixedRows& out) {
  const PackedShape& shape = call.weight->shape;
  const int padded = shape.padded_inputs(), first = tiles.first(tile), size = tiles.size(tile);
  alignas(32) bf16_t group[kFixedGroup];
  alignas(32) int32_t words[kFixedGroup / 2];
  for (int m = 0; m < size; ++m) {
    const bf16_t* x = static_cast<const bf16_t*>(call.x) + static_cast<std::size_t>(first + m) * shape.inputs;
    int32_t* codes = out.codes + static_cast<std::size_t>(first) * (padded / 2) + m;
    float* steps = out.steps + static_cast<std::size_t>(first) * out.groups + m;
    for (int k = 0; k < padded; k += kFixedGroup, steps += size) {
      const int count = std::min(padded - k, kFixedGroup), known = std::min(shape.inputs - k, count);
      const bool whole = known == count;
      if (!whole) {
        std::memset(group, 0, sizeof(group));
        if (known > 0) std::memcpy(group, x + k, sizeof(bf16_t) * known);
      }
      const bf16_t* values = whole ? x + k : group;
      const FixedScale scale = fixed_scale(values, count);
      *steps = scale.step;
      fixed_codes(values, count, scale.factor, words);
      for (int i = 0; i < count / 2; ++i, codes += size) *codes = words[i];
    }
  }
}

// Converts all rows, in thread_scratch slot 1.
inline FixedRows fix_rows(const LinearCall& call, const RowTiles& tiles) {
  const std::size_t rows = call.rows, words = rows * call.weight->shape.padded_inputs() / 2;
  const std::size_t groups = call.weight->shape.fixed_groups();
  int32_t* codes = static_cast<int32_t*>(thread_scratch(4 * (words + rows * groups), 1));
  const FixedRows out{static_cast<int>(groups), codes, reinterpret_cast<float*>(codes + words)};
  const auto fix = [&](int tile) { fix_tile(call, tiles, tile, out); };
  if (call.rows > 8) parallel_for(tiles.count, fix);
  else
    for (int tile = 0; tile < tiles.count; ++tile) fix(tile);
  return out;
}

}  // namespace
}  // namespace octavo::avx2
