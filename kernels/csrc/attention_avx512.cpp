// Paged attention for AVX-512 with VNNI and bf16: the tile loop that joins a key side and a value side.
// What has no side of its own (see fast_attend_kernel) takes the float32 path of attention_portable.cpp.
#pragma GCC optimize("fp-contract=fast")  // nothing here is bit-defined

#include "attention_avx512.h"

#include <algorithm>

#include "attention_finish.h"
#include "attention_rows.h"
#include "attention_softmax.h"
#include "attention_tiles.h"
#include "threads.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Keys and values are loaded 16 positions at a time, so a page must hold whole blocks of them.
constexpr int kSmallestPage = 16;

const KeySide* key_side(const AttendArgs& args) {
  switch (args.layout.k.codes) {
    case CodeType::fp4: return &fp4_keys;
    case CodeType::bf16: return args.queries.type == Float::bf16 ? &bf16_keys : nullptr;
    default: return nullptr;
  }
}

const ValueSide* value_side(const AttendArgs& args) {
  switch (args.layout.v.codes) {
    case CodeType::fp4: return &fp4_values;
    case CodeType::bf16: return args.queries.type == Float::bf16 ? &bf16_values : nullptr;
    default: return nullptr;
  }
}

struct Workspace {
  uint8_t *queries, *key_panel, *value_panel;
  float *scores, *result;

  Workspace(const AttendArgs& args, const AttendItem& item, const KeySide& keys, const ValueSide& values) {
    const int num_rows = item.num_tokens * group_size(args);
    const int width = values.width(args.layout.v.dim);
    const size_t result_floats = item.partial < 0 ? size_t(partial_floats(args, item.num_tokens, width)) : 0;
    const size_t sizes[] = {keys.query_bytes(args.layout.k.dim, num_rows),
                            keys.panel_bytes(args.layout.k.dim),
                            values.panel_bytes(args.layout.v.dim, num_rows),
                            size_t(num_rows) * kTileTokens * sizeof(float), result_floats * sizeof(float)};
    size_t total = 0;
    for (size_t size : sizes) total += round_up64(size);
    uint8_t* next = static_cast<uint8_t*>(thread_scratch(total));
    uint8_t* parts[5];
    for (int i = 0; i < 5; ++i) {
      parts[i] = next;
      next += round_up64(sizes[i]);
    }
    queries = parts[0];
    key_panel = parts[1];
    value_panel = parts[2];
    scores = reinterpret_cast<float*>(parts[3]);
    result = reinterpret_cast<float*>(parts[4]);
  }
};

// Where the blocks of the tile lie; a block that `bits` leaves out is not looked up at all.
void locate(const AttendArgs& args, const AttendItem& item, int start, uint64_t bits,
            Tile::Block (&blocks)[kBlocks]) {
  const PageLayout& layout = args.layout;
  const int32_t* table = args.page_table + item.sequence * args.table_width;
  for (int b = 0; b < kBlocks; ++b) {
    const int position = start + 16 * b;
    const bool visible = (bits >> (16 * b) & 0xffff) != 0;
    blocks[b] = {visible ? args.pool + page_offset(layout, table, position, item.kv_head) : nullptr,
                 position & (layout.page_size - 1)};
  }
}

void attend_rows(const AttendArgs& args, const AttendItem& item, const KeySide& keys, const ValueSide& values,
                 const Workspace& work, float* result) {
  const int group = group_size(args), num_rows = item.num_tokens * group;
  const int width = values.width(args.layout.v.dim);
  float* const maxima = result + int64_t(num_rows) * width;
  float* const sums = maxima + num_rows;
  std::fill(result, maxima, 0.0f);
  std::fill(maxima, sums, kLowest);
  std::fill(sums, sums + num_rows, 0.0f);
  keys.load_queries(args, item, work.queries);

  const int position = row_position(args, item.sequence, item.first_token);
  const TileList tiles(args, position, position + item.num_tokens - 1);
  const int end = item.first_tile + item.num_tiles;
  Tile tile{};
  int start = tiles.start(item.first_tile);
  uint64_t bits = tile_bits(tiles, start);
  locate(args, item, start, bits, tile.next);
  for (int index = item.first_tile; index < end; ++index) {
    std::copy(tile.next, tile.next + kBlocks, tile.blocks);
    tile.bits = bits;
    const int here = start;
    if (index + 1 < end) {
      start = tiles.start(index + 1);
      bits = tile_bits(tiles, start);
      locate(args, item, start, bits, tile.next);
    } else {
      for (Tile::Block& block : tile.next) block.base = nullptr;
    }
    keys.score(args.layout, tile, work.queries, num_rows, work.key_panel, work.scores);
    for (int row = 0; row < num_rows; ++row)
      soften_row(args, row_bits(args, here, position + row / group), work.scores + row * kTileTokens,
                 result + int64_t(row) * width, width, maxima[row], sums[row]);
    values.accumulate(args.layout, tile, work.scores, num_rows, work.value_panel, result);
  }
}

void merge(const AttendArgs& args, const MergeItem& item, const float* partials) {
  const ValueSide& values = *value_side(args);
  const int dim = args.layout.v.dim;
  merge_partials(args, item, partials, values.width(dim), [&](const float* accumulator, float* row) {
    values.to_natural(dim, accumulator, row);
  });
}

void attend(const AttendArgs& args, const AttendItem& item, float* partials) {
  const KeySide& keys = *key_side(args);
  const ValueSide& values = *value_side(args);
  const Workspace work(args, item, keys, values);
  if (item.partial >= 0) return attend_rows(args, item, keys, values, work, partials + item.partial);
  attend_rows(args, item, keys, values, work, work.result);
  merge(args, {item.kv_head, item.first_token, item.num_tokens, 1, 0}, work.result);
}

}  // namespace

// No kernel (null) where the codes, the type of the queries or the page size need the float32 path.
AttendKernel fast_attend_kernel(const AttendArgs& args) {
  const ValueSide* const values = value_side(args);
  if (args.layout.page_size < kSmallestPage || key_side(args) == nullptr || values == nullptr)
    return {nullptr, nullptr, 0};
  return {attend, merge, values->width(args.layout.v.dim)};
}

}  // namespace octavo::OCTAVO_ISA
