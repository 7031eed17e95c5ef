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

// Where the twins begin that a query at `position` reads, beside the kept ones.
inline int twin_start(const AttendArgs& args, int sequence, int position) {
  if (position < args.residency.quantize_after[sequence]) return 0;
  return std::max(0, position - args.residency.window + 1) & ~(args.layout.page_size - 1);
}

// What the rows at positions first..last see, all together: positions t < keep or t >= from, and t < end.
struct Visible {
  int from, keep, end;

  Visible(const AttendArgs& args, int sequence, int first, int last)
      : from(args.window > 0 ? std::max(0, first - args.window + 1) : 0),
        keep(args.window > 0 ? args.keep : 0),
        end(last + 1) {
    if (args.residency.part == Residency::twins) {
      from = std::max(from, twin_start(args, sequence, first));
      keep = args.residency.keep;
    } else if (args.residency.part == Residency::quantized) {
      from = std::max(from, args.residency.keep);
      keep = 0;
      end = twin_start(args, sequence, last);
    }
  }
};

// The tiles of what rows at positions first..last see, in order: those of the `keep` first positions,
// then those of the window.
//
//     0 |keep|..........skipped..........|  window of first ... last | end
struct TileList {
  Visible visible;
  int num_keep, window_tile, count;

  TileList(const AttendArgs& args, int sequence, int first, int last)
      : visible(args, sequence, first, last), window_tile(visible.from / kTileTokens) {
    num_keep = std::min((visible.keep + kTileTokens - 1) / kTileTokens, window_tile);
    count = num_keep + std::max(0, (visible.end + kTileTokens - 1) / kTileTokens - window_tile);
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

// Of the tile that starts at `start`, what is visible: nothing else must be read as K or V.
inline uint64_t tile_bits(const Visible& visible, int start) {
  return position_bits(start, visible.from, visible.end) |
         position_bits(start, 0, std::min(visible.keep, visible.end));
}

// What the row at `position` sees in the tile.
inline uint64_t row_bits(const AttendArgs& args, int sequence, int start, int position) {
  if (args.window <= 0 && args.residency.part == Residency::all) return position_bits(start, 0, position + 1);
  return tile_bits(Visible(args, sequence, position, position), start);
}

inline int64_t page_offset(const PageLayout& layout, const int32_t* table, int position, int head) {
  return (int64_t(table[position >> layout.page_shift]) * layout.num_heads + head) * layout.head_bytes;
}

}  // namespace
}  // namespace octavo
