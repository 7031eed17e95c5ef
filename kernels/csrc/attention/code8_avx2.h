// Codes of 8 bits as 16-bit lanes, for products of words (VPMADDWD): int8, with a scale for a row, and
// affine8, with a scale and a bias for each group of its dims.
#pragma once

#include "attention/codes_avx2.h"
#include "attention/rows.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kLargestWord = 32767;  // of the fixed point of queries and weights
constexpr int kMaxChunks = kMaxDim / kChunk;

// kBias: scales and biases of groups, else one scale for the row. Two words of a lane pair add up to at most
// 2 kLargestCode kLargestWord.
struct Int8 {
  static constexpr bool kBias = false;
  static constexpr int kLargestCode = 128;
  OCTAVO_INLINE __m256i widen(__m128i bytes) { return _mm256_cvtepi8_epi16(bytes); }
  // The lower and the upper byte of each word.
  OCTAVO_INLINE __m256i lower(__m256i words) { return upper(_mm256_slli_epi16(words, 8)); }
  OCTAVO_INLINE __m256i upper(__m256i words) { return _mm256_srai_epi16(words, 8); }
};
struct Affine8 {
  static constexpr bool kBias = true;
  static constexpr int kLargestCode = 255;
  OCTAVO_INLINE __m256i widen(__m128i bytes) { return _mm256_cvtepu8_epi16(bytes); }
  OCTAVO_INLINE __m256i lower(__m256i words) { return _mm256_and_si256(words, _mm256_set1_epi16(255)); }
  OCTAVO_INLINE __m256i upper(__m256i words) { return _mm256_srli_epi16(words, 8); }
};
static_assert(kAffineGroup == kChunk);
static_assert(int64_t(kTileTokens) * Affine8::kLargestCode * kLargestWord <= INT32_MAX);

template <class Code>
constexpr int num_groups(int dim) {
  return Code::kBias ? dim / kChunk : 1;
}

// Scales (and biases) of the 16 rows of a block.
template <class Code>
struct BlockScales {
  float scales[num_groups<Code>(kMaxDim)][16];
  float biases[Code::kBias ? kMaxChunks : 1][16];

  // Of rows that are not visible they are zeros.
  __attribute__((always_inline)) void load(const uint8_t* from, uint32_t visible, int dim) {
    if constexpr (!Code::kBias) return load_halves(from, visible, scales[0]);
    float rows[16 * 2 * kMaxChunks];
    const int groups = num_groups<Code>(dim);
    for (int i = 0; i < 16 * 2 * groups; i += 16, from += 32) {
      float some[16];
      load_halves(from, 0xffff, some);
      std::memcpy(rows + i, some, sizeof some);
    }
    for (int t = 0; t < 16; ++t)
      for (int g = 0; g < groups; ++g) {
        const bool seen = visible >> t & 1;
        scales[g][t] = seen ? rows[(t * groups + g) * 2] : 0.0f;
        biases[g][t] = seen ? rows[(t * groups + g) * 2 + 1] : 0.0f;
      }
  }
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
