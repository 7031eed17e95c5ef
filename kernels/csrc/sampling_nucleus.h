// The fewest largest of a row of weights that reach a share of their sum. Counts of the weights by their leading
// bits say between which two the smallest of them lies; only those few are looked at more closely. Compiled once
// per instruction set.
#pragma once

#include <algorithm>

#include "attention_math.h"
#include "sampling_walk.h"
#include "threads.h"

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

// The smallest weight of a nucleus, how many of those equal to it belong, and how many there are.
struct Boundary {
  float weight;
  int kept, ties;
};

// Weights lie in [0, 1]: their bits are in their order. Leading bits of them, a 64th of a weight apart:
constexpr int kCoarse = 17;
constexpr int kNumCoarse = (0x3f800000 >> kCoarse) + 1;

// Bits [low, high) of weights among which the nucleus ends.
struct Bracket {
  uint32_t low, high;
};

Bracket bracket(const float* weights, int size, double target) {
  uint32_t counts[2][kNumCoarse] = {};  // two, so that equal neighbours do not wait for each other
  for (int i = 0; i < size; i += 2) {   // `size` is a multiple of kWalkBlock
    ++counts[0][as_bits(weights[i]) >> kCoarse];
    ++counts[1][as_bits(weights[i + 1]) >> kCoarse];
  }
  double least = 0, most = 0;  // what the mass of all weights from here up is between
  Bracket found{1, 0};
  for (int at = kNumCoarse - 1; at >= 0; --at) {
    const double count = counts[0][at] + counts[1][at];
    if (count == 0) continue;
    const uint32_t low = static_cast<uint32_t>(at) << kCoarse, high = static_cast<uint32_t>(at + 1) << kCoarse;
    most += count * as_float(high);
    if (found.high == 0 && most >= target) found.high = high;
    least += count * as_float(low);
    if (least >= target) {
      found.low = low > 0 ? low : 1;
      break;
    }
  }
  return found;
}

bool any(IntVec flags) {
  typedef int64_t Wide __attribute__((vector_size(4 * kLanes)));
  const Wide pairs = (Wide)flags;
  int64_t all = 0;
  for (int lane = 0; lane < kLanes / 2; ++lane) all |= pairs[lane];
  return all != 0;
}

// Copies the weights inside the bracket, in their order, and adds those above it.
struct Inside {
  float* weights;
  int count;
  double above;
};

Inside between(const float* weights, int size, const Bracket& bracket, float* room) {
  const Vec low = Vec{} + as_float(bracket.low), high = Vec{} + as_float(bracket.high);
  Inside found{room, 0, 0};
  for (int at = 0; at < size; at += kWalkBlock) {
    found.above += sum_from(weights + at, as_float(bracket.high));
    for (int i = at; i < at + kWalkBlock; i += kLanes) {
      const Vec value = load(weights + i);
      const IntVec inside = (value >= low) & (value < high);
      if (!any(inside)) continue;
      for (int lane = 0; lane < kLanes; ++lane) {
        room[found.count] = value[lane];
        found.count -= inside[lane];
      }
    }
  }
  return found;
}

// The largest weights first, until they reach the target.
Boundary reach(const Inside& inside, double target) {
  double above = inside.above;
  Boundary found{0, 0, 0};
  for (int i = 0; i < inside.count;) {
    if (found.ties > 0) above += static_cast<double>(found.weight) * found.ties;
    found = {inside.weights[i], 0, 0};
    while (i < inside.count && inside.weights[i] == found.weight) ++i, ++found.ties;
    if (above + static_cast<double>(found.weight) * found.ties >= target) break;
  }
  found.kept = needed_ties(above, target, found.weight, found.ties);
  return found;
}

// Narrows a bracket to the weights inside that share their place among kFine of equal width.
Inside narrow(Inside inside, const Bracket& bracket, double target) {
  constexpr int kFine = 4096;
  double masses[kFine] = {};
  int shift = 0;
  while ((bracket.high - bracket.low) >> shift >= kFine) ++shift;
  const auto place = [&](float weight) { return (as_bits(weight) - bracket.low) >> shift; };
  for (int i = 0; i < inside.count; ++i) masses[place(inside.weights[i])] += inside.weights[i];
  int last = -1;
  for (int at = kFine - 1; at >= 0; --at) {
    if (masses[at] == 0) continue;
    if (last >= 0) inside.above += masses[last];
    last = at;
    if (inside.above + masses[at] >= target) break;
  }
  int count = 0;
  for (int i = 0; i < inside.count; ++i)
    if (static_cast<int>(place(inside.weights[i])) == last) inside.weights[count++] = inside.weights[i];
  inside.count = count;
  return inside;
}

// Weights [size] in whole blocks, of which those above 0 sum up to more than the target.
Boundary find_boundary(const float* weights, int size, double target) {
  const Bracket around = bracket(weights, size, target);
  float* const room = static_cast<float*>(thread_scratch(sizeof(float) * (size + kLanes)));
  const Inside inside = narrow(between(weights, size, around, room), around, target);
  std::sort(inside.weights, inside.weights + inside.count, [](float a, float b) { return a > b; });
  return reach(inside, target);
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
