// Online softmax over one tile of scores. For files that allow fused multiply-adds.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.h"
#include "attention_math.h"

namespace octavo {
namespace {

// A row in a tile: which of the tile's positions it sees, and where it stands from the first of them.
struct RowInTile {
  uint64_t bits;
  float distance;  // of the row's position from the tile's first, negative if it lies before it
  float slope;     // 0: no ALiBi
  const float* added;  // [64] to the logits of the positions; null: nothing
};

// Raw scores of one row and tile become weights 2^(logit - maximum), 0 where the row sees nothing; its
// running maximum (log2 domain) and sum are brought up to date and, if the maximum grew, the sum and
// the accumulator shrink with it.
inline void soften_row(const AttendArgs& args, const RowInTile& row, float* scores, float* accumulator, int width,
                       float& maximum, float& sum) {
  constexpr int kVectors = kTileTokens / kLanes;
  IntVec lane_bit, seen[kVectors];
  Vec lane_number;
  for (int lane = 0; lane < kLanes; ++lane) lane_bit[lane] = 1 << lane, lane_number[lane] = float(lane);
  Vec logits[kVectors], highest = Vec{} + maximum;
  for (int i = 0; i < kVectors; ++i) {
    seen[i] = ((IntVec{} + int32_t(row.bits >> (i * kLanes))) & lane_bit) != 0;
    const Vec raw = load(scores + i * kLanes);
    logits[i] = args.softcap > 0 ? soft_cap(raw * args.scale, args.softcap) : raw * (args.scale * kLog2E);
    if (row.slope != 0)
      logits[i] += (lane_number + (float(i * kLanes) - row.distance)) * (row.slope * kLog2E);
    if (row.added != nullptr) logits[i] += load(row.added + i * kLanes) * kLog2E;
    logits[i] = seen[i] ? logits[i] : Vec{} + kLowest;
    highest = logits[i] > highest ? logits[i] : highest;
  }
  float top = highest[0];
  for (int lane = 1; lane < kLanes; ++lane) top = std::max(top, highest[lane]);
  if (top != maximum) {
    const float shrink = scalar_exp2(maximum - top);
    sum *= shrink;
    for (int i = 0; i < width; i += kLanes) store(accumulator + i, load(accumulator + i) * shrink);
    maximum = top;
  }
  Vec total = {};
  for (int i = 0; i < kVectors; ++i) {
    const Vec weights = seen[i] ? exp2(logits[i] - top) : Vec{};
    store(scores + i * kLanes, weights);
    total += weights;
  }
  for (int lane = 0; lane < kLanes; ++lane) sum += total[lane];
}

}  // namespace
}  // namespace octavo
