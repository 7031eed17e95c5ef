// Prefetching of weights for AVX2's kernels. Internal linkage: see numeric.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "runtime/dispatch.h"

namespace octavo::avx2 {
namespace {

// Prefetches a line of weights: into L1 on AMD's CPUs, elsewhere into L2, as on AVX-512; kNear: into L1
// everywhere. Always inlined, because GCC 12 treats a call that only prefetches as having no effect and drops
// it.
template <bool kNear = false>
inline __attribute__((always_inline)) void fetch_weights(const uint8_t* p) {
  if (kNear || kCore != Core::other) _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
  else _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
}

// Whether products of R rows prefetch their weights. For a single row, a Zen 4's hardware prefetcher keeps up
// with memory and is better alone: with software prefetches, a step of 8-bit codes takes about a quarter
// longer. For several rows, every step takes longer without them.
template <int R>
inline bool prefetches_weights() {
  return R > 1 || kCore != Core::zen4;
}

}  // namespace
}  // namespace octavo::avx2
