// Prefetching of weights for AVX2's kernels. Internal linkage: see numeric.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "runtime/dispatch.h"

namespace octavo::avx2 {
namespace {

// Prefetches a line of weights: into L1 on AMD's CPUs or with kNear, else into L2 as the AVX-512 kernels do.
// Always inlined, because GCC 12 treats a call that only prefetches as having no effect and drops it.
template <bool kNear = false>
inline __attribute__((always_inline)) void fetch_weights(const uint8_t* p) {
  if (kNear || kCore != Core::other) _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
  else _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
}

// Whether products of R rows prefetch their weights. For a single row on a Zen 4, the hardware prefetcher
// keeps up with memory, and software prefetches make a step of 8-bit codes about a quarter slower. For
// several rows, steps are slower without them.
template <int R>
inline bool prefetches_weights() {
  return R > 1 || kCore != Core::zen4;
}

}  // namespace
}  // namespace octavo::avx2
