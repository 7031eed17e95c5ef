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

}  // namespace
}  // namespace octavo::avx2
