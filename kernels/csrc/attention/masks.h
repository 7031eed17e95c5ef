// Masks given by the caller: positions of a tile that a row sees, and values added to their logits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention/attention.h"

namespace octavo {
namespace {

inline int64_t mask_at(const MaskView& mask, int64_t token, int head, int position) {
  return token * mask.row_stride + head * mask.head_stride + position;
}

// Returns a bit for each position start <= t < min(start + 64, end) that the row sees.
inline uint64_t mask_bits(const MaskView& mask, int64_t token, int head, int start, int end) {
  const int count = std::min(end - start, kTileTokens);
  const int64_t at = mask_at(mask, token, head, start);
  uint64_t bits = 0;
  if (mask.added != nullptr)  // NaN counts as visible, so that it reaches the result
    for (int i = 0; i < count; ++i) bits |= uint64_t(!(mask.added[at + i] <= kHidden)) << i;
  else
    for (int i = 0; i < count; ++i) bits |= uint64_t(mask.seen[at + i] != 0) << i;
  return bits;
}

// Returns the values added to the logits of the tile's positions: a pointer into the mask, or to `copy` if
// the tile goes past `end`; null if the mask only hides positions.
inline const float* mask_added(const MaskView& mask, int64_t token, int head, int start, int end,
                               float (&copy)[kTileTokens]) {
  if (mask.added == nullptr) return nullptr;
  const float* const from = mask.added + mask_at(mask, token, head, start);
  if (end - start >= kTileTokens) return from;
  std::fill(copy, copy + kTileTokens, 0.0f);
  std::memcpy(copy, from, size_t(end - start) * sizeof(float));
  return copy;
}

}  // namespace
}  // namespace octavo
