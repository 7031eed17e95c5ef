// Key side and value side for bf16 pages and bf16 queries on CPUs with AMX tiles, also for latents (MLA),
// whose rows are both K and V. AMX adds products in another order than vector instructions. So even a single
// row uses AMX, and its result is bit-identical alone and in a chunk.
//
//   queries  [rows / 16][dim / 32][16 pairs of dims][16 rows][2]
//   V panel  [4 times 32 dims][2][32 pairs of positions][16 dims][2]
#include <algorithm>
#include <cstring>

#include "attention/rows.h"
#include "attention/sides_avx512.h"
#include "attention/tiles_amx.h"
#include "runtime/dispatch.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kRows = 16;        // of an AMX tile
constexpr int kStepValues = 32;  // dims, or positions, that one AMX instruction multiplies
constexpr int kTileValues = kRows * kStepValues;
constexpr int kPanelVectors = kTileTokens;  // vectors of 32 dims: two for each pair of positions
constexpr int kPanelParts = 4;              // parts of 32 dims that are loaded together

int padded_rows(int num_rows) { return (num_rows + kRows - 1) / kRows * kRows; }

size_t query_bytes(int dim, int num_rows) { return size_t(padded_rows(num_rows)) * dim * 2; }

void load_queries(const AttendArgs& args, const AttendItem& item, void* memory) {
  const int num_rows = item.num_tokens * group_size(args), dim = args.layout.k.dim;
  const int steps = dim / kStepValues;
  alignas(64) float row[kMaxDim];
  alignas(64) uint16_t rows[kRows][kMaxDim];
  uint16_t* to = static_cast<uint16_t*>(memory);
  for (int first = 0; first < num_rows; first += kRows) {
    for (int i = 0; i < kRows; ++i) {
      const int r = first + i;
      if (r >= num_rows) {
        std::memset(rows[i], 0, size_t(dim) * 2);
        continue;
      }
      load_query(args, item, r, row);
      round_to_bf16(row, dim, rows[i]);
    }
    for (int step = 0; step < steps; ++step, to += kTileValues) {
      __m512i lines[16];
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) lines[i] = _mm512_load_si512(rows[i] + step * kStepValues);
      transpose16(lines);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * kStepValues, lines[i]);
    }
  }
}

size_t key_panel_bytes(int) { return 0; }

void score(const PageLayout& layout, const Tile& tile, const void* queries, int num_rows, void*,
           float* scores) {
  amx::KeyBlocks keys{{}, {}, layout.k.row_bytes};
  uint32_t blocks = 0;
  const uint8_t* any = nullptr;
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block &block = tile.blocks[b], &next = tile.next[b];
    if (next.base != nullptr) keys.next[b] = k_codes(layout, next.base, next.offset);
    if (block.base == nullptr) continue;
    any = keys.rows[b] = k_codes(layout, block.base, block.offset);
    blocks |= 1u << b;
  }
  if (blocks == 0) return;
  for (const uint8_t*& rows : keys.rows)
    if (rows == nullptr) rows = any;
  amx::score_tile(keys, blocks, static_cast<const uint16_t*>(queries), layout.k.dim / kStepValues, num_rows,
                  scores);
}

// Returns the floats of an accumulator row. Multiples of 256 get padding, because all rows would otherwise
// share a few cache sets.
int width(int dim) { return dim % 256 == 0 ? dim + 16 : dim; }

size_t weight_bytes(int num_rows) { return size_t(padded_rows(num_rows)) * kTileTokens * 2; }

size_t value_panel_bytes(int, int num_rows) {
  return kPanelParts * kPanelVectors * sizeof(__m512i) + weight_bytes(num_rows);
}

// Addresses of the values in a tile's blocks, and which rows are visible. `next`: addresses in the next tile,
// for prefetching; null for latents, because the key side prefetches them.
struct Values {
  const uint8_t *rows[kBlocks], *next[kBlocks];
  uint32_t visible[kBlocks];
  int64_t row_bytes;
  uint32_t halves;  // halves of the tile with visible positions

  Values(const PageLayout& layout, const Tile& tile) : row_bytes(layout.v.row_bytes), halves(0) {
    for (int b = 0; b < kBlocks; ++b) {
      const Tile::Block &block = tile.blocks[b], &after = tile.next[b];
      const bool empty = block.base == nullptr;
      rows[b] = empty ? nullptr : v_codes(layout, block.base, block.offset);
      next[b] =
          after.base == nullptr || layout.v_codes == 0 ? nullptr : v_codes(layout, after.base, after.offset);
      visible[b] = empty ? 0 : tile.mask(b);
      halves |= uint32_t(!empty) << (b / 2);
    }
  }
};

// Interleaves 32 dims of two positions: a vector of even dims, then a vector of odd dims.
OCTAVO_INLINE void interleave(__m512i first, __m512i second, __m512i* to) {
  to[0] = _mm512_mask_blend_epi16(0xaaaaaaaa, first, _mm512_slli_epi32(second, 16));
  to[kTileTokens / 2] = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(first, 16), second);
}

// Loads panel parts [part, part + count), 32 dims each. In a half tile with only one visible block, the other
// block is loaded as zeros. Rows are read, and the next tile's rows prefetched, in memory order.
void load_columns(const Values& values, int part, int count, __m512i* panel) {
  const int64_t row_bytes = values.row_bytes;
  for (int b = 0; b < kBlocks; ++b) {
    if (!(values.halves >> (b / 2) & 1)) continue;
    const uint8_t* at = values.rows[b] + 64 * part;
    const uint8_t* next = values.next[b] == nullptr ? nullptr : values.next[b] + 64 * part;
    const uint32_t visible = values.visible[b];
    for (int pair = 0; pair < 8; ++pair) {
      // Invisible rows may contain NaN, and their weight of 0 would not remove it.
      const __mmask32 first_valid = visible >> (2 * pair) & 1 ? ~uint32_t(0) : 0;
      const __mmask32 second_valid = visible >> (2 * pair + 1) & 1 ? ~uint32_t(0) : 0;
      __m512i* to = panel + 8 * b + pair;
      for (int i = 0; i < count; ++i, to += kPanelVectors) {
        if (next != nullptr) {
          __builtin_prefetch(next + 64 * i, 0, 2);
          __builtin_prefetch(next + row_bytes + 64 * i, 0, 2);
        }
        interleave(_mm512_maskz_loadu_epi16(first_valid, at + 64 * i),
                   _mm512_maskz_loadu_epi16(second_valid, at + row_bytes + 64 * i), to);
      }
      at += 2 * row_bytes;
      if (next != nullptr) next += 2 * row_bytes;
    }
  }
}

void accumulate(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows, void* scratch,
                float* accumulators) {
  const int dim = layout.v.dim, parts = dim / kStepValues;
  __m512i* const panels = static_cast<__m512i*>(scratch);
  uint16_t* const rounded = reinterpret_cast<uint16_t*>(panels + kPanelParts * kPanelVectors);
  round_to_bf16(weights, num_rows * kTileTokens, rounded);
  const Values values(layout, tile);
  const int64_t stride = width(dim) * int64_t(sizeof(float));
  amx::WeightedSum sum(num_rows);
  for (int part = 0; part < parts; part += kPanelParts) {
    const int count = std::min(kPanelParts, parts - part);
    load_columns(values, part, count, panels);
    sum.add(rounded, reinterpret_cast<const uint16_t*>(panels), count, values.halves, stride,
            accumulators + part * kStepValues);
  }
}

constexpr int dim_of(int i) { return i % 16 * 2 + i / 16; }  // a vector of even dims, then one of odd dims

bool has_tiles(const AttendArgs& args, const RowFormat& format) {
  return isa() == Isa::amx && format.codes == CodeType::bf16 && args.queries.type == Float::bf16 &&
         format.dim % kStepValues == 0 && format.dim <= kMaxDim;
}

}  // namespace

static const KeySide bf16_tile_keys = {query_bytes, key_panel_bytes, load_queries, score};
static const ValueSide bf16_tile_values = {width, value_panel_bytes, accumulate,
                                           to_natural<kStepValues, dim_of>};

const KeySide* tiled_keys(const AttendArgs& args) {
  return has_tiles(args, args.layout.k) ? &bf16_tile_keys : nullptr;
}

const ValueSide* tiled_values(const AttendArgs& args) {
  return has_tiles(args, args.layout.v) ? &bf16_tile_values : nullptr;
}

}  // namespace octavo::OCTAVO_ISA
