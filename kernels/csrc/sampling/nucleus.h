// The fewest largest of a row of weights that reach a share of their sum. Counts of their leading bits say
// between which two the smallest of them lies; only those few are looked at more closely. Compiled once per
// instruction set.
#pragma once

#include <algorithm>
#include <cmath>

#include "runtime/threads.h"
#include "sampling/vectors.h"
#include "sampling/weights.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Weights lie in [0, 1]: their bits are in their order. Leading bits of them, a 64th of a weight apart:
constexpr int kCoarse = 17;
constexpr int kNumCoarse = (0x3f800000 >> kCoarse) + 1;

constexpr float edge(int coarse) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(coarse) << kCoarse);
}

// Bits [low, high) of weights among which the nucleus ends; the sum of all weights.
struct Bracket {
  uint32_t low, high;
  double whole;
};

Bracket find_bracket(const Weights& row, double top_p) {
  // How many weights have which leading bits. Two counts: equal neighbours do not wait for each other.
  uint32_t counts[2][kNumCoarse] = {};
  double whole = 0;
  for (int block = 0; block < row.blocks(); ++block) {
    alignas(kAligned) float weights[kWalkBlock];
    if (!row.of_block(block, weights)) continue;
    whole += sum_block(weights);
    for (int i = 0; i < kWalkBlock; i += 2)
      for (int j = 0; j < 2; ++j) ++counts[j][as_bits(weights[i + j]) >> kCoarse];
  }
  double least = 0, most = 0;  // what the mass of all weights from here up is between
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

// How many of `count` equal weights the nucleus needs after the mass `above` to reach `target`.
inline int needed_ties(double above, double target, float weight, int count) {
  const double needed = std::ceil((target - above) / static_cast<double>(weight));
  return needed < 1 ? 1 : needed > count ? count : static_cast<int>(needed);
}

// The smallest weight of a nucleus, how many of those equal to it belong, and how many there are.
struct Boundary {
  float weight;
  int kept, ties;
};

// The weights inside a bracket, in their order: those of block i are [starts[i], starts[i + 1]).
struct Inside {
  float* weights;
  int* starts;  // [blocks + 1]
  int count;
  double above;  // the sum of those above the bracket
};

// Copies them, and leaves in `sums` what each block has above the bracket.
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

// Weights among which a nucleus ends, and the sum of those above them.
struct Candidates {
  float* weights;
  int count;
  double above;
};

// The largest weights first, until they reach the target. No smallest one if rounding puts it beyond all.
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

// Halves a bracket, again and again, until few weights are inside or all of them are equal. They are copied
// to `room`, the largest first.
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

// The fewest largest of the weights of a row.
struct Nucleus {
  Boundary end;
  Inside around;
  double whole;  // the sum of all weights

  // How many of those that equal the smallest belong, from the beginning of a block on.
  int ties_in(int block) const {
    int left = end.kept;
    for (int i = 0; i < around.starts[block]; ++i) left -= around.weights[i] == end.weight;
    return left > 0 ? left : 0;
  }
};

// The sum of those of `count` weights that are above `bound`, where kLanes more may be read.
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

// Of weights some of which are above 0. Leaves in `sums` what each block has of the nucleus.
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
