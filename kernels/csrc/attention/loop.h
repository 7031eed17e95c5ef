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

  // `results`: 1, or 2 if the item has several parts, because rows then have sums of the current part and
  // totals of earlier parts.
  Workspace(const AttendArgs& args, const AttendItem& item, const KeySide& keys, const ValueSide& values,
            int results)
      : small_pages(args.layout.page_size < kBlockRows),
        rotary(args.rotary),
        layout(small_pages ? block_layout(args.layout, rotary) : args.layout) {
    const int num_rows = item.num_tokens * group_size(args);
    const int width = values.width(args.layout.v.dim);
    size_t panel_bytes = keys.panel_bytes(args.layout.k.dim), rotary_bytes = 0;
    if (rotary) {
      const KeySide& rotary_keys = *key_side(rotary_args(args));
      rotary_bytes = rotary_keys.query_bytes(rotary.format.dim, num_rows);
      panel_bytes = std::max(panel_bytes, rotary_keys.panel_bytes(rotary.format.dim));
    }
    const size_t score_bytes = size_t(num_rows) * kTileTokens * sizeof(float);
    const size_t result_bytes =
        size_t(partial_floats(args, item.num_tokens, width)) * results * sizeof(float);
    const auto lay_out = [&](void* memory) {
      const uintptr_t start = reinterpret_cast<uintptr_t>(memory);
      uintptr_t next = start;
      const auto take = [&](auto*& part, size_t bytes) {
        part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(next);
        next += round_up64(bytes);
      };
      take(queries, keys.query_bytes(args.layout.k.dim, num_rows));
      take(key_panel, panel_bytes);
      take(value_panel, values.panel_bytes(args.layout.v.dim, num_rows));
      take(scores, score_bytes);
      take(result, result_bytes);
      take(blocks, small_pages ? size_t(layout.head_bytes) * kBlocks : 0);
      take(rotary_queries, rotary_bytes);
      take(rotary_scores, rotary ? score_bytes : 0);
      return size_t(next - start);
    };
    lay_out(thread_scratch(lay_out(nullptr)));
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
  const RowFormat& rotary = args.rotary.format;
  const struct {
    int64_t bytes, from, to;
  } parts[] = {{from.k.row_bytes, 0, 0},
               {from.k.scale_bytes, from.k_scales, to.k_scales},
               {from.v.row_bytes, from.v_codes, to.v_codes},
               {from.v.scale_bytes, from.v_scales, to.v_scales},
               {rotary.row_bytes, args.rotary.codes, work.rotary.codes},
               {rotary.scale_bytes, args.rotary.scales, work.rotary.scales}};
  for (int b = 0; b < kBlocks; ++b) {
    const bool visible = (bits >> (16 * b) & 0xffff) != 0;
    uint8_t* const block = work.blocks + b * to.head_bytes;
    blocks[b] = {visible ? block : nullptr, 0};
    for (int row = 0; visible && row < kBlockRows; row += size) {
      if ((bits >> (16 * b + row) & page_bits) == 0) continue;
      const uint8_t* page = args.pool + page_offset(args, table, start + 16 * b + row, item.kv_head);
      for (const auto& [bytes, source, target] : parts)
        std::memcpy(block + target + row * bytes, page + source, size_t(size * bytes));
    }
  }
}

// A tile with visible positions (`bits`), or 0 after the last one, and the addresses of its blocks.
struct FoundTile {
  int start = 0;
  uint64_t bits = 0;
  Tile::Block blocks[kBlocks] = {};
};

// Returns the item's next tile with a visible position, and advances `index`, a number of its visible tiles.
FoundTile next_tile(const AttendArgs& args, const AttendItem& item, const TileList& tiles,
                    const Workspace& work, int& index) {
  FoundTile found;
  for (; found.bits == 0 && index < item.num_tiles; ++index) {
    found.start = tiles.start(item.first_tile + index);
    found.bits = item_bits(args, item, tiles.visible, found.start);
  }
  if (found.bits != 0 && !work.small_pages) locate(args, item, found.start, found.bits, found.blocks);
  return found;
}

// Sums of an item's rows: accumulators [rows][width], then maxima and sums of weights.
struct RowSums {
  int num_rows, width;
  float *sums, *maxima, *weights;

  RowSums(float* memory, int num_rows, int width)
      : num_rows(num_rows),
        width(width),
        sums(memory),
        maxima(memory + int64_t(num_rows) * width),
        weights(maxima + num_rows) {}

  void clear() const {
    std::fill(sums, maxima, 0.0f);
    std::fill(maxima, weights, kLowest);
    std::fill(weights, weights + num_rows, 0.0f);
  }

  void fold_into(const RowSums& total) const {
    for (int row = 0; row < num_rows; ++row)
      fold_part(sums + int64_t(row) * width, width, maxima[row], weights[row],
                total.sums + int64_t(row) * width, total.maxima[row], total.weights[row]);
  }
};

void merge(const AttendArgs& args, const MergeItem& item, const float* partials) {
  const ValueSide& values = *value_side(args);
  const int dim = args.layout.v.dim;
  merge_partials(args, item, partials, values.width(dim),
                 [&](const float* accumulator, float* row) { values.to_natural(dim, accumulator, row); });
}

// Turns scores of the tile at `start` into weights.
void softmax_update(const AttendArgs& args, const AttendItem& item, const RowSums& rows, int start,
                    float* scores) {
  const int group = group_size(args), num_rows = item.num_tokens * group, length = args.kv_len[item.sequence];
  // A row that sees all positions gets the same bits with such a mask as without one.
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
                        scores + first * kTileTokens, rows.sums + int64_t(first) * rows.width, rows.width,
                        rows.maxima + first, rows.weights + first);
  }
}

// Adds products of rotary queries and the tile's rotary keys to the scores of some rows.
class RotaryScores {
 public:
  RotaryScores(const AttendArgs& args, const AttendItem& item, const Workspace& work)
      : args_(rotary_args(args)),
        work_(work),
        keys_(*key_side(args_)),
        layout_(rotary_layout(work.layout, work.rotary)) {
    keys_.load_queries(args_, item, work.rotary_queries);
  }

  void add(Tile tile, int num_rows) const {
    for (int b = 0; b < kBlocks; ++b) {
      if (tile.blocks[b].base != nullptr) tile.blocks[b].base += work_.rotary.codes;
      if (tile.next[b].base != nullptr) tile.next[b].base += work_.rotary.codes;
    }
    keys_.score(layout_, tile, work_.rotary_queries, num_rows, work_.key_panel, work_.rotary_scores);
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
  const bool several_parts =
      item.num_tiles > 0 && tiles.part_end(item.first_tile) < item.first_tile + item.num_tiles;
  const Workspace work(args, item, keys, values, item.partial >= 0 ? 0 : several_parts ? 2 : 1);
  const int num_rows = item.num_tokens * group_size(args), width = values.width(args.layout.v.dim);
  const RowSums rows(item.partial >= 0 ? partials + item.partial : work.result, num_rows, width);
  const RowSums total(work.result + partial_floats(args, item.num_tokens, width), num_rows, width);
  rows.clear();
  if (several_parts) total.clear();
  keys.load_queries(args, item, work.queries);
  std::optional<RotaryScores> rotary;
  if (args.rotary) rotary.emplace(args, item, work);

  int index = 0, part = item.num_tiles > 0 ? tiles.part(item.first_tile) : 0;
  FoundTile later = next_tile(args, item, tiles, work, index);
  while (later.bits != 0) {
    Tile tile{{}, {}, later.bits};
    const int start = later.start;
    if (work.small_pages) stage(args, item, start, tile.bits, work, tile.blocks);
    else std::copy_n(later.blocks, kBlocks, tile.blocks);
    later = next_tile(args, item, tiles, work, index);
    std::copy_n(later.blocks, kBlocks, tile.next);
    if (several_parts && start / kPartTokens != part) {
      part = start / kPartTokens;
      rows.fold_into(total);
      rows.clear();
    }
    keys.score(work.layout, tile, work.queries, num_rows, work.key_panel, work.scores);
    if (rotary) rotary->add(tile, num_rows);
    softmax_update(args, item, rows, start, work.scores);
    values.accumulate(work.layout, tile, work.scores, num_rows, work.value_panel, rows.sums);
  }
  if (item.partial >= 0) return;
  if (several_parts) rows.fold_into(total);
  merge(args, {item.kv_head, item.first_token, item.num_tokens, 1, 0},
        several_parts ? total.sums : rows.sums);
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
