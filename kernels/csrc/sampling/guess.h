// Between which weights a nucleus ends, guessed from some of a row: the blocks that hold its largest, and of
// all others every 16th line. Compiled once per instruction set.
#pragma once

#include <algorithm>
#include <cmath>

#include "sampling/weights.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Weights lie in [0, 1]: their bits are in their order. Leading bits of them, a 64th of a weight apart:
constexpr int kCoarse = 17;
constexpr int kNumCoarse = (0x3f800000 >> kCoarse) + 1;

constexpr float edge(int coarse) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(coarse) << kCoarse);
}

// Bits [low, high) of weights among which the nucleus ends.
struct Bracket {
  uint32_t low, high;
};

constexpr int kLine = 16;         // logits that are chosen together
constexpr int kRate = 16;         // of so many lines one is chosen
constexpr int kHeaviest = 64;     // blocks of kWalkBlock whose largest logits say which blocks are taken whole
constexpr int kMostWhole = 128;   // blocks of kTopBlock that are
constexpr int kSmallRow = 8192;   // is looked at as a whole

// How many weights have which leading bits: two counts, whatever they are of.
struct Counts {
  uint32_t first[kNumCoarse], second[kNumCoarse];
};

void count(const float* weights, int size, uint32_t* counts) {
  for (int i = 0; i < size; ++i) ++counts[as_bits(weights[i]) >> kCoarse];
}

// The k-th largest of the maxima of blocks of kWalkBlock, 0 < k; minus infinity if there are fewer.
float heavy_from(const Weights& row, int k, float* room) {
  if (row.blocks() < k) return -__builtin_inff();
  for (int block = 0; block < row.blocks(); ++block) room[block] = row.largest_of(block);
  std::nth_element(room, room + k - 1, room + row.blocks(), [](float a, float b) { return a > b; });
  return room[k - 1];
}

// Chosen weights: those that stand for themselves, then those that stand for kRate of them.
struct Chosen {
  float* weights;
  int whole, all;
};

Chosen choose(const Weights& row, float* room) {
  const int size = row.row.size, blocks = size / kTopBlock;
  const float* const logits = row.row.logits;
  if (size <= kSmallRow) {
    for (int block = 0; block < row.blocks(); ++block)
      if (!row.of_block(block, room + block * kWalkBlock)) std::fill_n(room + block * kWalkBlock, kWalkBlock, 0.0f);
    return {room, row.blocks() * kWalkBlock, row.blocks() * kWalkBlock};
  }
  const float heavy = heavy_from(row, kHeaviest, room);
  float* rest = room + kMostWhole * kTopBlock;
  int whole = 0, some = 0;
  for (int block = 0; block < blocks; ++block) {
    const float* const from = logits + block * kTopBlock;
    if (row.row.maxima[block] >= heavy && whole < kMostWhole * kTopBlock) {
      std::copy_n(from, kTopBlock, room + whole);
      whole += kTopBlock;
    } else if (block % 4 == block / 4 % 4) {
      std::copy_n(from + block / 16 % 4 * kLine, kLine, rest + some);
      some += kLine;
    }
  }
  row.weigh(room, whole, room);
  row.weigh(rest, some, room + whole);
  return {room, whole, whole + some};
}

// Two bounds between which the smallest of the nucleus lies, but for bad luck.
Bracket guess(const Weights& row, double top_p, float* room) {
  constexpr double kDeviations = 4;
  const Chosen chosen = choose(row, room);
  const float* const rest = chosen.weights + chosen.whole;
  Counts counts{};
  count(chosen.weights, chosen.whole, counts.first);
  count(rest, chosen.all - chosen.whole, counts.second);
  const auto weight = [&](int i) { return chosen.weights[i]; };
  const double sum = sum_weights(0, chosen.whole, weight) + kRate * sum_weights(chosen.whole, chosen.all, weight);
  const double squares = sum_weights(chosen.whole, chosen.all, [&](int i) { return weight(i) * weight(i); });
  const double target = top_p * sum;
  double least = 0, most = 0, above = 0;  // of the weights from here up, their squares
  int end = 0, at = kNumCoarse;
  for (double doubt = 0; at > 0 && least < target + doubt;) {
    --at;
    const double mass = counts.first[at] + static_cast<double>(kRate) * counts.second[at];
    above += counts.second[at] * static_cast<double>(edge(at)) * edge(at);
    const double below = std::max(0.0, squares - above);
    doubt = kDeviations * kRate * std::sqrt((1 - top_p) * (1 - top_p) * above + top_p * top_p * below);
    most += mass * edge(at + 1);
    if (end == 0 && most >= target - doubt) end = at + 1;
    least += mass * edge(at);
  }
  const uint32_t low = static_cast<uint32_t>(at) << kCoarse;
  return {low > 0 ? low : 1, static_cast<uint32_t>(end) << kCoarse};
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
