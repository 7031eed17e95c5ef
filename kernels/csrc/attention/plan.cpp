#include "attention/plan.h"

#include <algorithm>

#include "attention/tiles.h"
#include "runtime/threads.h"

namespace octavo {
namespace {

constexpr int kRowsPerItem = 128;        // most query rows that share one dequantized tile
constexpr int kRowsWorthSplitting = 16;  // with more rows, items are long and partial results are large

constexpr int kItemsPerThread = 4;  // items wanted for each thread in latent calls

// In latent calls, all query heads are rows of one KV head. A sequence's total number of rows decides whether
// its positions are divided.
constexpr int kLatentRows = 128;             // most rows of an item
constexpr int kFewestLatentRows = 16;        // fewest rows of an item, unless it has all heads
constexpr int kLatentsWorthSplitting = 512;  // most rows of a sequence whose positions are divided

// Cost of an item in row-tiles; dequantizing a tile costs about as much as four rows.
int64_t cost(const AttendArgs& args, const AttendItem& item) {
  return int64_t(item.num_tiles) * (item.num_tokens * group_size(args) + 4);
}

// Some tokens of a sequence, whose visible tiles are divided among items; `ends`: where each item ends.
struct Rows {
  int sequence, first, num_tokens;
  std::vector<int> ends;  // a single 0 if no tile is visible

  int num_parts() const { return int(ends.size()); }
  bool split() const { return num_parts() > 1; }
};

// Returns how many tokens share a dequantized tile; in latent calls, a power of two of at most kTileTokens.
int tokens_per_item(const AttendArgs& args) {
  if (args.rotary) return std::max(1, kLatentRows / args.num_query_heads);
  int tokens = kTileTokens;
  while (tokens > 1 && tokens * group_size(args) > kRowsPerItem) tokens /= 2;
  return tokens;
}

// Returns how many of a sequence's tokens [first, end) belong to the next item. If there are several items,
// they end at tile boundaries, because fewer tiles are then partly visible or in both pools.
int next_tokens(const AttendArgs& args, int sequence, int first, int end, int block) {
  if (args.rotary || end - args.q_start[sequence] <= block) return std::min(block, end - first);
  return std::min(block - row_position(args, sequence, first) % block, end - first);
}

bool worth_splitting(const AttendArgs& args, int sequence, int num_tokens) {
  if (!args.rotary) return num_tokens * group_size(args) <= kRowsWorthSplitting;
  return (args.q_start[sequence + 1] - args.q_start[sequence]) * args.num_query_heads <=
         kLatentsWorthSplitting;
}

std::vector<Rows> list_rows(const AttendArgs& args) {
  std::vector<Rows> list;
  const int block = tokens_per_item(args);
  for (int sequence = 0; sequence < args.num_sequences; ++sequence)
    for (int first = args.q_start[sequence], end = args.q_start[sequence + 1]; first < end;
         first += list.back().num_tokens) {
      const int num_tokens = next_tokens(args, sequence, first, end, block);
      const int position = row_position(args, sequence, first);
      const TileList tiles(args, sequence, position, position + num_tokens - 1);
      list.push_back({sequence, first, num_tokens, {}});
      if (tiles.count > kPartTokens / kTileTokens && worth_splitting(args, sequence, num_tokens))
        for (int tile = 0; tile < tiles.count; tile = list.back().ends.back())
          list.back().ends.push_back(tiles.part_end(tile));
      else list.back().ends.push_back(tiles.count);
    }
  return list;
}

}  // namespace

int latent_group(const AttendArgs& args) {
  const int64_t wanted = int64_t(kItemsPerThread) * num_threads();
  int64_t num_parts = 0;
  for (const Rows& rows : list_rows(args)) num_parts += rows.num_parts();
  const int num_heads = args.num_query_heads;
  int group = std::min(num_heads, kLatentRows);
  while (num_heads % group != 0) --group;
  for (int fewer = group - 1; fewer >= kFewestLatentRows && num_parts * (num_heads / group) < wanted; --fewer)
    if (num_heads % fewer == 0) group = fewer;
  return group;
}

AttendPlan plan_attention(const AttendArgs& args, int width) {
  AttendPlan plan;
  for (const Rows& rows : list_rows(args)) {
    const int parts = rows.num_parts();
    const int64_t size = rows.split() ? partial_floats(args, rows.num_tokens, width) : 0;
    for (int head = 0; head < args.layout.num_heads; ++head)
      for (int part = 0, tile = 0; part < parts; tile = rows.ends[part++]) {
        const int64_t partial =
            rows.split() ? plan.partial_floats + (int64_t(head) * parts + part) * size : -1;
        plan.items.push_back(
            {rows.sequence, head, rows.first, rows.num_tokens, tile, rows.ends[part] - tile, partial});
      }
    for (int head = 0; rows.split() && head < args.layout.num_heads; ++head)
      plan.merges.push_back(
          {head, rows.first, rows.num_tokens, parts, plan.partial_floats + head * parts * size});
    plan.partial_floats += args.layout.num_heads * parts * size;
  }
  std::stable_sort(plan.items.begin(), plan.items.end(),
                   [&](const AttendItem& a, const AttendItem& b) { return cost(args, a) > cost(args, b); });
  return plan;
}

}  // namespace octavo
