// Register tiles of integer products on AVX-512, 6 rows by 64 outputs: what kernels of all weights share.
// Internal linkage: see numeric.h.
#pragma once

#include "linear/int8_avx512.h"
#include "runtime/dots_avx512.h"
#include "runtime/unrolled.h"

namespace octavo::avx512 {
namespace {

constexpr int kTileRows = 6;  // times 64 outputs: 24 sums, 4 codes, and an activation in 32 registers
constexpr int kItemTiles =
    12;  // row tiles that share what they read of a panel; their sums stay in the first cache
constexpr int kAhead = 4096;  // bytes of codes fetched before they are used

inline __m512i broadcast4(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}

inline void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

// A group's scales and biases of the 64 outputs.
struct Parameters {
  alignas(64) float scale[kPanel];
  alignas(64) float bias[kPanel];
};

template <int R>
struct Sums {
  __m512i at[R][4];
};

// One word of activations per row, times the codes of four vectors of outputs.
template <int R>
inline __attribute__((always_inline)) void add_words(const int8_t* x, std::size_t stride,
                                                     const __m512i (&codes)[4], Sums<R>& sums) {
  unrolled<R>([&](auto m) __attribute__((always_inline)) {
    const __m512i value = broadcast4(x + m * stride);
    unrolled<4>([&](auto c) __attribute__((always_inline)) { add_dots(sums.at[m][c], codes[c], value); });
  });
}

// Rows of activations in one group.
struct GroupRows {
  const int8_t *codes, *next;  // `next`: in the group after it, to be fetched meanwhile
  const float *scales, *code_sums;
};

}  // namespace
}  // namespace octavo::avx512
