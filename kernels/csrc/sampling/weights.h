// The weights of a row of float32 logits, computed when they are asked for: they are asked for twice at most,
// and to keep them would push the logits out of the cache. Compiled once per instruction set.
#pragma once

#include "runtime/exp_float.h"
#include "sampling/maxima.h"

namespace octavo::OCTAVO_ISA {
namespace {

// As many floats as one register has room for as doubles. (Wider vectors of doubles go through memory.)
typedef float Half __attribute__((vector_size(2 * kLanes), aligned(4), may_alias));
typedef int32_t HalfBits __attribute__((vector_size(2 * kLanes), aligned(4), may_alias));
typedef double Doubles __attribute__((vector_size(4 * kLanes)));

// The sum of those of a block of values that are at least `smallest`, which must not be negative.
double sum_from(const float* values, float smallest) {
  constexpr int kWidth = kLanes / 2, kSideBySide = 4;
  Doubles sums[kSideBySide] = {};
  const Half bound = Half{} + smallest;
  for (int i = 0; i < kWalkBlock; i += kSideBySide * kWidth)
    for (int j = 0; j < kSideBySide; ++j) {
      const Half value = *reinterpret_cast<const Half*>(values + i + j * kWidth);
      sums[j] += __builtin_convertvector((Half)((HalfBits)value & (value >= bound)), Doubles);
    }
  const Doubles all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  double sum = 0;
  for (int lane = 0; lane < kWidth; ++lane) sum += all[lane];
  return sum;
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
