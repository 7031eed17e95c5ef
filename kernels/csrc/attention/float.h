// Key sides and value sides in float32, for every page format, head dimension and instruction set. Codes
// become floats either at each load (16-bit codes) or once per tile, in a panel.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "attention/ahead.h"
#include "attention/rows.h"
#include "attention/sides.h"
#include "pages/codes.h"
#include "runtime/vectors.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace octavo::OCTAVO_ISA {
namespace {

// A codec loads 16-bit codes or floats as vectors of floats. `load_pair` returns two vectors of a row's
// values [at, at + 2 * kLanes), in memory order or, with `kSplit`, even elements before odd ones. Queries and
// accumulators then have that order too.

constexpr int kStep = 2 * kLanes;  // values per load

struct Pair {
  Vec first, second;
};

struct FloatCodec {
  static constexpr bool kSplit = false;
  static constexpr int kBytes = 4;
  OCTAVO_INLINE Pair load_pair(const uint8_t* from) {
    const float* values = reinterpret_cast<const float*>(from);
    return {octavo::load(values), octavo::load(values + kLanes)};
  }
};

struct Bf16Codec {
  static constexpr bool kSplit = true;
  static constexpr int kBytes = 2;
  OCTAVO_INLINE Pair load_pair(const uint8_t* from) {
    IntVec both;
    std::memcpy(&both, from, sizeof both);  // rows may be unaligned
    return {(Vec)(both << 16), (Vec)(both & int32_t(0xffff0000))};
  }
};

#if defined(__F16C__)
struct Fp16Codec {
  static constexpr bool kSplit = false;
  static constexpr int kBytes = 2;
  OCTAVO_INLINE Vec load_vector(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
    typedef short Halves __attribute__((vector_size(16)));
    Vec to;
    for (int lane = 0; lane < kLanes; lane += 8) {
      Halves halves;
      std::memcpy(&halves, from + 2 * lane, 16);
      const auto eight = __builtin_ia32_vcvtph2ps256(halves);
      std::memcpy(reinterpret_cast<float*>(&to) + lane, &eight, 32);
    }
    return to;
#endif
  }
  OCTAVO_INLINE Pair load_pair(const uint8_t* from) {
    return {load_vector(from), load_vector(from + 2 * kLanes)};
  }
};
#endif

inline int padded_dim(int dim) { return (dim + kStep - 1) / kStep * kStep; }

// Converts a row to the order of a codec with kSplit, and back.
inline void split_row(float* row, int dim) {
  float split[kStep];
  for (int at = 0; at < dim; at += kStep) {
    for (int i = 0; i < kLanes; ++i) split[i] = row[at + 2 * i], split[kLanes + i] = row[at + 2 * i + 1];
    std::memcpy(row + at, split, sizeof split);
  }
}
inline void join_row(const float* row, int dim, float* to) {
  for (int at = 0; at < dim; at += kStep)
    for (int i = 0; i < kLanes; ++i) to[at + 2 * i] = row[at + i], to[at + 2 * i + 1] = row[at + kLanes + i];
}

constexpr int kDirectFloatRows = 32;  // most rows that convert codes at each load; more share a panel

// Adds neighbouring elements within each 128 bits: sums from a, then sums from b.
OCTAVO_INLINE Vec add_neighbours(Vec a, Vec b) {
  IntVec even, odd;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int from = lane / 4 * 4 + lane % 2 * 2 + (lane % 4 < 2 ? 0 : kLanes);
    even[lane] = from, odd[lane] = from + 1;
  }
  return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
}

// Sets to[i] to the sum of all lanes of sums[i].
OCTAVO_INLINE void reduce4(const Vec* sums, float (&to)[4]) {
  const Vec four = add_neighbours(add_neighbours(sums[0], sums[1]), add_neighbours(sums[2], sums[3]));
  for (int i = 0; i < 4; ++i) {
    float sum = four[i];
    for (int lane = i + 4; lane < kLanes; lane += 4) sum += four[lane];
    to[i] = sum;
  }
}

// Computes scores[row][key] for keys that are `stride` bytes apart; kRows * kKeys is 4 or 8.
template <class Codec, int kRows, int kKeys>
OCTAVO_INLINE void score_keys(const float* queries, int dim, const uint8_t* keys, int64_t stride,
                              float* scores) {
  Vec sums[kRows * kKeys] = {};
  for (int at = 0; at < dim; at += kStep) {
#pragma GCC unroll 4
    for (int key = 0; key < kKeys; ++key) {
      const Pair pair = Codec::load_pair(keys + key * stride + at * Codec::kBytes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        Vec& sum = sums[r * kKeys + key];
        sum += pair.first * octavo::load(queries + r * dim + at);
        sum += pair.second * octavo::load(queries + r * dim + at + kLanes);
      }
    }
  }
  for (int i = 0; i < kRows * kKeys; i += 4) {
    float four[4];
    reduce4(sums + i, four);
    for (int j = 0; j < 4; ++j) scores[(i + j) / kKeys * kTileTokens + (i + j) % kKeys] = four[j];
  }
}

// Adds weights[row][position] * values of 16 positions to accumulators[row], for kVecs vectors of dims.
template <class Codec, int kRows, int kVecs>
OCTAVO_INLINE void add_columns(const float* weights, const uint8_t* values, int64_t stride, int width,
                               int column, const Ahead* ahead, float* accumulators) {
  values += column * Codec::kBytes;
  accumulators += column;
  Vec sums[kRows][kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) sums[r][v] = octavo::load(accumulators + r * width + v * kLanes);
  for (int t = 0; t < 16; ++t) {
    if (ahead != nullptr)
      ahead->prefetch_part(column / (kVecs * kLanes) * 16 + t, width / (kVecs * kLanes) * 16);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; v += 2) {
      const Pair pair = Codec::load_pair(values + t * stride + v * kLanes * Codec::kBytes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const float weight = weights[r * kTileTokens + t];
        sums[r][v] += pair.first * weight;
        sums[r][v + 1] += pair.second * weight;
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) store(accumulators + r * width + v * kLanes, sums[r][v]);
}

template <class Codec, int kRows>
OCTAVO_INLINE void add_block(const float* weights, const uint8_t* values, int64_t stride, int width,
                             const Ahead* ahead, float* accumulators) {
  constexpr int kVecs = 8 / kRows;
  int column = 0;
  for (; column + kVecs * kLanes <= width; column += kVecs * kLanes)
    add_columns<Codec, kRows, kVecs>(weights, values, stride, width, column, ahead, accumulators);
  for (; column < width; column += kStep)
    add_columns<Codec, kRows, 2>(weights, values, stride, width, column, nullptr, accumulators);
}

// Returns the number of floats from one row of a panel to the next. Multiples of 2 KiB are avoided, because a
// block's rows would then share two L1 sets.
inline int panel_stride(int dim) {
  const int padded = padded_dim(dim);
  return padded % 512 == 0 ? padded + kStep : padded;
}

// Converts a block's rows to floats, with zeros past the dimension and for invisible rows, in the order of a
// codec with kSplit if `split`.
inline void expand_block(const RowFormat& format, const uint8_t* codes, const uint8_t* scales,
                         uint32_t visible, bool split, float* panel) {
  const int padded = padded_dim(format.dim), stride = panel_stride(format.dim);
  for (int t = 0; t < 16; ++t, panel += stride) {
    if (!(visible >> t & 1)) {
      std::fill(panel, panel + padded, 0.0f);
      continue;
    }
    dequantize_row(format, codes + t * format.row_bytes, scales + t * format.scale_bytes, panel);
    std::fill(panel + format.dim, panel + padded, 0.0f);
    if (split) split_row(panel, padded);
  }
}

// K and V stored as codes, multiplied in float32. For few rows, `Codec` converts the codes at each load. For
// many rows, or if `Codec` is void, a tile is first converted into a panel, which is a float32 copy of it.
template <class Codec>
struct FloatSides {
  static constexpr bool kDirect = !std::is_void_v<Codec>;
  using Reader = std::conditional_t<kDirect, Codec, FloatCodec>;
  static constexpr bool kSplit = Reader::kSplit;

  static bool direct(const RowFormat& format, int num_rows) {
    return kDirect && num_rows <= kDirectFloatRows && format.dim % kStep == 0;
  }

  static size_t query_bytes(int dim, int num_rows) { return size_t(num_rows) * padded_dim(dim) * 4; }
  static size_t key_panel_bytes(int dim) { return size_t(panel_stride(dim)) * 16 * 4; }
  static size_t value_panel_bytes(int dim, int) { return key_panel_bytes(dim); }

  static void load_queries(const AttendArgs& args, const AttendItem& item, void* memory) {
    const RowFormat& format = args.layout.k;
    const int num_rows = item.num_tokens * group_size(args), padded = padded_dim(format.dim);
    float* row = static_cast<float*>(memory);
    for (int r = 0; r < num_rows; ++r, row += padded) {
      load_query(args, item, r, row);
      std::fill(row + format.dim, row + padded, 0.0f);
      if (kSplit) split_row(row, padded);
    }
  }

  template <class From>
  static void score_block(const float* queries, int num_rows, int dim, const uint8_t* keys, int64_t stride,
                          const Ahead& ahead, float* scores) {
    for_rows(num_rows, [&](int row, auto rows) {
      constexpr int kKeys = rows() == 4 ? 2 : 4;
      for (int key = 0; key < 16; key += kKeys) {
        if (row == 0) ahead.prefetch_part(key / kKeys, 16 / kKeys);
        score_keys<From, rows(), kKeys>(queries + row * dim, dim, keys + key * stride, stride,
                                        scores + row * kTileTokens + key);
      }
    });
  }

  static void score(const PageLayout& layout, const Tile& tile, const void* memory, int num_rows, void* panel,
                    float* scores) {
    const RowFormat& format = layout.k;
    const int dim = padded_dim(format.dim);
    const float* queries = static_cast<const float*>(memory);
    for (int b = 0; b < kBlocks; ++b) {
      const Tile::Block& block = tile.blocks[b];
      if (block.base == nullptr) continue;
      const uint8_t* codes = k_codes(layout, block.base, block.offset);
      const Ahead ahead(layout, tile, b, kDistance);
      if (direct(format, num_rows)) {
        score_block<Reader>(queries, num_rows, dim, codes, format.row_bytes, ahead, scores + 16 * b);
        continue;
      }
      float* rows = static_cast<float*>(panel);
      expand_block(format, codes, k_scale(layout, block.base, block.offset), tile.mask(b), kSplit, rows);
      score_block<FloatCodec>(queries, num_rows, dim, reinterpret_cast<const uint8_t*>(rows),
                              panel_stride(format.dim) * 4, ahead, scores + 16 * b);
    }
  }

  template <class From>
  static void accumulate_block(const float* weights, int num_rows, int width, const uint8_t* values,
                               int64_t stride, const Ahead& ahead, float* accumulators) {
    for_rows(num_rows, [&](int row, auto rows) {
      add_block<From, rows()>(weights + row * kTileTokens, values, stride, width, row == 0 ? &ahead : nullptr,
                              accumulators + int64_t(row) * width);
    });
  }

  static void accumulate(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows,
                         void* panel, float* accumulators) {
    const RowFormat& format = layout.v;
    const int width = padded_dim(format.dim);
    for (int b = 0; b < kBlocks; ++b) {
      const Tile::Block& block = tile.blocks[b];
      if (block.base == nullptr) continue;
      const uint8_t* codes = v_codes(layout, block.base, block.offset);
      const Ahead ahead(layout, tile, kBlocks + b, kDistance);
      if (direct(format, num_rows) && tile.mask(b) == 0xffff) {
        accumulate_block<Reader>(weights + 16 * b, num_rows, width, codes, format.row_bytes, ahead,
                                 accumulators);
        continue;
      }
      float* rows = static_cast<float*>(panel);
      expand_block(format, codes, v_scale(layout, block.base, block.offset), tile.mask(b), kSplit, rows);
      accumulate_block<FloatCodec>(weights + 16 * b, num_rows, width, reinterpret_cast<const uint8_t*>(rows),
                                   panel_stride(format.dim) * 4, ahead, accumulators);
    }
  }

  static void to_natural(int dim, const float* accumulator, float* row) {
    if (kSplit) join_row(accumulator, padded_dim(dim), row);
    else std::copy(accumulator, accumulator + dim, row);
  }

  static constexpr KeySide keys = {query_bytes, key_panel_bytes, load_queries, score};
  static constexpr ValueSide values = {padded_dim, value_panel_bytes, accumulate, to_natural};
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
