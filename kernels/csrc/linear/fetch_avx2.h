// Weights prefetched before AVX2's kernels use them. Internal linkage: see numeric.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "runtime/dispatch.h"

namespace octavo::avx2 {
namespace {

// A line of weights: into the first cache on AMD's CPUs, elsewhere into L2, as at AVX-512; kNear: into the
// first cache everywhere. Inline for certain: GCC 12 takes a call of what only prefetches for one without
// effect, and drops it.
template <bool kNear = false>
inline __attribute__((always_inline)) void fetch_weights(const uint8_t* p) {
  if (kNear || kCore != Core::other) _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
  else _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
}

// Whether R rows prefetch the weights by which they are multiplied. A single one passes so fast over them
// that a Zen 4's own prefetcher keeps up with memory, and does so better alone: prefetching, a step of codes
// of 8 bits takes about a quarter longer. Of several rows all take longer without.
template <int R>
inline bool prefetches_weights() {
  return R > 1 || kCore != Core::zen4;
}

}  // namespace
}  // namespace octavo::avx2
