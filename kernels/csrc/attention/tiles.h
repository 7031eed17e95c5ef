// A query's visible positions, as tiles and bit masks. Internal linkage: instruction sets share no code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention/attention.h"

namespace octavo {
namespace {

// ---- masks given by the caller: which positions of a tile a row sees, and what is added to its logits ----

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

// ---- positions ----

inline int row_position(const AttendArgs& args, int sequence, int token) {
  return args.kv_len[sequence] - args.q_start[sequence + 1] + token;
}

// Returns the first residual position that a query at `position` reads, apart from the kept ones.
inline int residual_start(const AttendArgs& args, int sequence, int position) {
  return args.residency.starts[position - row_position(args, sequence, 0)];
}

inline bool has_window(const AttendArgs& args) { return args.window > 0 && !args.mask; }

// Positions t that rows at positions `first` to `last` see: t < end, and t < keep or t >= from. With a mask,
// rows may see fewer.
struct Visible {
  int from, keep, end;

  Visible(const AttendArgs& args, int sequence, int first, int last)
      : from(has_window(args) ? std::max(0, first - args.window + 1) : 0),
        keep(has_window(args) ? args.keep : 0),
        end(args.mask ? args.kv_len[sequence] : last + 1) {
    if (args.residency.part == Residency::residual) {
      from = std::max(from, residual_start(args, sequence, first));
      keep = args.residency.keep;
    } else if (args.residency.part == Residency::quantized) {
      from = std::max(from, args.residency.keep);
      keep = 0;
      end = residual_start(args, sequence, last);
    }
  }
};

// Tiles that rows at positions `first` to `last` see, in order: tiles of the first `keep` positions, then
// tiles of the window.
//
//   0 |keep|..........skipped..........|  window of first ... last | end
struct TileList {
  Visible visible;
  int num_keep, window_tile, count;

  TileList(const AttendArgs& args, int sequence, int first, int last)
      : visible(args, sequence, first, last), window_tile(visible.from / kTileTokens) {
    num_keep = std::min((visible.keep + kTileTokens - 1) / kTileTokens, window_tile);
    count = num_keep + std::max(0, (visible.end + kTileTokens - 1) / kTileTokens - window_tile);
  }

  // Returns where the index-th visible tile begins.
  int start(int index) const {
    return kTileTokens * (index < num_keep ? index : index - num_keep + window_tile);
  }

  // Returns the part of a row's sums that contains the index-th visible tile.
  int part(int index) const { return start(index) / kPartTokens; }

  // Returns the index after the last tile of the part that contains the index-th tile.
  int part_end(int index) const {
    const int end_tile = (part(index) + 1) * (kPartTokens / kTileTokens);
    if (index < num_keep && end_tile <= window_tile) return std::min(end_tile, num_keep);
    return std::min(end_tile - window_tile + num_keep, count);
  }
};

// Returns a bit for each position low <= t < high of the tile that begins at `start`.
inline uint64_t position_bits(int start, int low, int high) {
  low = std::max(low - start, 0);
  high = std::min(high - start, kTileTokens);
  if (low >= high) return 0;
  const uint64_t below_high = high == 64 ? ~uint64_t(0) : (uint64_t(1) << high) - 1;
  return below_high & ~((uint64_t(1) << low) - 1);
}

// Returns the visible positions of the tile that begins at `start`. K and V of other positions must not be
// read.
inline uint64_t tile_bits(const Visible& visible, int start) {
  return position_bits(start, visible.from, visible.end) |
         position_bits(start, 0, std::min(visible.keep, visible.end));
}

// Returns the positions of the tile at `start` that any row of the item sees; `visible` covers all its rows.
inline uint64_t item_bits(const AttendArgs& args, const AttendItem& item, const Visible& visible, int start) {
  const uint64_t bits = tile_bits(visible, start);
  if (!args.mask) return bits;
  const int group = group_size(args), end = args.kv_len[item.sequence];
  const int first_head = item.kv_head * group, num_heads = args.mask.head_stride != 0 ? group : 1;
  uint64_t seen = 0;
  for (int token = item.first_token; token < item.first_token + item.num_tokens; ++token)
    for (int head = first_head; head < first_head + num_heads; ++head)
      seen |= mask_bits(args.mask, token, head, start, end);
  return bits & seen;
}

// Returns the positions that the row at `position` sees in the tile; with a mask, it may see fewer.
inline uint64_t row_bits(const AttendArgs& args, int sequence, int start, int position) {
  const bool causal = args.window <= 0 && !args.mask && args.residency.part == Residency::all;
  if (causal) return position_bits(start, 0, position + 1);
  return tile_bits(Visible(args, sequence, position, position), start);
}

inline int64_t page_offset(const PageLayout& layout, const int32_t* table, int position, int head) {
  return (int64_t(table[position >> layout.page_shift]) * layout.num_heads + head) * layout.head_bytes;
}

// Returns the offset of a (page, head); in latent calls all heads are at one address.
inline int64_t page_offset(const AttendArgs& args, const int32_t* table, int position, int head) {
  if (!args.rotary) return page_offset(args.layout, table, position, head);
  return int64_t(table[position >> args.layout.page_shift]) * args.layout.head_bytes;
}

}  // namespace
}  // namespace octavo
