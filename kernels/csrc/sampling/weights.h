// The weights of a row of float32 logits, computed on demand. Weights are not stored, because they are used
// at most twice and would evict the logits from the cache. Compiled for each instruction set.
#pragma once

#include "runtime/exp_float.h"
#include "sampling/maxima.h"
#include "sampling/vectors.h"

namespace octavo::OCTAVO_ISA {
namespace {

// A sum in several parallel parts, which do not wait for each other.
struct WideSum {
  Doubles parts[4] = {};

  double total() const {
    const Doubles all = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    double sum = 0;
    for (int lane = 0; lane < kWidth; ++lane) sum += all[lane];
    return sum;
  }
};

// Returns the sum of the weights [0, count) that are at least `bound`. The last vector must be zero-padded.
double sum_from(const float* weights, int count, float bound) {
  WideSum sum;
  int i = 0;
  for (; i + 4 * kWidth <= count; i += 4 * kWidth)
    for (int j = 0; j < 4; ++j) sum.parts[j] += widen(only_from(load_half(weights + i + j * kWidth), bound));
  for (; i < count; i += kWidth) sum.parts[0] += widen(only_from(load_half(weights + i), bound));
  return sum.total();
}

// Smallest exponent of a weight that counts; smaller weights, below 1.5 * 2^-126, are 0.
constexpr float kLeastExponent = -0x1.5bb96cp+6f;

// The weights of a row. Logits that min_p or `smallest` excludes have weight 0.
struct Weights {
  const Scanned& row;
  float largest, temperature, smallest, min_p;

  int blocks() const { return (row.size + kWalkBlock - 1) / kWalkBlock; }

  // Writes a block's weights, 0 beyond the row; or returns false, without writing, if its logits are too
  // small.
  bool of_block(int block, float* to) const {
    const float most = largest_of(block);
    const float exponent = (most - largest) / temperature;
    // 1.001: exp_float is not exactly monotonic.
    if (most < smallest || exponent < kLeastExponent || 1.001f * exp_float(exponent) < min_p) return false;
    const int begin = block * kWalkBlock, count = row.size - begin;
    const float* logits = row.logits + begin;
    float last[kWalkBlock];
    if (count < kWalkBlock) {
      std::fill(std::copy_n(logits, count, last), last + kWalkBlock, -__builtin_inff());
      logits = last;
    }
    const Vec top = Vec{} + largest, divisor = Vec{} + temperature;
    for (int i = 0; i < kWalkBlock; i += kLanes) {
      const Vec logit = load(logits + i), exponent = (logit - top) / divisor;
      const Vec weight = exp_within<Vec, UintVec>(exponent);  // arbitrary for small exponents
      const IntVec kept = (logit >= smallest) & (exponent >= kLeastExponent) & (weight >= min_p);
      store(to + i, (Vec)((IntVec)weight & kept));
    }
    return true;
  }

  // Returns the sum of a block's weights.
  double sum_of(int block) const {
    alignas(kAligned) float weights[kWalkBlock];
    return of_block(block, weights) ? sum_from(weights, kWalkBlock, 0) : 0;
  }

 private:
  float largest_of(int block) const {
    constexpr int kMaxima = kWalkBlock / kTopBlock;
    const float* const maxima = row.maxima + block * kMaxima;
    float most = maxima[0];
    for (int i = 1; i < kMaxima; ++i) most = larger_of(maxima[i], most);  // (std::max_element has branches)
    return most;
  }
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
