// Which positions a query sees, as tiles and bit masks. Included inside each level's own namespace, so
// nothing here is ever shared between instruction sets.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.h"

namespace octavo {
namespace {

inline int row_position(const AttendArgs& args, int sequence, int token) {
  return args.kv_len[sequence] - args.q_start[sequence + 1] + token;
}

// The tiles that rows at positions first..last see, in order: those of the `keep` first positions,
// then those of the window.
//
//     0 |keep|..........skipped..........|  window of first ... last | end
struct TileList {
  int num_keep, window_tile, count;
  int window_start, keep, end;  // positions t < keep or t >= window_start, and t < end, are visible

  TileList(const AttendArgs& args, int first, int last)
      : window_start(args.window > 0 ? std::max(0, first - args.window + 1) : 0),
        keep(args.window > 0 ? args.keep : 0),
        end(last + 1) {
    window_tile = window_start / kTileTokens;
    num_keep = std::min((keep + kTileTokens - 1) / kTileTokens, window_tile);
    count = num_keep + (end + kTileTokens - 1) / kTileTokens - window_tile;
  }

  // First position of the index-th visible tile.
  int start(int index) const {
    return kTileTokens * (index < num_keep ? index : index - num_keep + window_tile);
  }
};

// Bits of the tile that starts at `start` for positions low <= t < high.
inline uint64_t position_bits(int start, int low, int high) {
  low = std::max(low - start, 0);
  high = std::min(high - start, kTileTokens);
  if (low >= high) return 0;
  const uint64_t below_high = high == 64 ? ~uint64_t(0) : (uint64_t(1) << high) - 1;
  return below_high & ~((uint64_t(1) << low) - 1);
}

// What any row of the list sees in the tile: everything else must not be read as K or V.
inline uint64_t tile_bits(const TileList& tiles, int start) {
  return position_bits(start, tiles.window_start, tiles.end) |
         position_bits(start, 0, std::min(tiles.keep, tiles.end));
}

// What the row at `position` sees in the tile.
inline uint64_t row_bits(const AttendArgs& args, int start, int position) {
  if (args.window <= 0) return position_bits(start, 0, position + 1);
  return position_bits(start, position - args.window + 1, position + 1) |
         position_bits(start, 0, std::min(args.keep, position + 1));
}

inline int64_t page_offset(const PageLayout& layout, const int32_t* table, int position, int head) {
  return (int64_t(table[position >> layout.page_shift]) * layout.num_heads + head) * layout.head_bytes;
}

}  // namespace
}  // namespace octavo
