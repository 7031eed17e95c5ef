// Rounding of floats to a narrower type. Internal linkage: see numeric.h.
#pragma once

#include "runtime/numeric.h"

namespace octavo {
namespace {

// Rounds values as if they were stored as `type` and loaded again.
inline void round_floats(Float type, int count, float* values) {
  if (type == Float::bf16) {
    constexpr int kBlock = 256;
    bf16_t rounded[kBlock];
    for (int at = 0; at < count; at += kBlock) {
      const int n = count - at < kBlock ? count - at : kBlock;
      store_bf16(values + at, n, rounded);
      load_floats(rounded, type, 0, n, values + at);
    }
  }
  if (type == Float::f16)
    for (int i = 0; i < count; ++i) values[i] = f16_to_float(float_to_f16(values[i]));
}

}  // namespace
}  // namespace octavo
