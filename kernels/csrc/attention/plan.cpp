#include "attention/plan.h"

#include <algorithm>

#include "attention/tiles.h"
#include "runtime/threads.h"

namespace octavo {
namespace {

constexpr int kRowsPerItem = 96;         // query rows that share one dequantized tile
constexpr int kTilesPerSplit = 16;       // 1024 positions
constexpr int kRowsWorthSplitting = 16;  // above this an item is long enough, and its partials large

constexpr int kItemsPerThread = 4;  // at least, before an item takes several KV heads

// Over latents all query heads are rows of one KV head. How many of them an item has must not matter to where
// rows are cut, so that is decided by all of them.
constexpr int kLatentRows = 128;             // of an item, at most
constexpr int kFewestLatentRows = 16;        // or all heads
constexpr int kLatentsWorthSplitting = 512;  // rows of a sequence in this step

// Cost of an item in row-tiles; dequantizing a tile costs about as much as four rows.
int64_t cost(const AttendArgs& args, const AttendItem& item) {
  return int64_t(item.num_tiles) * item.num_heads * (item.num_tokens * group_size(args) + 4);
}

// Some tokens of a sequence: the tiles that they see, and how many of them make an item.
struct Rows {
  int sequence, first, num_tokens;
  int count, step;

  bool split() const { return count > step; }
  int num_parts() const { return count == 0 ? 1 : (count + step - 1) / step; }  // also where nothing is seen
};

// Tokens whose rows share one dequantized tile.
int tokens_per_item(const AttendArgs& args) {
  if (args.rotary) return std::max(1, kLatentRows / args.num_query_heads);
  return std::max(1, kRowsPerItem / group_size(args));
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
    for (int first = args.q_start[sequence]; first < args.q_start[sequence + 1]; first += block) {
      const int num_tokens = std::min(block, args.q_start[sequence + 1] - first);
      const int position = row_position(args, sequence, first);
      const int count = TileList(args, sequence, position, position + num_tokens - 1).count;
      const bool split = count > kTilesPerSplit && worth_splitting(args, sequence, num_tokens);
      list.push_back({sequence, first, num_tokens, count, split ? kTilesPerSplit : std::max(1, count)});
    }
  return list;
}

// KV heads that an item of so many tokens takes in turns; what a head computes does not depend on it.
int heads_in_turn(const AttendArgs& args, int num_tokens, int64_t num_parts) {
  const int num_heads = args.layout.num_heads;
  if (args.mask || args.rotary || args.layout.page_size < kShortestPage)
    return 1;  // heads see other positions, or share one place already; pages are copied
  const int64_t items = int64_t(kItemsPerThread) * num_threads();
  int heads = std::clamp(kRowsInTurn / (num_tokens * group_size(args)), 1, num_heads);
  while (heads > 1 && (num_heads % heads != 0 || num_parts * (num_heads / heads) < items)) --heads;
  return heads;
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
  const std::vector<Rows> list = list_rows(args);
  int64_t num_parts = 0;
  for (const Rows& rows : list) num_parts += rows.num_parts();
  for (const Rows& rows : list) {
    const int heads = heads_in_turn(args, rows.num_tokens, num_parts), parts = rows.num_parts();
    const int64_t size = rows.split() ? partial_floats(args, rows.num_tokens, width) : 0;
    for (int head = 0; head < args.layout.num_heads; head += heads)
      for (int part = 0; part < parts; ++part) {
        const int tile = part * rows.step;
        const int64_t partial =
            rows.split() ? plan.partial_floats + (int64_t(head) * parts + part) * size : -1;
        plan.items.push_back({rows.sequence, head, heads, rows.first, rows.num_tokens, tile,
                              std::min(rows.step, rows.count - tile), partial, parts * size});
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
