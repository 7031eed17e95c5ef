// The weights of a row of float32 logits, computed when they are asked for: they are asked for twice at most,
// and to keep them would push the logits out of the cache. Compiled once per instruction set.
#pragma once

#include "runtime/exp_float.h"
#include "sampling/maxima.h"
#include "sampling/vectors.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Sums side by side, of one vector after the other.
struct WideSum {
  Doubles parts[4] = {};

  double total() const {
    const Doubles all = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    double sum = 0;
    for (int lane = 0; lane < kWidth; ++lane) sum += all[lane];
    return sum;
  }
};

double sum_block(const float* weights) {
  WideSum sum;
  for (int i = 0; i < kWalkBlock; i += 4 * kWidth)
    for (int j = 0; j < 4; ++j) sum.parts[j] += widen(load_half(weights + i + j * kWidth));
  return sum.total();
}

// The sum of those of `count` weights that are at least `bound`. What follows up to a whole vector must be 0.
double sum_from(const float* weights, int count, float bound) {
  WideSum sum;
  int i = 0;
  for (; i + 4 * kWidth <= count; i += 4 * kWidth)
    for (int j = 0; j < 4; ++j) sum.parts[j] += widen(only_from(load_half(weights + i + j * kWidth), bound));
  for (; i < count; i += kWidth) sum.parts[0] += widen(only_from(load_half(weights + i), bound));
  return sum.total();
}

constexpr float kLeastWeight = 0x1.8p-126f;  // see above_zero

// Logits that min_p or a `smallest` logit leaves out weigh 0.
struct Weights {
  const Scanned& row;
  float largest, temperature, smallest, min_p;

  Weights(const Scanned& of, float most, const RowDraw& call, float least)
      : row(of),
        largest(most),
        temperature(call.temperature),
        smallest(least),
        min_p(std::max(call.min_p, kLeastWeight)) {}

  int blocks() const { return (row.size + kWalkBlock - 1) / kWalkBlock; }

  // Weights of `count` logits, a multiple of kLanes.
  void weigh(const float* logits, int count, float* to) const {
    if (temperature == 1) weigh(logits, count, to, [](Vec x) { return x; });
    else weigh(logits, count, to, [divisor = Vec{} + temperature](Vec x) { return x / divisor; });
  }

  float largest_of(int block) const {
    constexpr int kMaxima = kWalkBlock / kTopBlock;
    const float* const maxima = row.maxima + block * kMaxima;
    return *std::max_element(maxima, maxima + kMaxima);
  }

  // Weights of a block, 0 beyond the row; false if all of them are certainly 0: nothing is written then.
  bool of_block(int block, float* to) const {
    const float most = largest_of(block);
    if (most < smallest || weight_bound(most) < min_p) return false;
    const int begin = block * kWalkBlock, count = row.size - begin;
    const float* logits = row.logits + begin;
    float last[kWalkBlock];
    if (count < kWalkBlock) {
      std::fill(std::copy_n(logits, count, last), last + kWalkBlock, -__builtin_inff());
      logits = last;
    }
    weigh(logits, kWalkBlock, to);
    return true;
  }

 private:
  // What no weight of smaller logits exceeds: the exponential is not monotonic to the last bit.
  float weight_bound(float logit) const { return 1.001f * exp_float((logit - largest) / temperature); }

  template <class Scale>
  void weigh(const float* logits, int count, float* to, Scale scale) const {
    const Vec most = Vec{} + largest, least = Vec{} + smallest, bound = Vec{} + min_p;
    for (int i = 0; i < count; i += kLanes) {
      const Vec logit = load(logits + i);
      const Vec power = exp_of<Vec, IntVec>(scale(logit - most));
      store(to + i, (Vec)((IntVec)power & (logit >= least) & (power >= bound)));
    }
  }
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
