// Register tiles of integer products on AVX-512, 6 rows by 64 outputs, for all quantized weights. Internal
// linkage: see numeric.h.
#pragma once

#include "linear/int8_avx512.h"
#include "runtime/dispatch.h"
#include "runtime/dots_avx512.h"
#include "runtime/unrolled.h"

namespace octavo::avx512 {
namespace {

constexpr int kTileRows = 6;    // with 64 outputs: 24 sums, 4 vectors of codes, 1 of activations
constexpr int kItemTiles = 12;  // most row tiles that share a panel; their sums stay in L1
constexpr int kAhead = 4096;    // fewest bytes of weights to prefetch ahead

inline __m512i broadcast4(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}

// Always inlined, because GCC 12 treats a call that only prefetches as having no effect and drops it.
inline __attribute__((always_inline)) void prefetch(const uint8_t* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
}

// Prefetches a line of weights into L2, or past it.
inline __attribute__((always_inline)) void fetch_weights(const uint8_t* p, bool past_l2) {
  if (past_l2) _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_NTA);
  else _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
}

// Prefetches a line of weights that is read once, or is read again while it is still in L1.
inline __attribute__((always_inline)) void fetch_weights(const uint8_t* p) {
  fetch_weights(p, kCore == Core::zen5);
}

// Returns how many bytes of weights ahead a single row prefetches. For 4 bits on a Zen 4, the hardware
// prefetcher alone is faster. 8 and 16 bits have the best distances measured; 5 and 6 bits were not measured.
inline int row_ahead(int bits) {
  if (kCore != Core::zen4) return kAhead;
  return bits == 4 ? 0 : bits == 8 ? 2048 : 3072;
}

// Returns the prefetch distance in bytes for `rows` rows, in whole blocks of a panel.
inline std::size_t bytes_ahead(const PackedShape& shape, int rows) {
  const std::size_t bytes = shape.block_bytes(), ahead = rows == 1 ? row_ahead(shape.bits) : kAhead;
  return (ahead + bytes - 1) / bytes * bytes;
}

// Memory to prefetch. Each step of a row tile requests a few cache lines. Requested all at once, they would
// delay each other and the loads of the products.
class Fetch {
 public:
  // Divides `bytes` bytes among `tiles` row tiles of `steps` steps.
  Fetch(const uint8_t* from, std::size_t bytes, int tiles, int steps)
      : from_(from), steps_(steps), lines_(static_cast<int>(bytes / 64)) {
    while (per_step_ < kMost && per_step_ * steps * tiles < lines_) per_step_ *= 2;
  }

  // Calls body(integral constant of lines per step, first line) for row tile number `tile`.
  template <class Body>
  void for_tile(int tile, Body&& body) const {
    const int first = tile * steps_ * per_step_;
    const uint8_t* const from = from_ + 64 * first;
    if (first >= lines_) body(std::integral_constant<int, 0>(), from);
    else if (per_step_ == 1) body(std::integral_constant<int, 1>(), from);
    else if (per_step_ == 2) body(std::integral_constant<int, 2>(), from);
    else body(std::integral_constant<int, kMost>(), from);
  }

 private:
  static constexpr int kMost = 4;  // most lines to prefetch per step: as many as a step reads
  const uint8_t* from_;
  int steps_, lines_, per_step_ = 1;
};

template <int R>
struct Sums {
  __m512i at[R][4];
};

// Adds one word of activations per row times the codes of four vectors of outputs.
template <int R>
inline __attribute__((always_inline)) void add_words(const int8_t* x, std::size_t stride,
                                                     const __m512i (&codes)[4], Sums<R>& sums) {
  unrolled<R>([&](auto m) __attribute__((always_inline)) {
    const __m512i value = broadcast4(x + m * stride);
    unrolled<4>([&](auto c) __attribute__((always_inline)) { add_dots(sums.at[m][c], codes[c], value); });
  });
}

// Adds one group's integer products, which are exact in any order, to the sums of R rows by 64 outputs. Each
// step prefetches kLines lines of `ahead`.
template <int R, int kBits, int kLines>
inline __attribute__((always_inline)) void add_group(const int8_t* x, std::size_t stride, int group,
                                                     const uint8_t* words, const uint8_t* ahead,
                                                     Sums<R>& sums) {
  const __m512i low_half = _mm512_set1_epi8(15);
  for (int k = 0; k < group; k += 32 / kBits, words += 256, ahead += 64 * kLines) {
    __m512i codes[4];
    unrolled<4>([&](auto c) __attribute__((always_inline)) {
      codes[c] = _mm512_loadu_si512(words + 64 * c);
      if constexpr (c < kLines) fetch_weights(ahead + 64 * c);
    });
    if constexpr (kBits == 4) {
      __m512i low[4];
      unrolled<4>([&](auto c)
                      __attribute__((always_inline)) { low[c] = _mm512_and_si512(codes[c], low_half); });
      add_words<R>(x + k, stride, low, sums);
      unrolled<4>([&](auto c) __attribute__((always_inline)) {
        codes[c] = _mm512_and_si512(_mm512_srli_epi16(codes[c], 4), low_half);
      });
      add_words<R>(x + k + 4, stride, codes, sums);
    } else {
      add_words<R>(x + k, stride, codes, sums);
    }
  }
}

// Does the same as add_group for a single row, whose sums begin at zero. Prefetches words `ahead` bytes
// further on (0: none).
template <int kBits>
inline __attribute__((always_inline)) Sums<1> dot_row(const int8_t* x, int group, const uint8_t* words,
                                                      std::size_t ahead) {
  Sums<1> dots{};
  if (ahead > 0) add_group<1, kBits, 4>(x, group, group, words, words + ahead, dots);
  else add_group<1, kBits, 0>(x, group, group, words, words, dots);
  return dots;
}

// Activations of some rows for one group of inputs.
struct GroupRows {
  const int8_t *codes, *next;  // `next`: codes of the next group, to be prefetched
  const float *scales, *code_sums;
  const int32_t* sums;
};

}  // namespace
}  // namespace octavo::avx512
