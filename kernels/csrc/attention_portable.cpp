// Paged attention in float32 for the level OCTAVO_ISA: every page format, head dimension and page size.
//
// An item's rows (query tokens times the query heads of one KV head) run against tiles of 64 positions.
// A tile is dequantized once: K as columns [dim][64], so that scores are sums of whole vectors, and V as
// rows [64][width]. Softmax is online, in the log2 domain. Each row's arithmetic is the same whatever
// rows are computed beside it.
#pragma GCC optimize("fp-contract=fast")  // multiply-adds may fuse here: nothing is bit-defined

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "attention.h"
#include "attention_finish.h"
#include "attention_math.h"
#include "attention_rows.h"
#include "attention_softmax.h"
#include "attention_tiles.h"
#include "page_codes.h"
#include "threads.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kRowBlock = 4;  // rows that share a load of K or V
constexpr int kVecBlock = kLanes >= 16 ? 4 : 2;
constexpr int kColumns = kVecBlock * kLanes;

int accumulator_width(int dim) { return (dim + kColumns - 1) / kColumns * kColumns; }

struct Workspace {
  float *queries, *k_tile, *v_tile, *scores, *row, *result;
  int width;

  Workspace(const AttendArgs& args, const AttendItem& item) : width(accumulator_width(args.layout.v.dim)) {
    const size_t k_dim = size_t(args.layout.k.dim), num_rows = size_t(item.num_tokens) * group_size(args);
    const size_t result_size = item.partial < 0 ? size_t(partial_floats(args, item.num_tokens, width)) : 0;
    float** const parts[] = {&queries, &k_tile, &v_tile, &scores, &row, &result};
    const size_t sizes[] = {num_rows * k_dim,           k_dim * kTileTokens, size_t(width) * kTileTokens,
                            num_rows * kTileTokens, size_t(kMaxDim),     result_size};
    size_t total = 0;
    for (size_t size : sizes) total += (size + 15) / 16 * 16;
    float* next = static_cast<float*>(thread_scratch(total * sizeof(float)));
    for (size_t i = 0; i < std::size(sizes); ++i) {
      *parts[i] = next;
      next += (sizes[i] + 15) / 16 * 16;
    }
  }
};

void load_queries(const AttendArgs& args, const AttendItem& item, float* queries) {
  const RowFormat& format = args.layout.k;
  const int group = group_size(args);
  for (int token = 0; token < item.num_tokens; ++token)
    for (int g = 0; g < group; ++g, queries += format.dim) {
      load_row(args.queries, item.first_token + token, item.kv_head * group + g, format.dim, queries);
      if (format.rotated) hadamard(queries, format.dim);
    }
}

// Dequantize the positions of the tile that `bits` names; all others become zeros.
void load_tile(const AttendArgs& args, const AttendItem& item, int start, uint64_t bits, Workspace& work) {
  const PageLayout& layout = args.layout;
  const int32_t* table = args.page_table + item.sequence * args.table_width;
  for (int t = 0; t < kTileTokens; ++t) {
    float* v_row = work.v_tile + int64_t(t) * work.width;
    if (!(bits >> t & 1)) {
      for (int d = 0; d < layout.k.dim; ++d) work.k_tile[d * kTileTokens + t] = 0;
      std::memset(v_row, 0, size_t(work.width) * 4);
      continue;
    }
    const uint8_t* base = args.pool + page_offset(layout, table, start + t, item.kv_head);
    const int offset = (start + t) & (layout.page_size - 1);
    dequantize_row(layout.k, k_codes(layout, base, offset), k_scale(layout, base, offset), work.row);
    for (int d = 0; d < layout.k.dim; ++d) work.k_tile[d * kTileTokens + t] = work.row[d];
    dequantize_row(layout.v, v_codes(layout, base, offset), v_scale(layout, base, offset), v_row);
    std::memset(v_row + layout.v.dim, 0, size_t(work.width - layout.v.dim) * 4);
  }
}

// scores[row][0..64) = queries[row] . K columns
template <int kRows>
void score_rows(const float* queries, int dim, const float* k_tile, float* scores) {
  for (int column = 0; column < kTileTokens; column += kColumns) {
    Vec sums[kRows][kVecBlock] = {};
    for (int d = 0; d < dim; ++d)
      for (int v = 0; v < kVecBlock; ++v) {
        const Vec keys = load(k_tile + d * kTileTokens + column + v * kLanes);
        for (int r = 0; r < kRows; ++r) sums[r][v] += keys * queries[r * dim + d];
      }
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVecBlock; ++v) store(scores + r * kTileTokens + column + v * kLanes, sums[r][v]);
  }
}

// accumulators[row] += probabilities[row] . V rows
template <int kRows>
void accumulate_rows(const float* probabilities, const float* v_tile, int width, float* accumulators) {
  for (int column = 0; column < width; column += kColumns) {
    Vec sums[kRows][kVecBlock];
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVecBlock; ++v) sums[r][v] = load(accumulators + r * width + column + v * kLanes);
    for (int t = 0; t < kTileTokens; ++t)
      for (int v = 0; v < kVecBlock; ++v) {
        const Vec values = load(v_tile + t * width + column + v * kLanes);
        for (int r = 0; r < kRows; ++r) sums[r][v] += values * probabilities[r * kTileTokens + t];
      }
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVecBlock; ++v) store(accumulators + r * width + column + v * kLanes, sums[r][v]);
  }
}

// Every row's attention over the item's tiles: accumulators, maxima and sums to `result`.
void attend_rows(const AttendArgs& args, const AttendItem& item, Workspace& work, float* result) {
  const int group = group_size(args), num_rows = item.num_tokens * group, k_dim = args.layout.k.dim;
  const int width = work.width;
  float* const maxima = result + int64_t(num_rows) * width;
  float* const sums = maxima + num_rows;
  std::fill(result, maxima, 0.0f);
  std::fill(maxima, sums, kLowest);
  std::fill(sums, sums + num_rows, 0.0f);
  load_queries(args, item, work.queries);

  const int position = row_position(args, item.sequence, item.first_token);
  const TileList tiles(args, position, position + item.num_tokens - 1);
  for (int tile = item.first_tile; tile < item.first_tile + item.num_tiles; ++tile) {
    const int start = tiles.start(tile);
    load_tile(args, item, start, tile_bits(tiles, start), work);
    const auto scores = [&](int row) { return work.scores + row * kTileTokens; };
    const auto accumulator = [&](int row) { return result + int64_t(row) * width; };
    const int blocked = num_rows / kRowBlock * kRowBlock;
    for (int row = 0; row < blocked; row += kRowBlock)
      score_rows<kRowBlock>(work.queries + row * k_dim, k_dim, work.k_tile, scores(row));
    for (int row = blocked; row < num_rows; ++row)
      score_rows<1>(work.queries + row * k_dim, k_dim, work.k_tile, scores(row));
    for (int row = 0; row < num_rows; ++row)
      soften_row(args, row_bits(args, start, position + row / group), scores(row), accumulator(row), width,
                 maxima[row], sums[row]);
    for (int row = 0; row < blocked; row += kRowBlock)
      accumulate_rows<kRowBlock>(scores(row), work.v_tile, width, accumulator(row));
    for (int row = blocked; row < num_rows; ++row)
      accumulate_rows<1>(scores(row), work.v_tile, width, accumulator(row));
  }
}

void merge(const AttendArgs& args, const MergeItem& item, const float* partials) {
  const int dim = args.layout.v.dim;
  const auto copy = [dim](const float* from, float* row) { std::copy(from, from + dim, row); };
  merge_partials(args, item, partials, accumulator_width(dim), copy);
}

void attend(const AttendArgs& args, const AttendItem& item, float* partials) {
  Workspace work(args, item);
  if (item.partial >= 0) return attend_rows(args, item, work, partials + item.partial);
  attend_rows(args, item, work, work.result);
  merge(args, {item.kv_head, item.first_token, item.num_tokens, 1, 0}, work.result);
}

}  // namespace

#if defined(__AVX512BF16__)
AttendKernel fast_attend_kernel(const AttendArgs& args);  // attention_avx512.cpp
#else
AttendKernel fast_attend_kernel(const AttendArgs&) { return {nullptr, nullptr, 0}; }
#endif

AttendKernel attend_kernel(const AttendArgs& args) {
  const AttendKernel fast = fast_attend_kernel(args);
  return fast.attend != nullptr ? fast : AttendKernel{attend, merge, accumulator_width(args.layout.v.dim)};
}

}  // namespace octavo::OCTAVO_ISA
