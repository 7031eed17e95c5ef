#include "attention_plan.h"

#include <algorithm>

#include "attention_tiles.h"

namespace octavo {
namespace {

constexpr int kRowsPerItem = 96;       // query rows that share one dequantized tile
constexpr int kTilesPerSplit = 16;     // 1024 positions
constexpr int kRowsWorthSplitting = 16;  // above this an item is long enough, and its partials large

// Cost of an item in row-tiles; dequantizing a tile costs about as much as four rows.
int64_t cost(const AttendArgs& args, const AttendItem& item) {
  return int64_t(item.num_tiles) * (item.num_tokens * group_size(args) + 4);
}

}  // namespace

AttendPlan plan_attention(const AttendArgs& args, int width) {
  AttendPlan plan;
  const int group = group_size(args), block = std::max(1, kRowsPerItem / group);
  for (int sequence = 0; sequence < args.num_sequences; ++sequence)
    for (int first = args.q_start[sequence]; first < args.q_start[sequence + 1]; first += block) {
      const int num_tokens = std::min(block, args.q_start[sequence + 1] - first);
      const int position = row_position(args, sequence, first);
      const int count = TileList(args, sequence, position, position + num_tokens - 1).count;
      const bool split = count > kTilesPerSplit && num_tokens * group <= kRowsWorthSplitting;
      const int step = split ? kTilesPerSplit : std::max(1, count);
      for (int head = 0; head < args.layout.num_heads; ++head) {
        if (split)
          plan.merges.push_back({head, first, num_tokens, (count + step - 1) / step, plan.partial_floats});
        for (int tile = 0; tile == 0 || tile < count; tile += step) {  // also where nothing is seen
          const int64_t partial = split ? plan.partial_floats : -1;
          const int num_tiles = std::min(step, count - tile);
          plan.items.push_back({sequence, head, first, num_tokens, tile, num_tiles, partial});
          if (split) plan.partial_floats += partial_floats(args, num_tokens, width);
        }
      }
    }
  std::stable_sort(plan.items.begin(), plan.items.end(), [&](const AttendItem& a, const AttendItem& b) {
    return cost(args, a) > cost(args, b);
  });
  return plan;
}

}  // namespace octavo
