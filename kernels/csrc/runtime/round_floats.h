// Rounding of floats to a narrower type. Internal linkage: see numeric.h.
#pragma once

#include "runtime/numeric.h"

namespace octavo {
namespace {

// Rounds values as if they were stored as `type` and loaded again.
inline void round_floats(Float type, int count, float* values) {
  constexpr int kBlock = 256;
  float rounded[kBlock];
  for (int at = 0; type != Float::f32 && at < count; at += kBlock) {
    const int n = count - at < kBlock ? count - at : kBlock;
    store_floats(rounded, type, 0, n, values + at);
    load_floats(rounded, type, 0, n, values + at);
  }
}

}  // namespace
}  // namespace octavo
