// Online softmax over one tile of scores. Including files must allow fused multiply-adds.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/attention.h"
#include "runtime/vectors.h"

namespace octavo {
namespace {

constexpr int kVectors = kTileTokens / kLanes;

// The running maximum is raised only if logits exceed it by more than this (log2 domain). Nearly every tile
// has a slightly larger logit, and raising the maximum rescales all sums. So weights 2^(logit - maximum) may
// reach 2^kHeadroom, at no loss of precision in floats.
constexpr float kHeadroom = 8;

// Raises the running maximum to `top`, and rescales the sum and the accumulator to it.
inline void raise_maximum(float top, float* accumulator, int width, float& maximum, float& sum) {
  const float shrink = scalar_exp2(maximum - top);
  sum *= shrink;
  for (int i = 0; i < width; i += kLanes) store(accumulator + i, load(accumulator + i) * shrink);
  maximum = top;
}

// Returns a mask of the i-th vector's lanes whose positions are set in `bits`.
inline IntVec seen_lanes(uint64_t bits, int i) {
  IntVec lane_bit;
  for (int lane = 0; lane < kLanes; ++lane) lane_bit[lane] = 1 << lane;
  return ((IntVec{} + int32_t(bits >> (i * kLanes))) & lane_bit) != 0;
}

// Returns the largest of the visible logits scores * factor.
inline float largest_logit(float factor, uint64_t bits, const float* scores) {
  Vec highest = Vec{} + kLowest;
  for (int i = 0; i < kVectors; ++i)
    highest = largest_of(seen_lanes(bits, i) ? load(scores + i * kLanes) * factor : Vec{} + kLowest, highest);
  return largest_lane(highest);
}

// Turns one row's scores into weights 2^(logit - maximum), 0 for invisible positions, and returns their sum.
// Rows that see the whole tile have two partial sums, other rows have one.
inline float weigh(float factor, uint64_t bits, float* scores, float maximum) {
  const bool whole = bits == ~uint64_t(0);
  Vec even{}, odd{};
  for (int i = 0; i < kVectors; ++i) {
    const Vec weights = seen_lanes(bits, i) ? exp2(load(scores + i * kLanes) * factor - maximum) : Vec{};
    store(scores + i * kLanes, weights);
    (whole && i % 2 != 0 ? odd : even) += weights;
  }
  return sum_lanes(even + odd);
}

constexpr int kSoftmaxRows = 16;  // most rows per call

// Turns raw scores of some rows into weights, and updates their running maxima (log2 domain) and sums. All
// maxima are computed before any is raised, because a mispredicted branch would delay the following rows.
// `factor` turns a score into a logit. Positions that no row sees have arbitrary scores before and zero
// weights afterwards.
inline void softmax_update_rows(float factor, const uint64_t* bits, int num_rows, float* scores,
                                float* accumulators, int width, float* maxima, float* sums) {
  float tops[kSoftmaxRows];
  for (int row = 0; row < num_rows; ++row)
    tops[row] = largest_logit(factor, bits[row], scores + row * kTileTokens);
  for (int row = 0; row < num_rows; ++row)
    if (!(tops[row] <= maxima[row] + kHeadroom))
      raise_maximum(tops[row], accumulators + int64_t(row) * width, width, maxima[row], sums[row]);
  for (int row = 0; row < num_rows; ++row)
    sums[row] += weigh(factor, bits[row], scores + row * kTileTokens, maxima[row]);
}

// Turns raw scores of a row with capped or biased logits into logits (log2 domain); `added` may be null.
inline void make_logits(const AttendArgs& args, const float* added, float* scores) {
  for (int i = 0; i < kVectors; ++i) {
    const Vec raw = load(scores + i * kLanes);
    Vec logits = args.softcap > 0 ? soft_cap(raw * args.scale, args.softcap) : raw * (args.scale * kLog2E);
    if (added != nullptr) logits += load(added + i * kLanes) * kLog2E;
    store(scores + i * kLanes, logits);
  }
}

}  // namespace
}  // namespace octavo
