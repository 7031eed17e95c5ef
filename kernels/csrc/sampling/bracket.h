// Counts of weights by their leading bits, and between which two of these a nucleus must end. Compiled once
// per instruction set.
#pragma once

#include <cstdint>

#include "sampling/walk.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Weights lie in [0, 1]: their bits are in their order. Leading bits of them, a 64th of a weight apart:
constexpr int kCoarse = 17;
constexpr int kNumCoarse = (0x3f800000 >> kCoarse) + 1;

constexpr float edge(int coarse) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(coarse) << kCoarse);
}

// How many weights have which leading bits: two counts, of whatever is to be told apart.
struct Counts {
  uint32_t first[kNumCoarse], second[kNumCoarse];
};

inline void count(const float* weights, int size, uint32_t* counts) {
  for (int i = 0; i < size; ++i) ++counts[as_bits(weights[i]) >> kCoarse];
}

// Bits [low, high) of weights among which the nucleus ends.
struct Bracket {
  uint32_t low, high;
};

// The bracket, wherever in their counts weights lie. `number(at)`: of the weights with these leading bits,
// asked for from the largest down; `doubt(at)`: by how much the mass of the weights from there up may be
// wrong.
template <class Number, class Doubt>
Bracket bracket_of(double target, Number number, Doubt doubt) {
  double least = 0, most = 0;  // what the mass of all weights from here up is between
  int end = 0, at = kNumCoarse;
  for (double wrong = 0; at > 0 && least < target + wrong;) {
    --at;
    const double found = number(at);
    wrong = doubt(at);
    most += found * edge(at + 1);
    if (end == 0 && most >= target - wrong) end = at + 1;
    least += found * edge(at);
  }
  const uint32_t low = static_cast<uint32_t>(at) << kCoarse;
  return {low > 0 ? low : 1, static_cast<uint32_t>(end) << kCoarse};
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
