// Search for a row's nucleus: the fewest of the largest weights whose sum reaches a share of the total. A
// histogram of leading bits gives an interval that contains the nucleus's smallest weight. Only the few
// weights in this interval are compared exactly. Compiled for each instruction set.
#pragma once

#include <algorithm>
#include <cmath>

#include "runtime/threads.h"
#include "sampling/vectors.h"
#include "sampling/weights.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Low bits of a weight that the histogram ignores; its bins are 1/64 of a power of two wide. For floats in
// [0, 1], the bits have the order of the values.
constexpr int kCoarse = 17;
constexpr int kNumCoarse = (0x3f800000 >> kCoarse) + 1;

constexpr float edge(int coarse) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(coarse) << kCoarse);
}

// Interval [low, high) of bits that contains the nucleus's smallest weight; and the sum of all weights.
struct Bracket {
  uint32_t low, high;
  double whole;
};

Bracket find_bracket(const Weights& row, double top_p) {
  // Histogram of leading bits, in two copies, because increments of the same counter wait for each other.
  uint32_t counts[2][kNumCoarse] = {};
  double whole = 0;
  for (int block = 0; block < row.blocks(); ++block) {
    alignas(kAligned) float weights[kWalkBlock];
    if (!row.of_block(block, weights)) continue;
    whole += sum_block(weights);
    for (int i = 0; i < kWalkBlock; i += 2)
      for (int j = 0; j < 2; ++j) ++counts[j][as_bits(weights[i + j]) >> kCoarse];
  }
  double least = 0, most = 0;  // bounds of the sum of weights in bins `at` and above
  int end = 0, at = kNumCoarse;
  while (at > 0 && least < top_p * whole) {
    --at;
    const double found = counts[0][at] + static_cast<double>(counts[1][at]);
    most += found * edge(at + 1);
    if (end == 0 && most >= top_p * whole) end = at + 1;
    least += found * edge(at);
  }
  const uint32_t low = static_cast<uint32_t>(at) << kCoarse;
  return {low > 0 ? low : 1, static_cast<uint32_t>(end) << kCoarse, whole};
}

// Returns how many of `count` equal weights the nucleus needs to reach `target`; `above`: sum of all larger
// weights.
inline int needed_ties(double above, double target, float weight, int count) {
  const double needed = std::ceil((target - above) / static_cast<double>(weight));
  return needed < 1 ? 1 : needed > count ? count : static_cast<int>(needed);
}

// Smallest weight in a nucleus. `ties`: number of weights equal to it; `kept`: how many are in the nucleus.
struct Boundary {
  float weight;
  int kept, ties;
};

// The weights inside a bracket, in order of id. Weights starts[i] to starts[i + 1] - 1 belong to block i.
struct Inside {
  float* weights;
  int* starts;  // [blocks + 1]
  int count;
  double above;  // sum of the weights above the bracket
};

// Copies the weights inside a bracket to `room`, and writes each block's sum above the bracket to `sums`.
Inside between(const Weights& row, double* sums, const Bracket& bracket, float* room, int* starts) {
  const Vec low = Vec{} + as_float(bracket.low), high = Vec{} + as_float(bracket.high);
  Inside found{room, starts, 0, 0};
  const Doubles from = Doubles{} + as_float(bracket.high);
  for (int block = 0; block < row.blocks(); ++block) {
    WideSum above;
    alignas(kAligned) float weights[kWalkBlock];
    starts[block] = found.count;
    sums[block] = 0;
    if (!row.of_block(block, weights)) continue;
    int count = found.count;
    for (int i = 0; i < kWalkBlock; i += 4 * kWidth) {
      for (int j = 0; j < 4; ++j)
        above.parts[j] += only_from(widen(load_half(weights + i + j * kWidth)), from);
      for (int j = 0; j < 4 * kWidth; j += kLanes)
        count += keep_between(load(weights + i + j), low, high, room + count);
    }
    found.count = count;
    found.above += sums[block] = above.total();
  }
  starts[row.blocks()] = found.count;
  store(room + found.count, Vec{});
  return found;
}

// Weights that include the nucleus's smallest weight, and the sum of all larger weights.
struct Candidates {
  float* weights;
  int count;
  double above;
};

// Adds weights, largest first, until they reach the target, and returns the last one. If all are below the
// target, the result is 0.
Boundary reach(const Candidates& inside, double target) {
  if (inside.count == 0) return {0, 0, 0};
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

// Bisects a bracket until few weights or only equal ones are inside; copies these to `room`, largest first.
Candidates narrow(const Inside& inside, Bracket around, double target, float* room) {
  constexpr int kFew = 64;
  Candidates found{room, 0, inside.above};
  const float* from = inside.weights;
  int count = inside.count;
  do {
    const uint32_t middle = around.low + (around.high - around.low) / 2;
    const double mass = sum_from(from, count, as_float(middle));
    if (found.above + mass >= target) {
      around.low = middle;
    } else {
      around.high = middle;
      found.above += mass;
    }
    const Vec low = Vec{} + as_float(around.low), high = Vec{} + as_float(around.high);
    found.count = 0;
    for (int i = 0; i < count; i += kLanes)
      found.count += keep_between(load(from + i), low, high, room + found.count);
    store(room + found.count, Vec{});
    from = room;
    count = found.count;
  } while (count > kFew && around.high - around.low > 1);
  if (around.high - around.low > 1) std::sort(room, room + count, [](float a, float b) { return a > b; });
  return found;
}

// The nucleus of a row.
struct Nucleus {
  Boundary end;
  Inside around;
  double whole;  // the sum of all weights

  // Returns how many weights equal to the smallest belong to the nucleus in this block and later ones.
  int ties_in(int block) const {
    int left = end.kept;
    for (int i = 0; i < around.starts[block]; ++i) left -= around.weights[i] == end.weight;
    return left > 0 ? left : 0;
  }
};

// Returns the sum of the weights [0, count) above `bound`; may read up to kLanes values past the last.
double sum_above(const float* weights, int count, float bound) {
  IntVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  WideSum sum;
  for (int i = 0; i < count; i += kLanes) {
    const Vec values = load(weights + i);
    alignas(kAligned) float kept[kLanes];
    store(kept, (Vec)((IntVec)values & (values > bound) & (lane < count - i)));
    for (int j = 0; j < kLanes / kWidth; ++j) sum.parts[j] += widen(load_half(kept + j * kWidth));
  }
  return sum.total();
}

// Finds the nucleus of a row with a weight above 0. Writes the nucleus's sum in each block to `sums`.
Nucleus find_nucleus(const Weights& row, double* sums, double top_p) {
  const int size = row.blocks() * kWalkBlock;
  float* const room = static_cast<float*>(
      thread_scratch(sizeof(float) * 2 * (size + kLanes) + sizeof(int) * (row.blocks() + 1)));
  float* const more = room + size + kLanes;
  int* const starts = reinterpret_cast<int*>(more + size + kLanes);
  const Bracket around = find_bracket(row, top_p);
  const Inside inside = between(row, sums, around, room, starts);
  const double target = top_p * around.whole;
  const Nucleus found{reach(narrow(inside, around, target, more), target), inside, around.whole};
  for (int block = 0, left = found.end.kept; block < row.blocks(); ++block) {
    const float* const own = inside.weights + inside.starts[block];
    const int count = inside.starts[block + 1] - inside.starts[block];
    sums[block] += sum_above(own, count, found.end.weight);
    if (left == 0) continue;
    const int ties = std::min(left, static_cast<int>(std::count(own, own + count, found.end.weight)));
    sums[block] += static_cast<double>(found.end.weight) * ties;
    left -= ties;
  }
  return found;
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
