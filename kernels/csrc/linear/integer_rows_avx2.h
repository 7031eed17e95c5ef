// Activations for AVX2's integer kernels: 8-bit codes in tiles of rows. Internal linkage: see numeric.h.
#pragma once

#include <immintrin.h>

#include "linear/common.h"

namespace octavo::avx2 {
namespace {

constexpr int kMaxBlock = 64;  // most inputs that share a scale

// Activations in tiles of rows. Each tile of R rows has codes [inputs / 4][R] of four bytes. For each block
// and row there are a scale a, the number a sum(xq) by which the weights' bias is multiplied, and the
// integers from which 16-bit sums start.
struct Rows {
  int blocks;
  int32_t* codes;
  float* scales;
  float* sums;
  int32_t* starts;
};

// The codes of one row in one block.
struct BlockCodes {
  alignas(32) int32_t words[kMaxBlock / 4];  // four codes per word
  float scale;
  int even, odd;  // sums of the codes in the lower (even) and upper (odd) halves of words
};

// Factor that turns a block's values into codes, and scale that turns codes into values (NaN if a value is
// not finite).
struct BlockScale {
  float factor, scale;
};

// Limits codes to 127. With `pairs`, also limits each sum of two inputs that VPMADDUBSW adds (0 and 1, 2 and
// 3, ...) to 127. Such a sum is at most 128 when rounded, and 255 times 128 fits into 16 bits.
inline BlockScale block_scale(const float* x, int block, bool pairs) {
  constexpr float kMost = 127;
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  __m256 largest = _mm256_setzero_ps(), poison = _mm256_setzero_ps();
  for (int k = 0; k < block; k += 8) {
    const __m256 value = _mm256_load_ps(x + k);
    largest = _mm256_max_ps(largest, _mm256_and_ps(value, magnitude));
    if (pairs) {
      const __m256 sum = _mm256_add_ps(value, _mm256_permute_ps(value, 0xb1));
      largest = _mm256_max_ps(largest, _mm256_and_ps(sum, magnitude));
    }
    poison = _mm256_fmadd_ps(value, _mm256_setzero_ps(), poison);  // 0, or NaN after a non-finite x
  }
  alignas(32) float lanes[8], poisons[8];
  _mm256_store_ps(lanes, largest);
  _mm256_store_ps(poisons, poison);
  float limit = 0, bad = 0;
  for (int i = 0; i < 8; ++i) limit = lanes[i] > limit ? lanes[i] : limit, bad += poisons[i];
  // With a smaller limit the factor could overflow, so such a block becomes zeros.
  const float factor = limit > 1e-30f && bad == 0 ? kMost / limit : 0.0f;
  return {factor, limit / kMost + bad};
}

// Converts sixteen values to codes of 16 bits; zeros if the factor is 0.
inline __m256i round_codes(const float* x, float factor) {
  const __m256 by = _mm256_set1_ps(factor);
  const __m256 low = factor == 0 ? by : _mm256_mul_ps(_mm256_load_ps(x), by);
  const __m256 high = factor == 0 ? by : _mm256_mul_ps(_mm256_load_ps(x + 8), by);
  const __m256i codes = _mm256_packs_epi32(_mm256_cvtps_epi32(low), _mm256_cvtps_epi32(high));
  return _mm256_permute4x64_epi64(codes, 0xd8);
}

inline BlockCodes quantize_block(const LinearCall& call, std::size_t at, int block, bool pairs) {
  alignas(32) float x[kMaxBlock];
  load_floats(call.x, call.x_type, at, block, x);
  const BlockScale scale = block_scale(x, block, pairs);
  BlockCodes result;
  result.scale = scale.scale;
  __m256i sums_of_two = _mm256_setzero_si256();  // lower and upper halves of words alternate
  for (int k = 0; k < block; k += 16) {
    const __m256i codes = round_codes(x + k, scale.factor);
    sums_of_two = _mm256_add_epi32(sums_of_two, _mm256_madd_epi16(codes, _mm256_set1_epi16(1)));
    const __m128i low = _mm256_castsi256_si128(codes), high = _mm256_extracti128_si256(codes, 1);
    _mm_store_si128(reinterpret_cast<__m128i*>(result.words + k / 4), _mm_packs_epi16(low, high));
  }
  alignas(32) int32_t sums[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(sums), sums_of_two);
  result.even = sums[0] + sums[2] + sums[4] + sums[6];
  result.odd = sums[1] + sums[3] + sums[5] + sums[7];
  return result;
}

inline int32_t pair(int low, int high) {
  return static_cast<int32_t>((low & 0xffff) | static_cast<uint32_t>(high) << 16);
}

inline void quantize_tile(const LinearCall& call, const RowTiles& tiles, int tile, int block, int middle,
                          bool pairs, const Rows& out) {
  const int inputs = call.weight->shape.inputs, first = tiles.first(tile), size = tiles.size(tile);
  for (int m = 0; m < size; ++m)
    for (int b = 0; b < out.blocks; ++b) {
      const std::size_t at =
          static_cast<std::size_t>(first + m) * inputs + static_cast<std::size_t>(b) * block;
      const BlockCodes quantized = quantize_block(call, at, block, pairs);
      const std::size_t blocks_before =
          static_cast<std::size_t>(first) * out.blocks + static_cast<std::size_t>(b) * size;
      int32_t* target = out.codes + blocks_before * (block / 4) + m;
      for (int i = 0; i < block / 4; ++i) target[i * size] = quantized.words[i];
      out.scales[blocks_before + m] = quantized.scale;
      out.sums[blocks_before + m] = quantized.scale * static_cast<float>(quantized.even + quantized.odd);
      out.starts[blocks_before + m] = pair(-middle * quantized.even, -middle * quantized.odd);
    }
}

// Converts all rows, in thread_scratch slot 1; `pairs`: see block_scale.
inline Rows quantize_rows(const LinearCall& call, const RowTiles& tiles, int block, int middle, bool pairs) {
  const PackedShape& shape = call.weight->shape;
  const std::size_t rows = call.rows, blocks = shape.inputs / block;
  const std::size_t code_words = rows * shape.inputs / 4;
  int32_t* codes = static_cast<int32_t*>(thread_scratch(4 * (code_words + 3 * rows * blocks), 1));
  float* scales = reinterpret_cast<float*>(codes + code_words);
  float* sums = scales + rows * blocks;
  const Rows out{static_cast<int>(blocks), codes, scales, sums,
                 reinterpret_cast<int32_t*>(sums + rows * blocks)};
  const auto quantize = [&](int tile) { quantize_tile(call, tiles, tile, block, middle, pairs, out); };
  if (call.rows > 8) parallel_for(tiles.count, quantize);
  else
    for (int tile = 0; tile < tiles.count; ++tile) quantize(tile);
  return out;
}

}  // namespace
}  // namespace octavo::avx2
