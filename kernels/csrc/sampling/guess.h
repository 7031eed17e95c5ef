// Between which weights a nucleus ends, guessed from some of them: the blocks that hold the largest, and of
// all others every 16th line. What they say is right but for bad luck, or a row that is made to mislead: who
// asks has to see whether it is. Compiled once per instruction set.
#pragma once

#include <algorithm>
#include <cmath>

#include "sampling/bracket.h"
#include "sampling/weights.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kLine = 16;      // logits that are chosen together: a cache line
constexpr int kRate = 16;      // of so many lines one is chosen, none of them where the last one was
constexpr int kHeaviest = 64;  // so many of the largest of kWalkBlock logits bound those that are taken whole
constexpr int kMostWhole = 128;   // blocks of kTopBlock logits that are taken whole
constexpr int kSmallRow = 16384;  // is taken whole

// Chosen weights: those that stand for themselves, and after them those that stand for kRate of them.
struct Chosen {
  float* weights;
  int whole, all;
};

Chosen choose_all(const Weights& row, float* room) {
  for (int block = 0; block < row.blocks(); ++block) {
    float* const to = room + block * kWalkBlock;
    if (!row.of_block(block, to)) std::fill_n(to, kWalkBlock, 0.0f);
  }
  const int size = row.blocks() * kWalkBlock;
  return {room, size, size};
}

// The kHeaviest-largest of the largest of each kWalkBlock logits; minus infinity if there are fewer.
float heavy_from(const Weights& row, float* room) {
  if (row.blocks() < kHeaviest) return -__builtin_inff();
  for (int block = 0; block < row.blocks(); ++block) room[block] = row.largest_of(block);
  std::nth_element(room, room + kHeaviest - 1, room + row.blocks(), [](float a, float b) { return a > b; });
  return room[kHeaviest - 1];
}

Chosen choose_some(const Weights& row, float* room) {
  constexpr int kApart = kRate * kLine / kTopBlock;  // blocks of which one has a chosen line
  const float heavy = heavy_from(row, room);
  float* const rest = room + kMostWhole * kTopBlock;
  int whole = 0, some = 0;
  for (int block = 0; block < row.row.size / kTopBlock; ++block) {
    const float* const from = row.row.logits + block * kTopBlock;
    if (row.row.maxima[block] >= heavy && whole < kMostWhole * kTopBlock) {
      std::copy_n(from, kTopBlock, room + whole);
      whole += kTopBlock;
    } else if (block % kApart == block / kApart % kApart) {
      std::copy_n(from + block / (kApart * kApart) % (kTopBlock / kLine) * kLine, kLine, rest + some);
      some += kLine;
    }
  }
  row.weigh(room, whole, room);
  row.weigh(rest, some, room + whole);  // one vector after the other, none beyond the one it is made of
  return {room, whole, whole + some};
}

// Of `count` weights, a multiple of kLanes.
double sum_squares(const float* weights, int count) {
  WideSum sum;
  for (int i = 0; i < count; i += kLanes)
    for (int j = 0; j < kLanes / kWidth; ++j) {
      const Half values = load_half(weights + i + j * kWidth);
      sum.parts[j] += widen(values * values);
    }
  return sum.total();
}

// `room`: for as many floats as the row has in whole blocks of kWalkBlock.
Bracket guess(const Weights& row, double top_p, float* room) {
  constexpr double kDeviations = 4;
  const Chosen chosen = row.row.size > kSmallRow ? choose_some(row, room) : choose_all(row, room);
  Counts counts{};
  count(chosen.weights, chosen.whole, counts.first);
  count(chosen.weights + chosen.whole, chosen.all - chosen.whole, counts.second);
  const float* const some = chosen.weights + chosen.whole;
  const int num_some = chosen.all - chosen.whole;
  const double sum = sum_from(chosen.weights, chosen.whole, 0) + kRate * sum_from(some, num_some, 0);
  const double squares = sum_squares(some, num_some);
  double above = 0;  // squares of the weights from some bits up
  return bracket_of(
      top_p * sum, [&](int at) { return counts.first[at] + static_cast<double>(kRate) * counts.second[at]; },
      [&](int at) {  // the deviation of the mass from there up less top_p of the whole mass
        above += counts.second[at] * static_cast<double>(edge(at)) * edge(at);
        const double variance =
            (1 - top_p) * (1 - top_p) * above + top_p * top_p * std::max(0.0, squares - above);
        return kDeviations * kRate * std::sqrt(variance);
      });
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
