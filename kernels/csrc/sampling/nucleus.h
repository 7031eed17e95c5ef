// The fewest largest of a row of weights that reach a share of their sum. Counts of the weights by their
// leading bits say between which two the smallest of them lies; only those few are looked at more closely.
// Compiled once per instruction set.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention/vectors.h"
#include "runtime/threads.h"
#include "sampling/walk.h"

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

// How many weights have which leading bits: two counts, so that equal neighbours do not wait for each other.
struct Counts {
  uint32_t even[kNumCoarse], odd[kNumCoarse];

  void add(const float* weights, int count) {  // an even number of them
    for (int i = 0; i < count; i += 2) {
      ++even[as_bits(weights[i]) >> kCoarse];
      ++odd[as_bits(weights[i + 1]) >> kCoarse];
    }
  }
  double at(int i) const { return even[i] + odd[i]; }
};

constexpr float edge(int coarse) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(coarse) << kCoarse);
}

// The bracket, wherever in their counts weights lie. (A narrower one, from where they lie on average, has to
// be tried, and makes nothing faster.)
Bracket bracket_of(const Counts& counts, double target) {
  double least = 0, most = 0;  // what the mass of all weights from here up is between
  int end = 0, at = kNumCoarse;
  while (at > 0 && least < target) {
    --at;
    most += counts.at(at) * edge(at + 1);
    if (end == 0 && most >= target) end = at + 1;
    least += counts.at(at) * edge(at);
  }
  const uint32_t low = static_cast<uint32_t>(at) << kCoarse;
  return {low > 0 ? low : 1, static_cast<uint32_t>(end) << kCoarse};
}

bool any(IntVec flags) {
  typedef int64_t Wide __attribute__((vector_size(4 * kLanes)));
  const Wide pairs = (Wide)flags;
  int64_t all = 0;
  for (int lane = 0; lane < kLanes / 2; ++lane) all |= pairs[lane];
  return all != 0;
}

// The weights inside a bracket, in their order: those of block i are [starts[i], starts[i + 1]).
struct Inside {
  float* weights;
  int* starts;  // [blocks + 1]
  int count;
  double above;  // the sum of those above the bracket
};

// Copies them, and leaves in `sums` what each block has above the bracket.
Inside between(const float* weights, double* sums, int blocks, const Bracket& bracket, float* room,
               int* starts) {
  const Vec low = Vec{} + as_float(bracket.low), high = Vec{} + as_float(bracket.high);
  constexpr int kGroup = 4 * kLanes;
  Inside found{room, starts, 0, 0};
  for (int block = 0; block < blocks; ++block) {
    const int begin = block * kWalkBlock;
    starts[block] = found.count;
    found.above += sums[block] = sum_from(weights + begin, as_float(bracket.high));
    for (int i = begin; i < begin + kWalkBlock; i += kGroup) {
      IntVec inside[kGroup / kLanes], any_inside = {};
      for (int j = 0; j < kGroup / kLanes; ++j) {
        const Vec value = load(weights + i + j * kLanes);
        any_inside |= inside[j] = (value >= low) & (value < high);
      }
      if (!any(any_inside)) continue;
      for (int j = 0; j < kGroup / kLanes; ++j) {
        if (!any(inside[j])) continue;
        for (int lane = 0; lane < kLanes; ++lane) {
          room[found.count] = weights[i + j * kLanes + lane];
          found.count -= inside[j][lane];
        }
      }
    }
  }
  starts[blocks] = found.count;
  return found;
}

// Weights among which a nucleus ends, and the sum of those above them.
struct Candidates {
  float* weights;
  int count;
  double above;
};

// The largest weights first, until they reach the target.
Boundary reach(const Candidates& inside, double target) {
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

// Narrows a bracket to the weights inside that share their place among kFine of equal width, copied to
// `room`.
Candidates narrow(const Inside& inside, const Bracket& bracket, double target, float* room) {
  constexpr int kFine = 4096;
  double masses[kFine] = {};
  int shift = 0;
  while ((bracket.high - bracket.low) >> shift >= kFine) ++shift;
  const auto place = [&](float weight) { return (as_bits(weight) - bracket.low) >> shift; };
  for (int i = 0; i < inside.count; ++i) masses[place(inside.weights[i])] += inside.weights[i];
  Candidates found{room, 0, inside.above};
  int last = -1;
  for (int at = kFine - 1; at >= 0; --at) {
    if (masses[at] == 0) continue;
    if (last >= 0) found.above += masses[last];
    last = at;
    if (found.above + masses[at] >= target) break;
  }
  for (int i = 0; i < inside.count; ++i)
    if (static_cast<int>(place(inside.weights[i])) == last) room[found.count++] = inside.weights[i];
  return found;
}

// The fewest largest of the weights of a row.
struct Nucleus {
  Boundary end;
  Inside around;

  // How many of those that equal the smallest belong, from the beginning of a block on.
  int ties_in(int block) const {
    int left = end.kept;
    for (int i = 0; i < around.starts[block]; ++i) left -= around.weights[i] == end.weight;
    return left > 0 ? left : 0;
  }
};

// Of counted weights in whole blocks, of which those above 0 sum up to more than the target. Leaves in `sums`
// what each block has of the nucleus.
Nucleus find_nucleus(const float* weights, double* sums, int blocks, const Counts& counts, double target) {
  const int size = blocks * kWalkBlock;
  float* const room =
      static_cast<float*>(thread_scratch(sizeof(float) * (2 * size + kLanes) + sizeof(int) * (blocks + 1)));
  float* const more = room + size + kLanes;
  int* const starts = reinterpret_cast<int*>(more + size);
  const Bracket around = bracket_of(counts, target);
  const Inside inside = between(weights, sums, blocks, around, room, starts);
  const Candidates few = narrow(inside, around, target, more);
  std::sort(few.weights, few.weights + few.count, [](float a, float b) { return a > b; });
  const Nucleus found{reach(few, target), inside};
  int left = found.end.kept;
  for (int block = 0; block < blocks; ++block)
    for (int i = inside.starts[block]; i < inside.starts[block + 1]; ++i) {
      const float weight = inside.weights[i];
      if (weight > found.end.weight || (weight == found.end.weight && left-- > 0)) sums[block] += weight;
    }
  return found;
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
