// bf16 latents under bf16 queries where there are AMX tiles: the sides of calls in which all query heads
// share one row of a page, for keys and for values.
//
//   queries  [rows / 16][dim / 32][16 pairs of dims][16 rows][2]
//   V panel  [2][32 pairs of positions][16 dims][2], of 32 dims: while one is multiplied, the next is made
#include <algorithm>
#include <cstring>

#include "attention/rows.h"
#include "attention/sides_avx512.h"
#include "attention/tiles_amx.h"
#include "runtime/dispatch.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kRows = 16;        // of a tile
constexpr int kStepValues = 32;  // dims, or positions, that a tile multiplies
constexpr int kTileValues = kRows * kStepValues;
constexpr int kPanelVectors = kTileTokens;  // of 32 dims: pairs of positions, two vectors each

int padded_rows(int num_rows) { return (num_rows + kRows - 1) / kRows * kRows; }

size_t query_bytes(int dim, int num_rows) { return size_t(padded_rows(num_rows)) * dim * 2; }

void load_queries(const AttendArgs& args, const AttendItem& item, void* memory) {
  const int group = group_size(args), num_rows = item.num_tokens * group, dim = args.layout.k.dim;
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
      load_row(args.queries, item.first_token + r / group, item.kv_head * group + r % group, dim, row);
      for (int d = 0; d < dim; d += 16)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows[i] + d),
                            (__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(row + d)));
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

// Rows of accumulators a little longer than a power of two: they would all fall into the same few sets of the
// cache.
int width(int dim) { return dim % 256 == 0 ? dim + 16 : dim; }

size_t weight_bytes(int num_rows) { return size_t(padded_rows(num_rows)) * kTileTokens * 2; }

size_t value_panel_bytes(int, int num_rows) {
  return 2 * kPanelVectors * sizeof(__m512i) + weight_bytes(num_rows);
}

// Where the values of a tile's blocks lie, and which of a block's rows any row sees.
struct Values {
  const uint8_t* rows[kBlocks];
  uint32_t visible[kBlocks];
  int64_t row_bytes;
  uint32_t halves;  // in which halves of the tile there are any

  Values(const PageLayout& layout, const Tile& tile) : row_bytes(layout.v.row_bytes), halves(0) {
    for (int b = 0; b < kBlocks; ++b) {
      const Tile::Block& block = tile.blocks[b];
      const bool empty = block.base == nullptr;
      rows[b] = empty ? nullptr : v_codes(layout, block.base, block.offset);
      visible[b] = empty ? 0 : tile.mask(b);
      halves |= uint32_t(!empty) << (b / 2);
    }
  }
};

// Dims [32 * part, 32 * part + 32) of two positions, next to each other. Lane 4 c + k of the two vectors is
// dim 8 c + k, and 4 more.
OCTAVO_INLINE void store_pair(__m512i first, __m512i second, __m512i* to) {
  to[0] = _mm512_unpacklo_epi16(first, second);
  to[kTileTokens / 2] = _mm512_unpackhi_epi16(first, second);
}

// The panel of these dims. A block of which nothing is visible becomes zeros where its half is multiplied.
void load_columns(const Values& values, int part, __m512i* panel) {
  const int64_t row_bytes = values.row_bytes;
  for (int b = 0; b < kBlocks; ++b) {
    if (!(values.halves >> (b / 2) & 1)) continue;
    const uint8_t* from = values.rows[b] + 64 * part;
    const uint32_t visible = values.visible[b];
    __m512i* const to = panel + 8 * b;
    if (visible == 0xffff) {
#pragma GCC unroll 8
      for (int pair = 0; pair < 8; ++pair) {
        const uint8_t* at = from + 2 * pair * row_bytes;
        store_pair(_mm512_loadu_si512(at), _mm512_loadu_si512(at + row_bytes), to + pair);
      }
      continue;
    }
    for (int pair = 0; pair < 8; ++pair) {
      // What no row sees may be NaN, and 0 * NaN is not 0.
      const __mmask32 first_valid = visible >> (2 * pair) & 1 ? ~uint32_t(0) : 0;
      const __mmask32 second_valid = visible >> (2 * pair + 1) & 1 ? ~uint32_t(0) : 0;
      const uint8_t* at = from + 2 * pair * row_bytes;
      store_pair(_mm512_maskz_loadu_epi16(first_valid, at),
                 _mm512_maskz_loadu_epi16(second_valid, at + row_bytes), to + pair);
    }
  }
}

void accumulate(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows, void* scratch,
                float* accumulators) {
  const int dim = layout.v.dim, parts = dim / kStepValues;
  const int64_t stride = width(dim) * int64_t(sizeof(float));
  __m512i* const panels = static_cast<__m512i*>(scratch);
  uint16_t* const rounded = reinterpret_cast<uint16_t*>(panels + 2 * kPanelVectors);
  for (int i = 0; i < num_rows * kTileTokens; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(rounded + i),
                        (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(weights + i)));
  const Values values(layout, tile);
  amx::WeightedSum sum(num_rows);
  load_columns(values, 0, panels);
  for (int part = 0; part < parts; ++part) {
    if (part + 1 < parts) load_columns(values, part + 1, panels + (part + 1) % 2 * kPanelVectors);
    sum.add(rounded, reinterpret_cast<const uint16_t*>(panels + part % 2 * kPanelVectors), values.halves,
            stride, accumulators + part * kStepValues);
  }
}

void to_natural(int dim, const float* accumulator, float* row) {
  for (int to = 0; to < dim; to += 4) {
    const int chunk = to % 32 / 8, half = to / 4 % 2;
    std::memcpy(row + to, accumulator + to / 32 * 32 + half * 16 + 4 * chunk, 16);
  }
}

const KeySide keys = {query_bytes, key_panel_bytes, load_queries, score};
const ValueSide values = {width, value_panel_bytes, accumulate, to_natural};

bool has_tiles(const AttendArgs& args, const RowFormat& format) {
  return args.rotary && isa() == Isa::amx && format.codes == CodeType::bf16 &&
         args.queries.type == Float::bf16 && format.dim % kStepValues == 0 && format.dim <= kMaxDim;
}

}  // namespace

const KeySide* latent_keys(const AttendArgs& args) {
  return has_tiles(args, args.layout.k) ? &keys : nullptr;
}

const ValueSide* latent_values(const AttendArgs& args) {
  return has_tiles(args, args.layout.v) ? &values : nullptr;
}

}  // namespace octavo::OCTAVO_ISA
