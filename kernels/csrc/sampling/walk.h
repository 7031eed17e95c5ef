// What drawing has in common for every type of logits; compiled once per instruction set.
#pragma once

#include <cmath>

#include "runtime/exp_float.h"
#include "sampling/sampling.h"

namespace octavo {
namespace {

constexpr int kWalkBlock = 512;  // weights that are summed before the sum is looked at

// `value`, or 0: a choice that a compiler does not turn into a branch around the making of the value.
inline float if_true(bool condition, float value) {
  return as_float(as_bits(value) & (0u - static_cast<uint32_t>(condition)));
}

// What exp_float gives from about -87 down is not 0, as a weight it must be.
inline float above_zero(float power) { return if_true(power > 0x1.8p-126f, power); }

inline float weight_of(float logit, float largest, float temperature) {
  return above_zero(exp_float((logit - largest) / temperature));
}

// How many of `count` equal weights the nucleus needs after the mass `above` to reach `target`.
inline int needed_ties(double above, double target, float weight, int count) {
  const double needed = std::ceil((target - above) / static_cast<double>(weight));
  return needed < 1 ? 1 : needed > count ? count : static_cast<int>(needed);
}

template <class Weight>
inline double sum_weights(int begin, int end, Weight weight) {
  double parts[8] = {};
  int i = begin;
  for (; i + 8 <= end; i += 8)
    for (int lane = 0; lane < 8; ++lane) parts[lane] += weight(i + lane);
  for (; i < end; ++i) parts[0] += weight(i);
  return ((parts[0] + parts[4]) + (parts[1] + parts[5])) + ((parts[2] + parts[6]) + (parts[3] + parts[7]));
}

// A running sum of weights in order of id, and where it passes the target.
struct Walk {
  double target, sum = 0;

  // Goes on over [begin, end); the first id after which the sum exceeds the target, or kNotFinite.
  template <class Weight>
  int pass(int begin, int end, Weight weight) {
    for (int at = begin; at < end; at += kWalkBlock) {
      const int stop = at + kWalkBlock < end ? at + kWalkBlock : end;
      const double block = sum_weights(at, stop, weight);
      double within = sum;
      for (int i = at; sum + block > target && i < stop; ++i) {
        within += weight(i);
        if (within > target && weight(i) > 0) return i;
      }
      sum += block;
    }
    return kNotFinite;
  }
};

// The last id below `end` that may be drawn: for targets that rounding put beyond the whole sum.
template <class Weight>
inline int last_positive(int end, Weight weight) {
  while (end > 0 && !(weight(end - 1) > 0)) --end;
  return end - 1;
}

}  // namespace
}  // namespace octavo
