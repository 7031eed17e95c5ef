// bf16 pages under bf16 queries where there are AMX tiles, latents (rows that are keys and values at once)
// included. However few rows there are: a row's sums must be the same in any batch.
//
//   queries  [rows / 16][dim / 32][16 pairs of dims][16 rows][2]
//   V panel  [dim / 16][32 pairs of positions][16 dims][2]
#include <algorithm>
#include <cstring>

#include "attention/ahead.h"
#include "attention/rows.h"
#include "attention/sides_avx512.h"
#include "attention/tiles_amx.h"
#include "runtime/dispatch.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kRows = 16;        // of a tile
constexpr int kStepValues = 32;  // dims, or positions, that a tile multiplies
constexpr int kTileValues = kRows * kStepValues;
constexpr int kDistance = 2;  // blocks between what is loaded and what is asked for

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

// Latents are V too, and their rows stand in one place.
bool values_apart(const PageLayout& layout) { return layout.v_codes != 0; }

size_t key_panel_bytes(int) { return 0; }

void score(const PageLayout& layout, const Tile& tile, const void* queries, int num_rows, void*,
           float* scores) {
  amx::KeyBlocks keys{{}, layout.k.row_bytes, {}};
  uint32_t blocks = 0;
  const uint8_t* any = nullptr;
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block& block = tile.blocks[b];
    if (block.base == nullptr) continue;
    any = keys.rows[b] = k_codes(layout, block.base, block.offset);
    blocks |= 1u << b;
  }
  if (blocks == 0) return;
  for (const uint8_t*& rows : keys.rows)
    if (rows == nullptr) rows = any;
  for (int b = 0; values_apart(layout) && b < kBlocks; ++b)
    keys.soon[b] = Ahead(layout, tile, b + kDistance).codes;
  amx::score_tile(keys, blocks, static_cast<const uint16_t*>(queries), layout.k.dim / kStepValues, num_rows,
                  scores);
}

// Rows of accumulators a little longer than a power of two: they would all fall into the same few sets of the
// cache.
int width(int dim) { return dim % 256 == 0 ? dim + 16 : dim; }

size_t weight_bytes(int num_rows) { return size_t(padded_rows(num_rows)) * kTileTokens * 2; }

size_t value_panel_bytes(int dim, int num_rows) {
  return size_t(dim) * kTileTokens * 2 + weight_bytes(num_rows);
}

// Lane 4 c + k of vectors 2 j and 2 j + 1 is dim 32 j + 8 c + k, and 4 more. A block of which nothing is
// visible becomes zeros where its half of the tile is multiplied.
void load_values(const PageLayout& layout, const Tile& tile, uint32_t halves, __m512i* panel) {
  const int64_t row_bytes = layout.v.row_bytes;
  for (int b = 0; b < kBlocks; ++b) {
    if (!(halves >> (b / 2) & 1)) continue;
    const Tile::Block& block = tile.blocks[b];
    const bool empty = block.base == nullptr;
    const uint8_t* from = empty ? nullptr : v_codes(layout, block.base, block.offset);
    const uint32_t visible = empty ? 0 : tile.mask(b);
    const Ahead ahead(layout, tile, values_apart(layout) ? kBlocks + b + kDistance : 2 * kBlocks + b);
    const int parts = int(row_bytes / 64);
    for (int part = 0; part < parts; ++part) {
      Ahead::ask(ahead, part, parts);
      __m512i* const even = panel + size_t(2 * part) * kTileTokens / 2 + 8 * b;
      __m512i* const odd = even + kTileTokens / 2;
#pragma GCC unroll 8
      for (int pair = 0; pair < 8; ++pair) {
        // What no row sees may be NaN, and 0 * NaN is not 0.
        const __mmask32 first_valid = visible >> (2 * pair) & 1 ? ~uint32_t(0) : 0;
        const __mmask32 second_valid = visible >> (2 * pair + 1) & 1 ? ~uint32_t(0) : 0;
        const uint8_t* at = from + 2 * pair * row_bytes + 64 * part;
        const __m512i first = _mm512_maskz_loadu_epi16(first_valid, at);
        const __m512i second = _mm512_maskz_loadu_epi16(second_valid, at + row_bytes);
        even[pair] = _mm512_unpacklo_epi16(first, second);
        odd[pair] = _mm512_unpackhi_epi16(first, second);
      }
    }
  }
}

void accumulate(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows, void* scratch,
                float* accumulators) {
  const int dim = layout.v.dim;
  uint32_t halves = 0;
  for (int b = 0; b < kBlocks; ++b) halves |= uint32_t(tile.blocks[b].base != nullptr) << (b / 2);
  uint16_t* const rounded = static_cast<uint16_t*>(scratch);
  for (int i = 0; i < num_rows * kTileTokens; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(rounded + i),
                        (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(weights + i)));
  __m512i* const panel = reinterpret_cast<__m512i*>(static_cast<uint8_t*>(scratch) + weight_bytes(num_rows));
  load_values(layout, tile, halves, panel);
  amx::add_tile(rounded, reinterpret_cast<const uint16_t*>(panel), halves, dim / 16, num_rows, width(dim),
                accumulators);
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
  return isa() == Isa::amx && format.codes == CodeType::bf16 && args.queries.type == Float::bf16 &&
         format.dim % kStepValues == 0 && format.dim <= kMaxDim;
}

}  // namespace

const KeySide* latent_keys(const AttendArgs& args) {
  return has_tiles(args, args.layout.k) ? &keys : nullptr;
}

const ValueSide* latent_values(const AttendArgs& args) {
  return has_tiles(args, args.layout.v) ? &values : nullptr;
}

}  // namespace octavo::OCTAVO_ISA
