// The fewest largest of a row of weights that reach a share of their sum. Counts of the weights by their
// leading bits say between which two the smallest of them lies; only those few are looked at more closely.
// Compiled once per instruction set.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention/vectors.h"
#include "runtime/threads.h"
#include "sampling/compress.h"
#include "sampling/guess.h"
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

  double mass() const {
    return sum_weights(0, count, [this](int i) { return weights[i]; });
  }
};

// Copies them, and leaves in `sums` what each block has above the bracket.
Inside between(const Weights& row, double* sums, const Bracket& bracket, float* room, int* starts) {
  const Vec low = Vec{} + as_float(bracket.low), high = Vec{} + as_float(bracket.high);
  Inside found{room, starts, 0, 0, 0};
  for (int block = 0; block < row.blocks(); ++block) {
    float weights[kWalkBlock];
    starts[block] = found.count;
    sums[block] = 0;
    if (!row.of_block(block, weights)) continue;
    found.whole += sum_from(weights, 0);
    found.above += sums[block] = sum_from(weights, as_float(bracket.high));
    for (int i = 0; i < kWalkBlock; i += kLanes)
      found.count += keep_between(load(weights + i), low, high, room + found.count);
  }
  starts[row.blocks()] = found.count;
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

// The bracket from all weights, wherever in their counts they lie.
Bracket count_all(const Weights& row, double target) {
  Counts counts{};
  for (int block = 0; block < row.blocks(); ++block) {
    float weights[kWalkBlock];
    if (!row.of_block(block, weights)) continue;
    count(weights, kWalkBlock / 2, counts.first);  // two counts: equal neighbours do not wait for each other
    count(weights + kWalkBlock / 2, kWalkBlock / 2, counts.second);
  }
  double least = 0, most = 0;  // what the mass of all weights from here up is between
  int end = 0, at = kNumCoarse;
  while (at > 0 && least < target) {
    --at;
    const double mass = counts.first[at] + counts.second[at];
    most += mass * edge(at + 1);
    if (end == 0 && most >= target) end = at + 1;
    least += mass * edge(at);
  }
  const uint32_t low = static_cast<uint32_t>(at) << kCoarse;
  return {low > 0 ? low : 1, static_cast<uint32_t>(end) << kCoarse};
}

// Of weights some of which are above 0. Leaves in `sums` what each block has of the nucleus.
Nucleus find_nucleus(const Weights& row, double* sums, double top_p) {
  const int size = row.blocks() * kWalkBlock;
  float* const room = static_cast<float*>(
      thread_scratch(sizeof(float) * (2 * size + kLanes) + sizeof(int) * (row.blocks() + 1)));
  float* const more = room + size + kLanes;
  int* const starts = reinterpret_cast<int*>(more + size);
  Bracket around = guess(row, top_p, room);
  Inside inside = between(row, sums, around, room, starts);
  double target = top_p * inside.whole;
  if (inside.above >= target || inside.above + inside.mass() < target) {
    around = count_all(row, target);
    inside = between(row, sums, around, room, starts);
  }
  const Candidates few = narrow(inside, around, target, more);
  std::sort(few.weights, few.weights + few.count, [](float a, float b) { return a > b; });
  const Nucleus found{reach(few, target), inside};
  int left = found.end.kept;
  for (int block = 0; block < row.blocks(); ++block)
    for (int i = inside.starts[block]; i < inside.starts[block + 1]; ++i) {
      const float weight = inside.weights[i];
      if (weight > found.end.weight || (weight == found.end.weight && left-- > 0)) sums[block] += weight;
    }
  return found;
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
