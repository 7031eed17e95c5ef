// AVX-512: bf16 weights by VDPBF16PS (rows together, where that is slow, by what has its bits), affine ones
// of 8 and 4 bits by VPDPBUSD.
#include "linear/integer_tiles_avx512.h"

namespace octavo::avx512 {
namespace {

// Rows for which 4-bit codes are spread to bytes first, as measured: that costs as much as the products of
// some rows, while each register tile of its own spreads them beside its products.
constexpr int kWidenedRows = 19;

inline void load_parameters(const PackedShape& shape, const uint8_t* from, Parameters& out) {
  for (int n = 0; n < kPanel; n += 16) {
    _mm512_store_ps(out.scale + n, load16(from, shape.scale_type, n));
    _mm512_store_ps(out.bias + n, load16(from, shape.scale_type, kPanel + n));
  }
}

// 4-bit codes of a group as bytes.
inline void widen_codes(const uint8_t* words, int group, uint8_t* to) {
  const __m512i low_half = _mm512_set1_epi8(15);
  for (int k = 0; k < group; k += 8, words += 256, to += 512)
    for (int n = 0; n < 256; n += 64) {
      const __m512i codes = _mm512_loadu_si512(words + n);
      _mm512_store_si512(to + n, _mm512_and_si512(codes, low_half));
      _mm512_store_si512(to + 256 + n, _mm512_and_si512(_mm512_srli_epi16(codes, 4), low_half));
    }
}

// sums[R][64] += one group of R rows.
template <int R, int kBits, int kLines>
__attribute__((noinline)) void multiply_group(const GroupRows& x, int group, const uint8_t* words,
                                              const uint8_t* ahead, const Parameters& parameters,
                                              float* sums) {
  for (int m = 0; m < R; ++m) prefetch(reinterpret_cast<const uint8_t*>(x.next + m * group));
  Sums<R> dots;
  dot_group<R, kBits, kLines>(x.codes, group, group, words, ahead, dots);
  unrolled<4>([&](auto c) __attribute__((always_inline)) {
    const __m512 scale = _mm512_load_ps(parameters.scale + 16 * c),
                 bias = _mm512_load_ps(parameters.bias + 16 * c);
    unrolled<R>([&](auto m) __attribute__((always_inline)) {
      add_products(dots.at[m][c], scale, bias, x.scales[m], x.code_sums[m], sums + m * kPanel + 16 * c);
    });
  });
}

// Row tiles [first_tile, last_tile) of a panel: a group of it at a time for all of them.
template <int kBits>
void multiply_int8(const LinearCall& call, const Int8Rows& x, const RowTiles& tiles, int panel,
                   int first_tile, int last_tile) {
  const PackedShape& shape = call.weight->shape;
  const int first = tiles.first(first_tile), rows = tiles.first(last_tile) - first,
            groups = shape.num_groups();
  alignas(64) float sums[kItemTiles * kTileRows * kPanel];
  alignas(64) uint8_t bytes[kBits == 4 ? 128 * kPanel : 1];
  std::memset(sums, 0, sizeof(float) * kPanel * rows);
  const uint8_t* block = call.weight->panel(panel);
  const bool widened = kBits == 4 && rows >= kWidenedRows;
  const int steps = shape.group * (widened ? 8 : kBits) / 32;
  const std::size_t ahead = bytes_ahead(shape, rows), fetched = shape.block_bytes();
  for (int g = 0; g < groups; ++g, block += shape.block_bytes()) {
    Parameters parameters;
    load_parameters(shape, block + shape.code_bytes(), parameters);
    if (widened) widen_codes(block, shape.group, bytes);
    const Fetch fetch(block + ahead, fetched, last_tile - first_tile, steps);
    for (int tile = first_tile; tile < last_tile; ++tile) {
      const int row = tiles.first(tile);
      const std::size_t i = static_cast<std::size_t>(g) * call.rows + row;
      const int8_t* const codes = x.codes + i * shape.group;
      const GroupRows in{codes, codes + static_cast<std::size_t>(call.rows) * shape.group, x.scales + i,
                         x.code_sums + i};
      float* const to = sums + (row - first) * kPanel;
      with_rows<kTileRows>(tiles.size(tile), [&](auto count) {
        fetch.for_tile(tile - first_tile, [&](auto lines, const uint8_t* next) {
          constexpr int R = decltype(count)::value, kLines = decltype(lines)::value;
          if (widened) multiply_group<R, 8, kLines>(in, shape.group, bytes, next, parameters, to);
          else multiply_group<R, kBits, kLines>(in, shape.group, block, next, parameters, to);
        });
      });
    }
  }
  finish_rows(call, panel, first, rows, sums);
}

// A single row of a panel. Its sums stay in registers, and its scales are taken where they lie: by way of
// memory, a call for each group, a Zen 4 takes up to 1.4 times as long.
template <int kBits, Float kType>
void multiply_row(const LinearCall& call, const Int8Rows& x, int panel) {
  const PackedShape& shape = call.weight->shape;
  const uint8_t* block = call.weight->panel(panel);
  // Not whole blocks on a Zen 4, where they take 2 to 5 % longer in 8 bits; elsewhere that was not measured.
  const std::size_t ahead = kCore == Core::zen4 ? row_ahead(kBits) : bytes_ahead(shape, call.rows);
  const int8_t* codes = x.codes;
  __m512 sums[4];
  unrolled<4>([&](auto c) __attribute__((always_inline)) { sums[c] = _mm512_setzero_ps(); });
  for (int g = 0; g < shape.num_groups(); ++g, codes += shape.group, block += shape.block_bytes()) {
    __m512i dots[4];
    dot_row<kBits>(codes, shape.group, block, ahead, dots);
    const uint8_t* const parameters = block + shape.code_bytes();
    unrolled<4>([&](auto c) __attribute__((always_inline)) {
      const __m512 scale = load16(parameters, kType, 16 * c);
      const __m512 bias = load16(parameters, kType, kPanel + 16 * c);
      sums[c] = plus_products(dots[c], scale, bias, x.scales[g], x.code_sums[g], sums[c]);
    });
    for (std::size_t at = shape.code_bytes(); ahead > 0 && at < shape.block_bytes(); at += 64)
      fetch_weights(block + ahead + at);
  }
  alignas(64) float results[kPanel];
  unrolled<4>([&](auto c) __attribute__((always_inline)) { _mm512_store_ps(results + 16 * c, sums[c]); });
  finish_rows(call, panel, 0, 1, results);
}

template <int kBits>
void multiply_rows(const LinearCall& call, const Int8Rows& x, const RowTiles& tiles) {
  if (call.rows > 1)
    return for_items(call, tiles, kItemTiles, [&](int panel, int first_tile, int last_tile) {
      multiply_int8<kBits>(call, x, tiles, panel, first_tile, last_tile);
    });
  for_items(call, tiles, 1, [&](int panel, int, int) {
    switch (call.weight->shape.scale_type) {
      case Float::bf16: return multiply_row<kBits, Float::bf16>(call, x, panel);
      case Float::f16: return multiply_row<kBits, Float::f16>(call, x, panel);
      case Float::f32: return multiply_row<kBits, Float::f32>(call, x, panel);
    }
  });
}

}  // namespace

void linear_int8(const LinearCall& call) {
  const Int8Rows x = quantize_rows<true>(call, call.weight->shape.group);
  const RowTiles tiles(call.rows, kTileRows);
  if (call.weight->shape.bits == 4) multiply_rows<4>(call, x, tiles);
  else multiply_rows<8>(call, x, tiles);
}

}  // namespace octavo::avx512
