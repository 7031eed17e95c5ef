// Loading of 16-bit codes and floats as vectors of floats. `load_pair` returns two vectors of a row's values
// [at, at + 2 * kLanes), in memory order or, with `kSplit`, even elements before odd ones. Queries and
// accumulators then have that order too.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention/sides.h"
#include "runtime/vectors.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kStep = 2 * kLanes;  // values per load

struct Pair {
  Vec first, second;
};

struct FloatCodec {
  static constexpr bool kSplit = false;
  static constexpr int kBytes = 4;
  OCTAVO_INLINE Pair load_pair(const uint8_t* from) {
    const float* values = reinterpret_cast<const float*>(from);
    return {octavo::load(values), octavo::load(values + kLanes)};
  }
};

struct Bf16Codec {
  static constexpr bool kSplit = true;
  static constexpr int kBytes = 2;
  OCTAVO_INLINE Pair load_pair(const uint8_t* from) {
    IntVec both;
    std::memcpy(&both, from, sizeof both);  // rows may be unaligned
    return {(Vec)(both << 16), (Vec)(both & int32_t(0xffff0000))};
  }
};

#if defined(__F16C__)
struct Fp16Codec {
  static constexpr bool kSplit = false;
  static constexpr int kBytes = 2;
  OCTAVO_INLINE Vec load_vector(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
    typedef short Halves __attribute__((vector_size(16)));
    Vec to;
    for (int lane = 0; lane < kLanes; lane += 8) {
      Halves halves;
      std::memcpy(&halves, from + 2 * lane, 16);
      const auto eight = __builtin_ia32_vcvtph2ps256(halves);
      std::memcpy(reinterpret_cast<float*>(&to) + lane, &eight, 32);
    }
    return to;
#endif
  }
  OCTAVO_INLINE Pair load_pair(const uint8_t* from) {
    return {load_vector(from), load_vector(from + 2 * kLanes)};
  }
};
#endif

inline int padded_dim(int dim) { return (dim + kStep - 1) / kStep * kStep; }

// Converts a row to the order of a codec with kSplit, and back.
inline void split_row(float* row, int dim) {
  float split[kStep];
  for (int at = 0; at < dim; at += kStep) {
    for (int i = 0; i < kLanes; ++i) split[i] = row[at + 2 * i], split[kLanes + i] = row[at + 2 * i + 1];
    std::memcpy(row + at, split, sizeof split);
  }
}
inline void join_row(const float* row, int dim, float* to) {
  for (int at = 0; at < dim; at += kStep)
    for (int i = 0; i < kLanes; ++i) to[at + 2 * i] = row[at + i], to[at + 2 * i + 1] = row[at + kLanes + i];
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
