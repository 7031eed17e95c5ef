// Search for a row's nucleus: the fewest of the largest weights whose sum reaches a share of the total. An
// interval of values that contains the nucleus's smallest weight is bisected until few weights are inside,
// and these are sorted. Compiled for each instruction set.
#pragma once

#include <algorithm>
#include <cmath>

#include "runtime/threads.h"
#include "sampling/vectors.h"
#include "sampling/weights.h"

namespace octavo::OCTAVO_ISA {
namespace {

// The weights of a row other than 0, in order of id. Weights starts[i] to starts[i + 1] - 1 belong to block
// i.
struct Positive {
  float* weights;
  int* starts;  // [blocks + 1]
  int count;
};

// Copies the positive weights of a row to `room`.
Positive positive_weights(const Weights& row, float* room, int* starts) {
  const Vec low = Vec{} + as_float(1), high = Vec{} + __builtin_inff();
  int count = 0;
  for (int block = 0; block < row.blocks(); ++block) {
    alignas(kAligned) float weights[kWalkBlock];
    starts[block] = count;
    if (!row.of_block(block, weights)) continue;
    for (int i = 0; i < kWalkBlock; i += kLanes)
      count += keep_between(load(weights + i), low, high, room + count);
  }
  starts[row.blocks()] = count;
  store(room + count, Vec{});
  return {room, starts, count};
}

// Smallest weight in a nucleus. `ties`: number of weights equal to it; `kept`: how many are in the nucleus.
struct Boundary {
  float weight;
  int kept, ties;
};

// Weights that include the nucleus's smallest weight, and the sum of all larger weights.
struct Candidates {
  const float* weights;
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
  const double needed = std::ceil((target - above) / static_cast<double>(found.weight));
  found.kept = needed < 1 ? 1 : needed > found.ties ? found.ties : static_cast<int>(needed);
  return found;
}

// Bisects the values of weights until few weights or only equal ones are left; copies these to `room`,
// largest first. For floats in [0, 1], the bits have the order of the values.
Candidates narrow(const Positive& all, double target, float* room) {
  constexpr int kFew = 64;
  Candidates found{all.weights, all.count, 0};
  uint32_t low = 1, high = as_bits(1) + 1;
  do {
    const uint32_t middle = low + (high - low) / 2;
    const double mass = sum_from(found.weights, found.count, as_float(middle));
    if (found.above + mass >= target) {
      low = middle;
    } else {
      high = middle;
      found.above += mass;
    }
    const Vec from = Vec{} + as_float(low), end = Vec{} + as_float(high);
    int count = 0;
    for (int i = 0; i < found.count; i += kLanes)
      count += keep_between(load(found.weights + i), from, end, room + count);
    store(room + count, Vec{});
    found.weights = room;
    found.count = count;
  } while (found.count > kFew && high - low > 1);
  if (high - low > 1) std::sort(room, room + found.count, [](float a, float b) { return a > b; });
  return found;
}

// The nucleus of a row.
struct Nucleus {
  Boundary end;
  Positive all;

  // Returns how many weights equal to the smallest belong to the nucleus in this block and later ones.
  int ties_in(int block) const {
    const auto before = std::count(all.weights, all.weights + all.starts[block], end.weight);
    return std::max(0, end.kept - static_cast<int>(before));
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
  const Positive all = positive_weights(row, room, reinterpret_cast<int*>(more + size + kLanes));
  const double target = top_p * sum_from(all.weights, all.count, 0);
  const Nucleus found{reach(narrow(all, target, more), target), all};
  for (int block = 0, left = found.end.kept; block < row.blocks(); ++block) {
    const float* const own = all.weights + all.starts[block];
    const int count = all.starts[block + 1] - all.starts[block];
    sums[block] = sum_above(own, count, found.end.weight);
    if (left == 0) continue;
    const int ties = std::min(left, static_cast<int>(std::count(own, own + count, found.end.weight)));
    sums[block] += static_cast<double>(found.end.weight) * ties;
    left -= ties;
  }
  return found;
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
