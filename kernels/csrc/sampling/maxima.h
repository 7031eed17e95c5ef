// The largest float32 logit of each block of a row, which decides whether the block can be skipped. Compiled
// for each instruction set.
#pragma once

#include <algorithm>

#include "sampling/changes.h"
#include "sampling/vectors.h"

namespace octavo::OCTAVO_ISA {
namespace {

inline float larger_of(float a, float b) { return a > b ? a : b; }

inline bool any(IntVec flags) {
  typedef int64_t Wide __attribute__((vector_size(4 * kLanes)));
  const Wide pairs = (Wide)flags;
  int64_t all = 0;
  for (int lane = 0; lane < kLanes / 2; ++lane) all |= pairs[lane];
  return all != 0;
}

// Logits of a row, and the largest logit of each block of kTopBlock logits.
struct Scanned {
  const float* logits;
  int size;
  float* maxima;  // [room]
  IntVec nan = {};

  // Returns the number of blocks, rounded up to whole kWalkBlocks and whole vectors; blocks beyond the row
  // have minus infinity.
  static int room(int size) {
    constexpr int kTogether = std::max(kWalkBlock, kLanes * kTopBlock);
    return (size + kTogether - 1) / kTogether * (kTogether / kTopBlock);
  }

  void scan(int block) {
    const int begin = block * kTopBlock, count = std::clamp(size - begin, 0, kTopBlock);
    const float* values = logits + begin;
    float last[kTopBlock];
    if (count < kTopBlock) {
      std::fill(std::copy_n(values, count, last), last + kTopBlock, -__builtin_inff());
      values = last;
    }
    Vec largest = Vec{} - __builtin_inff();
    for (int i = 0; i < kTopBlock; i += kLanes) {
      const Vec x = load(values + i);
      largest = largest_of(x, largest);
      nan |= x != x;
    }
    maxima[block] = largest_lane(largest);
  }

  void scan_all() {
    for (int block = 0; block < room(size); ++block) scan(block);
  }

  // Returns the largest logit of the row, or NaN if it holds one.
  float largest() const {
    Vec most = Vec{} - __builtin_inff();
    for (int block = 0; block < room(size); block += kLanes) most = largest_of(load(maxima + block), most);
    return any(nan) ? __builtin_nanf("") : largest_lane(most);
  }
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
