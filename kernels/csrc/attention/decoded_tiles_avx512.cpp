// Pages that become bf16 on their way to AMX tiles, under bf16 queries: mxfp4, fp16 and V of nvfp4. Over K of
// nvfp4 single rows would take too long. The rows of a tile are decoded into scratch, as if they lay in a
// bf16 page, and go through the sides of such pages (bf16_tiles_avx512.cpp): a row has the same bits in a
// chunk and alone.
//
// E2M1 times a scale of E4M3 or E8M0 has at most six significant bits, so bf16 holds it exactly (what is
// below 2^-126 is zero to a tile). fp16 has eleven significant bits: an upper part of eight and a lower one
// of three, both exact.
//   keys of fp16    [64 positions][dim][upper, lower]: each dim of a query stands twice
//   values of fp16  [64 positions][dim] upper ones, then the lower ones: added one after the other
#include <algorithm>
#include <cstring>

#include "attention/ahead.h"
#include "attention/decoded_halves_avx512.h"
#include "attention/decoded_rows_avx512.h"
#include "attention/rows.h"
#include "attention/sides_avx512.h"
#include "attention/tiles_amx.h"
#include "runtime/dispatch.h"
#include "runtime/unrolled.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kRows = 16;  // of a block

// Bytes from one decoded row to the next: in steps of a multiple of 512 the rows of a tile would share a few
// sets of the first-level cache.
int64_t decoded_stride(int values) { return 2 * values + (values % 256 == 0 ? 64 : 0); }

// The upper halves of floats, `even` in even words and `odd` in odd ones.
OCTAVO_INLINE __m512i upper_halves(__m512 even, __m512 odd) {
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(_mm512_castps_si512(even), 16),
                                 _mm512_castps_si512(odd));
}

// 16 floats that bf16 holds, twice.
OCTAVO_INLINE __m512i table_of(__m512 values) { return (__m512i)_mm512_cvtne2ps_pbh(values, values); }

// Bytes of two nibbles: each nibble kShift bits above the bottom of 16; other bits of these mean nothing.
template <int kShift>
OCTAVO_INLINE __m512i spread_nibbles(__m512i bytes) {
  return _mm512_madd_epi16(bytes, _mm512_set1_epi32(0x1001 << kShift));
}

// A block's rows as bf16, vector by vector: `decode` gives the next 32 dims.
template <class Code>
struct Decoder;

// A scale of E8M0, which is the exponent of a float, is added to those of bf16 numbers.
template <>
struct Decoder<Mxfp4> {
  alignas(64) uint32_t exponents[kRows * kMaxDim / kMxGroup];  // of each group, twice
  __m512i less_one;  // the codes' values by 2^-127, whose exponent is 0

  Decoder(const uint8_t* scales, int dim)
      : less_one(_mm512_add_epi16(table_of(_mm512_loadu_ps(kE2M1)), _mm512_set1_epi16(short(-(127 << 7))))) {
    for (int i = 0; i < kRows * dim / kMxGroup; i += 16) {
      const __m512i byte = _mm512_max_epi32(load_words(scales + i), _mm512_set1_epi32(1));
      _mm512_store_si512(exponents + i,
                         _mm512_or_si512(_mm512_slli_epi32(byte, 7), _mm512_slli_epi32(byte, 23)));
    }
  }
  __attribute__((always_inline)) __m512i decode(const uint8_t* codes, int vector) const {
    const __m512i table =
        _mm512_maskz_add_epi16(0xfefefefe, less_one, _mm512_set1_epi32(int32_t(exponents[vector])));
    return _mm512_permutexvar_epi16(spread_nibbles<0>(load_words(codes)), table);
  }
};

// Two groups: the number of a word in their table is twice its code, and one more in the second group. E2M1
// is 1 or 1.5 times a power of two, whose exponent is added to that of the scale, or of 1.5 times the scale.
template <>
struct Decoder<Nvfp4> {
  alignas(64) uint32_t scales[kRows * kMaxDim / kNvGroup / 2], larger[kRows * kMaxDim / kNvGroup / 2];
  __m512i exponents;

  Decoder(const uint8_t* from, int dim) {
    const __m512 more = _mm512_set1_ps(1.5f);
    for (int i = 0; i < kRows * dim / kNvGroup; i += 32) {
      const __m512 first = e4m3_floats(load_words(from + i)), second = e4m3_floats(load_words(from + i + 16));
      _mm512_store_si512(scales + i / 2, (__m512i)_mm512_cvtne2ps_pbh(second, first));
      _mm512_store_si512(larger + i / 2, (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(second, more),
                                                                      _mm512_mul_ps(first, more)));
    }
    alignas(64) uint32_t of_codes[16];
    for (int code = 0; code < 16; ++code) {
      constexpr int kExponents[8] = {0, -1, 0, 0, 1, 1, 2, 2};
      of_codes[code] =
          (((uint32_t(kExponents[code & 7]) << 7) + (uint32_t(code >> 3) << 15)) & 0xffff) * 0x10001;
    }
    exponents = _mm512_load_si512(of_codes);
  }
  __attribute__((always_inline)) __m512i decode(const uint8_t* codes, int vector) const {
    alignas(64) static constexpr int32_t kSecond[16] = {
        0, 0, 0, 0, 0, 0, 0, 0, 0x10001, 0x10001, 0x10001, 0x10001, 0x10001, 0x10001, 0x10001, 0x10001};
    const __m512i both = _mm512_mask_mov_epi32(_mm512_set1_epi32(int32_t(scales[vector])), 0xa8a8,
                                               _mm512_set1_epi32(int32_t(larger[vector])));
    const __m512i table = _mm512_maskz_add_epi16(0xfffcfffc, both, exponents);
    const __m512i spread = spread_nibbles<1>(load_words(codes));
    const __m512i index =
        _mm512_or_si512(_mm512_and_si512(spread, _mm512_set1_epi32(0x1e001e)), _mm512_load_si512(kSecond));
    return _mm512_permutexvar_epi16(index, table);
  }
};

constexpr bool splits(CodeType codes) { return codes == CodeType::fp16; }

// A block's rows as bf16, `stride` bytes apart.
template <class Code>
void decode_groups(const RowFormat& format, const uint8_t* codes, const uint8_t* scales, const Ahead& ahead,
                   uint8_t* to, int64_t stride) {
  const Decoder<Code> decoder(scales, format.dim);
  const int vectors = format.dim / kStepValues;
  for (int t = 0; t < kRows; ++t, to += stride, codes += format.row_bytes) {
    Ahead::prefetch_part(ahead, t, kRows);
    for (int v = 0; v < vectors; ++v)
      _mm512_storeu_si512(to + 64 * v, decoder.decode(codes + 16 * v, t * vectors + v));
  }
}

void split_keys(const RowFormat& format, const uint8_t* from, const Ahead& ahead, uint8_t* to,
                int64_t stride) {
  for (int t = 0; t < kRows; ++t, to += stride, from += format.row_bytes) {
    Ahead::prefetch_part(ahead, t, kRows);
    for (int d = 0; d < format.dim; d += 16) {
      const __m512 all = halves(from + 2 * d, 0xffff);
      _mm512_storeu_si512(to + 4 * d, upper_halves(all, _mm512_sub_ps(all, upper_part(all))));
    }
  }
}

// Dims 16 to 31 of 32 lie between the others: the sides of bf16 pages take the words apart, and have them in
// order then.
void split_values(const RowFormat& format, const uint8_t* from, const Ahead& ahead, uint8_t* to,
                  int64_t stride, int64_t lower) {
  for (int t = 0; t < kRows; ++t, to += stride, from += format.row_bytes) {
    Ahead::prefetch_part(ahead, t, kRows);
    for (int d = 0; d < format.dim; d += kStepValues) {
      const __m512 first = halves(from + 2 * d, 0xffff), second = halves(from + 2 * d + 32, 0xffff);
      _mm512_storeu_si512(to + 2 * d, upper_halves(first, second));
      _mm512_storeu_si512(to + lower + 2 * d, upper_halves(_mm512_sub_ps(first, upper_part(first)),
                                                           _mm512_sub_ps(second, upper_part(second))));
    }
  }
}

void decode(const RowFormat& format, const uint8_t* codes, const uint8_t* scales, const Ahead& ahead,
            uint8_t* to, int64_t stride) {
  if (format.codes == CodeType::mxfp4) decode_groups<Mxfp4>(format, codes, scales, ahead, to, stride);
  else decode_groups<Nvfp4>(format, codes, scales, ahead, to, stride);
}

// The tile as it lies once it is decoded at `rows`, and the layout of that.
Tile decoded_tile(const Tile& tile, const uint8_t* rows, int64_t stride) {
  Tile decoded{};
  decoded.bits = tile.bits;
  for (int b = 0; b < kBlocks; ++b)
    decoded.blocks[b] = {tile.blocks[b].base == nullptr ? nullptr : rows + b * kRows * stride, 0};
  return decoded;
}
PageLayout decoded_layout(int values, int64_t stride) {
  PageLayout layout{};
  layout.k = layout.v = {CodeType::bf16, values, false, stride, 0};
  return layout;
}

// ---- keys ----

// Behind the queries of tiles those of a few rows, [row][dim]. `values`: of a row of keys.
const float* few_queries(const void* queries, int values, int num_rows) {
  return reinterpret_cast<const float*>(static_cast<const uint8_t*>(queries) +
                                        bf16_tile_keys.query_bytes(values, num_rows));
}

template <int kTimes>
size_t query_bytes(int dim, int num_rows) {
  return bf16_tile_keys.query_bytes(kTimes * dim, num_rows) +
         (num_rows <= kDirectRows ? size_t(num_rows) * dim * sizeof(float) : 0);
}

template <int kTimes>
void load_queries(const AttendArgs& args, const AttendItem& item, void* queries) {
  (kTimes == 1 ? bf16_tile_keys : bf16_tile_keys_twice).load_queries(args, item, queries);
  const int num_rows = item.num_tokens * group_size(args), dim = args.layout.k.dim;
  if (num_rows > kDirectRows) return;
  const uint16_t* const tiles = static_cast<const uint16_t*>(queries);
  float* to = const_cast<float*>(few_queries(queries, kTimes * dim, num_rows));
  for (int row = 0; row < num_rows; ++row)
    for (int d = 0; d < dim; ++d) {
      const int at = kTimes * d;
      *to++ = bf16_to_float(tiles[at / 2 * kStepValues + 2 * row + at % 2]);
    }
}

template <bool kSplits>
size_t key_panel_bytes(int dim) {
  return size_t(decoded_stride(kSplits ? 2 * dim : dim)) * kTileTokens;
}

// A few rows without a panel.
void score_directly(const PageLayout& layout, const Tile& tile, const float* queries, int num_rows,
                    float* scores) {
  with_rows<kDirectRows>(num_rows, [&](auto count) {
    constexpr int kCount = decltype(count)::value;
    if (layout.k.codes == CodeType::mxfp4) score_codes<Mxfp4, kCount>(layout, tile, queries, scores);
    else score_halves<kCount>(layout, tile, queries, scores);
  });
}

template <bool kSplits>
void score(const PageLayout& layout, const Tile& tile, const void* queries, int num_rows, void* panel,
           float* scores) {
  const RowFormat& format = layout.k;
  const int values = kSplits ? 2 * format.dim : format.dim;
  if (num_rows <= kDirectRows)
    return score_directly(layout, tile, few_queries(queries, values, num_rows), num_rows, scores);
  const int64_t stride = decoded_stride(values);
  amx::KeyBlocks decoded{{}, {}, stride};
  uint32_t blocks = 0;
  for (int b = 0; b < kBlocks; ++b) {
    uint8_t* const to = static_cast<uint8_t*>(panel) + b * kRows * stride;
    decoded.rows[b] = to;
    const auto [base, offset] = tile.blocks[b];
    if (base == nullptr) continue;
    blocks |= 1u << b;
    const Ahead ahead(layout, tile, b + 2 * kBlocks);
    const uint8_t* const codes = k_codes(layout, base, offset);
    if (const Tile::Block& next = tile.next[b]; next.base != nullptr)
      prefetch(k_scale(layout, next.base, next.offset), kRows * format.scale_bytes);
    if constexpr (kSplits) split_keys(format, codes, ahead, to, stride);
    else decode(format, codes, k_scale(layout, base, offset), ahead, to, stride);
  }
  if (blocks == 0) return;
  amx::score_tile(decoded, blocks, static_cast<const uint16_t*>(queries), values / kStepValues, num_rows,
                  scores);
}

// ---- values ----

template <bool kSplits>
size_t decoded_bytes(int dim) {
  return size_t(decoded_stride(dim)) * kTileTokens * (kSplits ? 2 : 1);
}

template <bool kSplits>
size_t value_panel_bytes(int dim, int num_rows) {
  return decoded_bytes<kSplits>(dim) + bf16_tile_values.panel_bytes(dim, num_rows);
}

// A few rows without a panel.
template <class Code>
void accumulate_rows(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows,
                     int width, float* accumulators) {
  const int parts = layout.v.dim / kStepValues;
  const auto add = [&]<int kCount, int kParts>() {
    accumulate_codes<Code, kCount, kParts>(layout, tile, weights, width, accumulators);
  };
  if (num_rows == 1 && parts % 4 == 0) return add.template operator()<1, 4>();
  if (num_rows == 2 && parts % 2 == 0) return add.template operator()<2, 2>();
  with_rows<kDirectRows>(num_rows, [&](auto count) { add.template operator()<decltype(count)::value, 1>(); });
}

void accumulate_directly(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows,
                         float* accumulators) {
  const int width = bf16_tile_values.width(layout.v.dim);
  alignas(64) float rounded[kDirectRows * kTileTokens];
  for (int i = 0; i < num_rows * kTileTokens; i += 16) {
    const __m256i words = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(weights + i));
    _mm512_store_si512(rounded + i, _mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
  }
  for (const auto& [base, offset] : tile.next)
    if (base != nullptr) prefetch(v_scale(layout, base, offset), kRows * layout.v.scale_bytes);
  switch (layout.v.codes) {
    case CodeType::mxfp4: return accumulate_rows<Mxfp4>(layout, tile, rounded, num_rows, width, accumulators);
    case CodeType::nvfp4: return accumulate_rows<Nvfp4>(layout, tile, rounded, num_rows, width, accumulators);
    default: break;
  }
  for_pairs_of_rows(num_rows, [&]<int kCount>(int row) {
    accumulate_halves<kCount, 2 / kCount>(layout, tile, rounded + row * kTileTokens, width, row == 0,
                                          accumulators + row * width);
  });
}

template <bool kSplits>
void accumulate(const PageLayout& layout, const Tile& tile, const float* weights, int num_rows, void* memory,
                float* accumulators) {
  if (num_rows <= kDirectRows) return accumulate_directly(layout, tile, weights, num_rows, accumulators);
  const RowFormat& format = layout.v;
  const int64_t stride = decoded_stride(format.dim), lower = stride * kTileTokens;
  uint8_t* const rows = static_cast<uint8_t*>(memory);
  for (int b = 0; b < kBlocks; ++b) {
    const auto [base, offset] = tile.blocks[b];
    if (base == nullptr) continue;
    const Ahead ahead(layout, tile, b + 3 * kBlocks);
    const uint8_t* const codes = v_codes(layout, base, offset);
    uint8_t* const to = rows + b * kRows * stride;
    if (const Tile::Block& next = tile.next[b]; next.base != nullptr)
      prefetch(v_scale(layout, next.base, next.offset), kRows * format.scale_bytes);
    if constexpr (kSplits) split_values(format, codes, ahead, to, stride, lower);
    else decode(format, codes, v_scale(layout, base, offset), ahead, to, stride);
  }
  const PageLayout decoded = decoded_layout(format.dim, stride);
  void* const panel = rows + decoded_bytes<kSplits>(format.dim);
  const auto add = [&](const Tile& part) {
    bf16_tile_values.accumulate(decoded, part, weights, num_rows, panel, accumulators);
  };
  if constexpr (!kSplits) return add(decoded_tile(tile, rows, stride));
  for (int half = 0; half < 2; ++half) {
    Tile upper_values = decoded_tile(tile, rows, stride),
         lower_values = decoded_tile(tile, rows + lower, stride);
    for (int b = 2 - 2 * half; b < 4 - 2 * half; ++b)
      upper_values.blocks[b].base = lower_values.blocks[b].base = nullptr;
    add(upper_values);
    add(lower_values);
  }
}

int width(int dim) { return bf16_tile_values.width(dim); }
void to_natural(int dim, const float* accumulator, float* row) {
  bf16_tile_values.to_natural(dim, accumulator, row);
}
void as_it_lies(int dim, const float* accumulator, float* row) {
  std::memcpy(row, accumulator, sizeof(float) * size_t(dim));
}

const KeySide keys = {query_bytes<1>, key_panel_bytes<false>, load_queries<1>, score<false>};
const KeySide split_key_side = {query_bytes<2>, key_panel_bytes<true>, load_queries<2>, score<true>};
const ValueSide values = {width, value_panel_bytes<false>, accumulate<false>, to_natural};
const ValueSide split_value_side = {width, value_panel_bytes<true>, accumulate<true>, as_it_lies};

// Whether the bytes of a row become bf16 is a matter of its format and its model, never of the rows beside
// it. Codes of 4 bits do where that was measured to cost single rows little (on a Granite Rapids): under few
// query heads of a KV head.
bool is_decoded(const AttendArgs& args, const RowFormat& format) {
  const int most = splits(format.codes) ? kMaxDim / 2 : kMaxDim;
  return isa() == Isa::amx && !args.exact && args.queries.type == Float::bf16 &&
         format.dim % kStepValues == 0 && format.dim <= most &&
         (splits(format.codes) || (!args.rotary && group_size(args) <= kDirectRows));
}

}  // namespace

const KeySide* decoded_keys(const AttendArgs& args) {
  const RowFormat& format = args.layout.k;
  if (!is_decoded(args, format)) return nullptr;
  switch (format.codes) {
    case CodeType::mxfp4: return &keys;
    case CodeType::fp16: return &split_key_side;
    default: return nullptr;
  }
}

const ValueSide* decoded_values(const AttendArgs& args) {
  const RowFormat& format = args.layout.v;
  if (!is_decoded(args, format)) return nullptr;
  switch (format.codes) {
    case CodeType::mxfp4:
    case CodeType::nvfp4: return &values;
    case CodeType::fp16: return &split_value_side;
    default: return nullptr;
  }
}

}  // namespace octavo::OCTAVO_ISA
