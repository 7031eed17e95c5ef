// The tile loop of attention: the key side's scores become weights (online softmax) for the value side. Each
// instruction set includes this file once, outside any namespace. All names have internal linkage.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>

#include "attention/finish.h"
#include "attention/rows.h"
#include "attention/sides.h"
#include "attention/softmax.h"
#include "attention/tiles.h"
#include "runtime/threads.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kBlockRows = kShortestPage;

// Returns the layout after small pages were copied together: pages of 16 positions, as the sides read them.
// Rotary keys come last in a page.
PageLayout block_layout(const PageLayout& layout, RotaryPart& rotary) {
  PageLayout blocks = layout;
  blocks.page_size = kBlockRows;
  blocks.k_scales = kBlockRows * layout.k.row_bytes;
  blocks.v_codes = blocks.k_scales + kBlockRows * layout.k.scale_bytes;
  blocks.v_scales = blocks.v_codes + kBlockRows * layout.v.row_bytes;
  blocks.head_bytes = blocks.v_scales + kBlockRows * layout.v.scale_bytes;
  if (rotary) {
    rotary.codes = blocks.head_bytes;
    rotary.scales = rotary.codes + kBlockRows * rotary.format.row_bytes;
    blocks.head_bytes = rotary.scales + kBlockRows * rotary.format.scale_bytes;
  }
  return blocks;
}

// Returns a call in which rotary keys replace K, for scoring them with their own key side.
AttendArgs rotary_args(const AttendArgs& args) {
  AttendArgs rotary = args;
  rotary.layout.k = args.rotary.format;
  rotary.queries = args.rotary.queries;
  return rotary;
}

// Returns a layout with rotary keys as K, for a tile whose addresses were advanced by `rotary.codes`.
PageLayout rotary_layout(const PageLayout& layout, const RotaryPart& rotary) {
  PageLayout keys = layout;
  keys.k = keys.v = rotary.format;
  keys.k_scales = keys.v_scales = rotary.scales - rotary.codes;
  keys.v_codes = 0;
  return keys;
}

struct Workspace {
  bool small_pages;
  RotaryPart rotary;  // as the sides read it, see block_layout
  PageLayout layout;  // as the sides read it, see block_layout
  uint8_t *queries, *key_panel, *value_panel, *blocks, *rotary_queries;
  float *scores, *result, *rotary_scores;
  size_t query_bytes, result_floats, rotary_bytes;  // for one KV head

  // `results`: 1, or 2 if the item has several parts, because rows then have sums of the current part and
  // totals of earlier parts.
  Workspace(const AttendArgs& args, const AttendItem& item, const KeySide& keys, const ValueSide& values,
            int results)
      : small_pages(args.layout.page_size < kBlockRows),
        rotary(args.rotary),
        layout(small_pages ? block_layout(args.layout, rotary) : args.layout) {
    const int num_rows = item.num_tokens * group_size(args);
    const int width = values.width(args.layout.v.dim);
    query_bytes = round_up64(keys.query_bytes(args.layout.k.dim, num_rows));
    result_floats = size_t(partial_floats(args, item.num_tokens, width)) * results;
    size_t panel_bytes = keys.panel_bytes(args.layout.k.dim);
    rotary_bytes = 0;
    if (rotary) {
      const KeySide& rotary_keys = *key_side(rotary_args(args));
      rotary_bytes = round_up64(rotary_keys.query_bytes(rotary.format.dim, num_rows));
      panel_bytes = std::max(panel_bytes, rotary_keys.panel_bytes(rotary.format.dim));
    }
    const size_t sizes[] = {query_bytes * item.num_heads,
                            panel_bytes,
                            values.panel_bytes(args.layout.v.dim, num_rows),
                            size_t(num_rows) * kTileTokens * sizeof(float),
                            result_floats * item.num_heads * sizeof(float),
                            small_pages ? size_t(layout.head_bytes) * kBlocks : 0,
                            rotary_bytes * item.num_heads,
                            rotary ? size_t(num_rows) * kTileTokens * sizeof(float) : 0};
    size_t total = 0;
    for (size_t size : sizes) total += round_up64(size);
    uint8_t* next = static_cast<uint8_t*>(thread_scratch(total));
    constexpr int kParts = 8;
    uint8_t* parts[kParts];
    for (int i = 0; i < kParts; ++i) {
      parts[i] = next;
      next += round_up64(sizes[i]);
    }
    queries = parts[0];
    key_panel = parts[1];
    value_panel = parts[2];
    scores = reinterpret_cast<float*>(parts[3]);
    result = reinterpret_cast<float*>(parts[4]);
    blocks = parts[5];
    rotary_queries = parts[6];
    rotary_scores = reinterpret_cast<float*>(parts[7]);
  }
};

// Finds the addresses of the tile's blocks that have visible positions (`bits`).
void locate(const AttendArgs& args, const AttendItem& item, int start, uint64_t bits,
            Tile::Block (&blocks)[kBlocks]) {
  const PageLayout& layout = args.layout;
  const int32_t* table = args.page_table + item.sequence * args.table_width;
  for (int b = 0; b < kBlocks; ++b) {
    const int position = start + 16 * b;
    const bool visible = (bits >> (16 * b) & 0xffff) != 0;
    blocks[b] = {visible ? args.pool + page_offset(args, table, position, item.kv_head) : nullptr,
                 position & (layout.page_size - 1)};
  }
}

// Copies visible rows of small pages into blocks, and sets the tile's addresses. Other rows keep old data.
void stage(const AttendArgs& args, const AttendItem& item, int start, uint64_t bits, const Workspace& work,
           Tile::Block (&blocks)[kBlocks]) {
  const PageLayout &from = args.layout, &to = work.layout;
  const int32_t* table = args.page_table + item.sequence * args.table_width;
  const int size = from.page_size;
  const uint64_t page_bits = (uint64_t(1) << size) - 1;
  for (int b = 0; b < kBlocks; ++b) {
    const bool visible = (bits >> (16 * b) & 0xffff) != 0;
    uint8_t* const block = work.blocks + b * to.head_bytes;
    blocks[b] = {visible ? block : nullptr, 0};
    for (int row = 0; visible && row < kBlockRows; row += size) {
      if ((bits >> (16 * b + row) & page_bits) == 0) continue;
      const uint8_t* page = args.pool + page_offset(args, table, start + 16 * b + row, item.kv_head);
      std::memcpy(block + row * from.k.row_bytes, page, size_t(size * from.k.row_bytes));
      std::memcpy(block + to.k_scales + row * from.k.scale_bytes, page + from.k_scales,
                  size_t(size * from.k.scale_bytes));
      std::memcpy(block + to.v_codes + row * from.v.row_bytes, page + from.v_codes,
                  size_t(size * from.v.row_bytes));
      std::memcpy(block + to.v_scales + row * from.v.scale_bytes, page + from.v_scales,
                  size_t(size * from.v.scale_bytes));
      if (!args.rotary) continue;
      const RowFormat& format = args.rotary.format;
      std::memcpy(block + work.rotary.codes + row * format.row_bytes, page + args.rotary.codes,
                  size_t(size * format.row_bytes));
      std::memcpy(block + work.rotary.scales + row * format.scale_bytes, page + args.rotary.scales,
                  size_t(size * format.scale_bytes));
    }
  }
}

// Iterates over the visible tiles of an item; each tile comes with the address of the next one.
class TileWalk {
 public:
  TileWalk(const AttendArgs& args, const AttendItem& item, const TileList& tiles, const Workspace& work)
      : args_(args), item_(item), tiles_(tiles), work_(work), index_(item.first_tile) {
    look_ahead();
  }

  // Advances to the next tile, which starts at position `start`; returns false after the last.
  bool advance(Tile& tile, int& start) {
    if (index_ == item_.first_tile + item_.num_tiles) return false;
    start = start_;
    tile.bits = bits_;
    if (work_.small_pages) stage(args_, item_, start_, bits_, work_, tile.blocks);
    else std::copy(next_, next_ + kBlocks, tile.blocks);
    ++index_;
    look_ahead();
    std::copy(next_, next_ + kBlocks, tile.next);
    return true;
  }

 private:
  // Finds the next tile with a visible position.
  void look_ahead() {
    for (Tile::Block& block : next_) block = {nullptr, 0};
    for (bits_ = 0; index_ < item_.first_tile + item_.num_tiles; ++index_) {
      start_ = tiles_.start(index_);
      bits_ = item_bits(args_, item_, tiles_.visible, start_);
      if (bits_ != 0) break;
    }
    if (bits_ == 0) return;
    if (!work_.small_pages) locate(args_, item_, start_, bits_, next_);
  }

  const AttendArgs& args_;
  const AttendItem& item_;
  const TileList& tiles_;
  const Workspace& work_;
  int index_, start_ = 0;
  uint64_t bits_ = 0;
  Tile::Block next_[kBlocks];
};

// An item's rows for one of its KV heads: their queries, and their sums so far.
struct HeadRows {
  AttendItem item;  // of this head alone
  uint8_t* queries;
  float *result, *maxima, *sums;  // of the current part
  float* total;                   // of earlier parts, like `result`; null if the item has only one part

  void begin_part(int num_rows) const {
    std::fill(result, maxima, 0.0f);
    std::fill(maxima, sums, kLowest);
    std::fill(sums, sums + num_rows, 0.0f);
  }

  void end_part(int num_rows, int width) const {
    float* const maximum = total + (maxima - result);
    for (int row = 0; row < num_rows; ++row)
      fold_part(result + int64_t(row) * width, width, maxima[row], sums[row], total + int64_t(row) * width,
                maximum[row], maximum[num_rows + row]);
  }
};

// Returns the tile of head `head` of `num_heads`, given the first head's tile. The tile that will be read
// next is the next head's, or after the last head the first head's next tile.
Tile tile_of_head(const PageLayout& layout, const Tile& first, int head, int num_heads, bool rotary) {
  Tile tile = first;
  if (rotary) return tile;  // all heads are at one address
  for (int b = 0; b < kBlocks; ++b) {
    const uint8_t* const base = first.blocks[b].base;
    if (base != nullptr) tile.blocks[b].base = base + head * layout.head_bytes;
    if (head + 1 == num_heads) continue;
    tile.next[b] = first.blocks[b];
    if (base != nullptr) tile.next[b].base = base + (head + 1) * layout.head_bytes;
  }
  return tile;
}

HeadRows begin_head(const AttendArgs& args, const AttendItem& item, int head, const KeySide& keys, int width,
                    const Workspace& work, bool several_parts, float* partials) {
  const int num_rows = item.num_tokens * group_size(args);
  HeadRows rows{item, work.queries + head * work.query_bytes, nullptr, nullptr, nullptr, nullptr};
  rows.item.kv_head += head;
  rows.result = item.partial >= 0 ? partials + item.partial + head * item.partial_stride
                                  : work.result + head * work.result_floats;
  rows.maxima = rows.result + int64_t(num_rows) * width;
  rows.sums = rows.maxima + num_rows;
  if (several_parts) {
    rows.total = rows.result + work.result_floats / 2;
    HeadRows whole = rows;
    whole.result = rows.total;
    whole.maxima = rows.total + (rows.maxima - rows.result);
    whole.sums = whole.maxima + num_rows;
    whole.begin_part(num_rows);
  }
  rows.begin_part(num_rows);
  keys.load_queries(args, rows.item, rows.queries);
  return rows;
}

void merge(const AttendArgs& args, const MergeItem& item, const float* partials) {
  const ValueSide& values = *value_side(args);
  const int dim = args.layout.v.dim;
  merge_partials(args, item, partials, values.width(dim),
                 [&](const float* accumulator, float* row) { values.to_natural(dim, accumulator, row); });
}

// Turns scores of the tile at `start` into weights.
void softmax_update(const AttendArgs& args, const HeadRows& rows, int start, int width, float* scores) {
  const AttendItem& item = rows.item;
  const int group = group_size(args), num_rows = item.num_tokens * group, length = args.kv_len[item.sequence];
  // Masks without added values use the plain path, so that rows which see all positions keep their bits.
  const bool is_plain = args.softcap <= 0 && args.mask.added == nullptr;
  uint64_t bits[kSoftmaxRows];
  for (int row = 0, token = item.first_token, in_group = 0; row < num_rows;) {
    const int first = row, end = std::min(first + kSoftmaxRows, num_rows);
    for (uint64_t seen = 0; row < end; ++row, ++in_group) {
      if (in_group == group) in_group = 0, ++token;
      if (in_group == 0 || row == first)
        seen = row_bits(args, item.sequence, start, row_position(args, item.sequence, token));
      const int head = item.kv_head * group + in_group;
      bits[row - first] = args.mask ? seen & mask_bits(args.mask, token, head, start, length) : seen;
      if (is_plain) continue;
      float copy[kTileTokens];
      make_logits(args, args.mask ? mask_added(args.mask, token, head, start, length, copy) : nullptr,
                  scores + row * kTileTokens);
    }
    softmax_update_rows(is_plain ? args.scale * kLog2E : 1.0f, bits, end - first,
                        scores + first * kTileTokens, rows.result + int64_t(first) * width, width,
                        rows.maxima + first, rows.sums + first);
  }
}

// Adds products of rotary queries and the tile's rotary keys to the scores of some rows.
class RotaryScores {
 public:
  RotaryScores(const AttendArgs& args, const Workspace& work)
      : args_(rotary_args(args)),
        work_(work),
        keys_(*key_side(args_)),
        layout_(rotary_layout(work.layout, work.rotary)) {}

  void load_queries(const AttendItem& item, int head) const {
    keys_.load_queries(args_, item, work_.rotary_queries + head * work_.rotary_bytes);
  }

  void add(Tile tile, int head, int num_rows) const {
    for (int b = 0; b < kBlocks; ++b) {
      if (tile.blocks[b].base != nullptr) tile.blocks[b].base += work_.rotary.codes;
      if (tile.next[b].base != nullptr) tile.next[b].base += work_.rotary.codes;
    }
    keys_.score(layout_, tile, work_.rotary_queries + head * work_.rotary_bytes, num_rows, work_.key_panel,
                work_.rotary_scores);
    const float factor = 1 / args_.scale;  // divided by the scale, because scores are multiplied by it later
    for (int i = 0; i < num_rows * kTileTokens; i += kLanes)
      store(work_.scores + i, load(work_.scores + i) + load(work_.rotary_scores + i) * factor);
  }

 private:
  AttendArgs args_;
  const Workspace& work_;
  const KeySide& keys_;
  PageLayout layout_;
};

void attend(const AttendArgs& args, const AttendItem& item, float* partials) {
  const KeySide& keys = *key_side(args);
  const ValueSide& values = *value_side(args);
  const int position = row_position(args, item.sequence, item.first_token);
  const TileList tiles(args, item.sequence, position, position + item.num_tokens - 1);
  const int end_tile = item.first_tile + item.num_tiles;
  const bool several_parts = item.num_tiles > 0 && tiles.part_end(item.first_tile) < end_tile;
  const Workspace work(args, item, keys, values, item.partial >= 0 ? 0 : several_parts ? 2 : 1);
  const int num_rows = item.num_tokens * group_size(args), width = values.width(args.layout.v.dim);
  HeadRows heads[kRowsInTurn];
  for (int head = 0; head < item.num_heads; ++head)
    heads[head] = begin_head(args, item, head, keys, width, work, several_parts, partials);
  std::optional<RotaryScores> rotary;
  if (args.rotary) rotary.emplace(args, work);
  for (int head = 0; rotary && head < item.num_heads; ++head) rotary->load_queries(heads[head].item, head);

  TileWalk walk(args, item, tiles, work);
  Tile first{};
  int part = item.num_tiles > 0 ? tiles.part(item.first_tile) : 0;
  for (int start; walk.advance(first, start);) {
    if (several_parts && start / kPartTokens != part) {
      part = start / kPartTokens;
      for (int head = 0; head < item.num_heads; ++head) {
        heads[head].end_part(num_rows, width);
        heads[head].begin_part(num_rows);
      }
    }
    for (int head = 0; head < item.num_heads; ++head) {
      const HeadRows& rows = heads[head];
      const Tile tile = tile_of_head(work.layout, first, head, item.num_heads, bool(args.rotary));
      keys.score(work.layout, tile, rows.queries, num_rows, work.key_panel, work.scores);
      if (rotary) rotary->add(tile, head, num_rows);
      softmax_update(args, rows, start, width, work.scores);
      values.accumulate(work.layout, tile, work.scores, num_rows, work.value_panel, rows.result);
    }
  }
  for (int head = 0; item.partial < 0 && head < item.num_heads; ++head) {
    if (several_parts) heads[head].end_part(num_rows, width);
    merge(args, {item.kv_head + head, item.first_token, item.num_tokens, 1, 0},
          several_parts ? heads[head].total : heads[head].result);
  }
}

// Returns the kernel of a call that has both sides.
AttendKernel tile_kernel(const AttendArgs& args) {
  return {attend, merge, value_side(args)->width(args.layout.v.dim)};
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
