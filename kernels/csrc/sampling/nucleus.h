// The fewest largest of a row of weights that reach a share of their sum. A guess says between which two the
// smallest of them lies, or if it is wrong the counts of all; only those few are looked at more closely.
// Which of the two it was changes the order in which some weights are summed up, and nothing else. Compiled
// once per instruction set.
#pragma once

#include <algorithm>
#include <cmath>

#include "runtime/threads.h"
#include "sampling/bracket.h"
#include "sampling/guess.h"
#include "sampling/vectors.h"
#include "sampling/weights.h"

namespace octavo::OCTAVO_ISA {
namespace {

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
  double above, whole;  // the sums of those above the bracket, and of all

  double mass() const { return sum_from(weights, count, 0); }
};

// Copies them, and leaves in `sums` what each block has above the bracket.
Inside between(const Weights& row, double* sums, const Bracket& bracket, float* room, int* starts) {
  const Vec low = Vec{} + as_float(bracket.low), high = Vec{} + as_float(bracket.high);
  Inside found{room, starts, 0, 0, 0};
  const Doubles from = Doubles{} + as_float(bracket.high);
  for (int block = 0; block < row.blocks(); ++block) {
    WideSum whole, above;
    alignas(kAligned) float weights[kWalkBlock];
    starts[block] = found.count;
    sums[block] = 0;
    if (!row.of_block(block, weights)) continue;
    int count = found.count;
    for (int i = 0; i < kWalkBlock; i += 4 * kWidth) {
      for (int j = 0; j < 4; ++j) {
        const Doubles values = widen(load_half(weights + i + j * kWidth));
        whole.parts[j] += values;
        above.parts[j] += only_from(values, from);
      }
      for (int j = 0; j < 4 * kWidth; j += kLanes)
        count += keep_between(load(weights + i + j), low, high, room + count);
    }
    found.count = count;
    found.whole += whole.total();
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

  // How many of those that equal the smallest belong, from the beginning of a block on.
  int ties_in(int block) const {
    int left = end.kept;
    for (int i = 0; i < around.starts[block]; ++i) left -= around.weights[i] == end.weight;
    return left > 0 ? left : 0;
  }
};

// The bracket from all weights, wherever in their counts they lie.
Bracket count_all(const Weights& row, double target) {
  Counts counts{};
  for (int block = 0; block < row.blocks(); ++block) {
    float weights[kWalkBlock];
    if (!row.of_block(block, weights)) continue;
    count(weights, kWalkBlock / 2, counts.first);  // two counts: equal neighbours do not wait for each other
    count(weights + kWalkBlock / 2, kWalkBlock / 2, counts.second);
  }
  return bracket_of(
      target, [&](int at) { return static_cast<double>(counts.first[at] + counts.second[at]); },
      [](int) { return 0.0; });
}

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
  Bracket around = guess(row, top_p, room);
  Inside inside = between(row, sums, around, room, starts);
  const double target = top_p * inside.whole;
  if (inside.above >= target || inside.above + inside.mass() < target) {
    around = count_all(row, target);
    inside = between(row, sums, around, room, starts);
  }
  const Nucleus found{reach(narrow(inside, around, target, more), target), inside};
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
