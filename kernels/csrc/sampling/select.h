// What may be drawn of 16-bit logits, decided on their histogram: weights, top_k, min_p and top_p. Compiled
// once per instruction set.
#pragma once

#include "sampling/histogram.h"
#include "sampling/walk.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Those of equal weight of which only the first ones, in order of id, may be drawn: patterns
// [first, end) of a histogram. `kept` is 0 where there are none.
struct Ties {
  int first = 0, end = 0, kept = 0;
};

void keep_top_k(const RowDraw& call, Histogram& found) {
  int end = 0;
  for (int64_t kept = 0; end < found.size && kept < call.top_k; ++end) kept += found.count(end);
  const float smallest = found.value(end - 1);
  while (end < found.size && found.value(end) == smallest) ++end;  // both zeros
  for (int i = end; i < found.size; ++i) found.weight(i) = 0;
  found.size = end;
}

// Weights in descending order, and the sum of them over the row; those below min_p are dropped.
double weigh(const RowDraw& call, Histogram& found) {
  constexpr int kBlock = 64;
  const float largest = found.value(0);
  float before = 1;
  double sum = 0;
  for (int at = 0; at < found.size; at += kBlock) {
    float weights[kBlock] = {};
    const int count = std::min(kBlock, found.size - at);
    for (int i = 0; i < count; ++i) weights[i] = found.value(at + i);
    for (float& weight : weights) weight = weight_of(weight, largest, call.temperature);
    for (int i = 0; i < count; ++i) {
      before = found.weight(at + i) = weights[i] < before ? weights[i] : before;
      if (before < call.min_p) {
        found.drop_from(at + i);
        return sum;
      }
      sum += static_cast<double>(before) * found.count(at + i);
    }
  }
  return sum;
}

// `whole`: becomes the sum of the weights that are kept, of ties all.
Ties keep_nucleus(double target, Histogram& found, double& whole) {
  double above = 0;
  whole = 0;
  for (int i = 0; i < found.size;) {
    const float weight = found.weight(i);
    uint32_t count = 0;
    int next = i;
    do {
      whole += static_cast<double>(weight) * found.count(next);
      count += found.count(next++);
    } while (next < found.size && found.weight(next) == weight);
    if (above + static_cast<double>(weight) * count >= target || next == found.size) {
      const int kept = needed_ties(above, target, weight, static_cast<int>(count));
      found.drop_from(next);
      return static_cast<uint32_t>(kept) < count ? Ties{i, next, kept} : Ties{};
    }
    above += static_cast<double>(weight) * count;
    i = next;
  }
  return {};
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
