// Activations as AVX2's integer kernels take them: rounded to codes, in tiles of rows. Internal linkage: see
// numeric.h.
#pragma once

#include <immintrin.h>

#include "linear_common.h"

namespace octavo::avx2 {
namespace {

constexpr int kMaxBlock = 64;  // inputs that share a scale

// Activations in tiles of rows. For each tile of R rows: codes [inputs / 4][R] of four bytes, or
// [inputs / 4][2][R] of two halves, inputs (0, 2) and (1, 3); then per block [R] what scales the
// products, a; what the weight's bias meets, a sum(xq); and where the 16-bit sums start.
struct Rows {
  int words;  // of codes per input quad: 1 or 2
  int blocks;
  int32_t* codes;
  float* scales;
  float* sums;
  int32_t* starts;
};

struct BlockCodes {
  int16_t codes[kMaxBlock];
  float scale;
};

inline BlockCodes quantize_block(const LinearCall& call, std::size_t at, int block, int most) {
  alignas(32) float x[kMaxBlock];
  load_floats(call.x, call.x_type, at, block, x);
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  __m256 largest = _mm256_setzero_ps(), poison = _mm256_setzero_ps();
  for (int k = 0; k < block; k += 8) {
    const __m256 value = _mm256_load_ps(x + k);
    largest = _mm256_max_ps(largest, _mm256_and_ps(value, magnitude));
    poison = _mm256_fmadd_ps(value, _mm256_setzero_ps(), poison);  // 0, or NaN once x is not finite
  }
  alignas(32) float lanes[8], poisons[8];
  _mm256_store_ps(lanes, largest);
  _mm256_store_ps(poisons, poison);
  float limit = 0, bad = 0;
  for (int i = 0; i < 8; ++i) limit = lanes[i] > limit ? lanes[i] : limit, bad += poisons[i];
  BlockCodes result;
  result.scale = limit / static_cast<float>(most) + bad;
  // Below this the inverse could overflow; such a block counts as zeros.
  const float inverse = limit > 1e-30f && bad == 0 ? static_cast<float>(most) / limit : 0.0f;
  const __m256 factor = _mm256_set1_ps(inverse);
  for (int k = 0; k < block; k += 8) {
    alignas(32) int32_t codes[8];
    const __m256 scaled = bad == 0 ? _mm256_mul_ps(_mm256_load_ps(x + k), factor) : factor;
    _mm256_store_si256(reinterpret_cast<__m256i*>(codes), _mm256_cvtps_epi32(scaled));
    for (int i = 0; i < 8; ++i) result.codes[k + i] = static_cast<int16_t>(codes[i]);
  }
  return result;
}

inline int32_t pair(int low, int high) {
  return static_cast<int32_t>((low & 0xffff) | static_cast<uint32_t>(high) << 16);
}

// Four codes as the words that kernels broadcast.
inline void place_quad(const int16_t* x, int words, int size, int32_t* out) {
  if (words == 2) {
    out[0] = pair(x[0], x[2]);
    out[size] = pair(x[1], x[3]);
  } else {
    out[0] = (x[0] & 255) | (x[1] & 255) << 8 | (x[2] & 255) << 16 |
             static_cast<int32_t>(static_cast<uint32_t>(x[3]) << 24);
  }
}

inline void quantize_tile(const LinearCall& call, const RowTiles& tiles, int tile, int block, int middle,
                          const Rows& out) {
  const int inputs = call.weight->shape.inputs, first = tiles.first(tile), size = tiles.size(tile);
  const std::size_t quads = static_cast<std::size_t>(inputs) / 4 * out.words;
  for (int m = 0; m < size; ++m)
    for (int b = 0; b < out.blocks; ++b) {
      const std::size_t at =
          static_cast<std::size_t>(first + m) * inputs + static_cast<std::size_t>(b) * block;
      const BlockCodes quantized = quantize_block(call, at, block, out.words == 2 ? 32767 : 127);
      int32_t* target =
          out.codes + first * quads + static_cast<std::size_t>(b) * (block / 4) * out.words * size + m;
      int even = 0, odd = 0;  // sums of the inputs in the lower and the upper half of a word
      for (int k = 0; k < block; k += 4) {
        const int16_t* x = quantized.codes + k;
        place_quad(x, out.words, size, target + k / 4 * out.words * size);
        even += x[0] + x[1];
        odd += x[2] + x[3];
      }
      const std::size_t i =
          static_cast<std::size_t>(first) * out.blocks + static_cast<std::size_t>(b) * size + m;
      out.scales[i] = quantized.scale;
      out.sums[i] = quantized.scale * static_cast<float>(even + odd);
      out.starts[i] = pair(-middle * even, -middle * odd);
    }
}

// All rows, in the caller's scratch slot 1.
inline Rows quantize_rows(const LinearCall& call, const RowTiles& tiles, int block, int words, int middle) {
  const PackedShape& shape = call.weight->shape;
  const std::size_t rows = call.rows, blocks = shape.inputs / block;
  const std::size_t code_words = rows * shape.inputs / 4 * words;
  int32_t* codes = static_cast<int32_t*>(thread_scratch(4 * (code_words + 3 * rows * blocks), 1));
  float* scales = reinterpret_cast<float*>(codes + code_words);
  float* sums = scales + rows * blocks;
  const Rows out{
      words, static_cast<int>(blocks), codes, scales, sums, reinterpret_cast<int32_t*>(sums + rows * blocks)};
  const auto quantize = [&](int tile) { quantize_tile(call, tiles, tile, block, middle, out); };
  if (call.rows > 8) parallel_for(tiles.count, quantize);
  else
    for (int tile = 0; tile < tiles.count; ++tile) quantize(tile);
  return out;
}

}  // namespace
}  // namespace octavo::avx2
