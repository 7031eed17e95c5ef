// AVX-512: weights with one scale per output channel by VPDPBUSD. Unlike group scales, a channel's scale
// needs no float operations between the products. For many rows, 4-bit codes are widened to bytes once. Few
// rows multiply the 4-bit codes directly and multiply each group's sums by its factor.
#include "linear/channels_avx512.h"
#include "linear/integer_tiles_avx512.h"

namespace octavo::avx512 {
namespace {

// Inputs of a panel that a few row tiles multiply before the next inputs; their bytes stay in L1.
constexpr int kSharedInputs = 256;

// Fewest row tiles for which a whole panel of 4-bit codes is widened once, into L2.
constexpr int kWidenedTiles = 4 * kItemTiles;

// Most row tiles that multiply 4-bit codes directly (measured).
constexpr int kFewTiles = 2;

// Consecutive blocks of a panel, which every row tile multiplies in turn.
struct Blocks {
  const uint8_t* codes;
  std::size_t stride;  // bytes to the next block
  int count, inputs;   // number of blocks, and inputs of each block
  bool first;          // whether they are the panel's first blocks, so that sums start at zero
};

// Adds products with some blocks to sums[R][64]. Each step prefetches kLines lines of `ahead`.
template <int R, int kLines>
__attribute__((noinline)) void multiply_blocks(const int8_t* x, std::size_t x_stride, const Blocks& blocks,
                                               const uint8_t* ahead, int32_t* sums) {
  Sums<R> dots;
  if (blocks.first)
    unrolled<4 * R>([&](auto i)
                        __attribute__((always_inline)) { dots.at[i / 4][i % 4] = _mm512_setzero_si512(); });
  else
    unrolled<4 * R>([&](auto i) __attribute__((always_inline)) {
      dots.at[i / 4][i % 4] = _mm512_loadu_si512(sums + i / 4 * kPanel + i % 4 * 16);
    });
  const int inputs = blocks.inputs;
  for (int b = 0; b < blocks.count; ++b, x += x_stride) {
    const uint8_t* words = blocks.codes + blocks.stride * b;
    for (int m = 0; m < R; ++m) prefetch(reinterpret_cast<const uint8_t*>(x + x_stride + m * inputs));
    for (int k = 0; k < inputs; k += 4, words += 256, ahead += 64 * kLines) {
      __m512i codes[4];
      unrolled<4>([&](auto c) __attribute__((always_inline)) {
        codes[c] = _mm512_loadu_si512(words + 64 * c);
        if constexpr (c < kLines) fetch_weights(ahead + 64 * c);
      });
      add_words<R>(x + k, inputs, codes, dots);
    }
  }
  unrolled<4 * R>([&](auto i) __attribute__((always_inline)) {
    _mm512_storeu_si512(sums + i / 4 * kPanel + i % 4 * 16, dots.at[i / 4][i % 4]);
  });
}

// Factors that convert products with a group's 4-bit codes to products with channel integers, for 16 outputs.
struct Factors {
  explicit Factors(const uint8_t* from) : factor(spread16(from, 1)), start(spread16(from + kPanel, 1)) {}

  __m512i apply(__m512i dots, int32_t x_sum) const {
    return _mm512_add_epi32(_mm512_mullo_epi32(dots, factor),
                            _mm512_mullo_epi32(start, _mm512_set1_epi32(x_sum)));
  }

  __m512i factor, start;
};

// Adds products with a block of 4-bit codes to sums[R][64].
template <int R, int kLines>
__attribute__((noinline)) void multiply_factored(const int8_t* x, const int32_t* x_sums, int group,
                                                 const uint8_t* words, const uint8_t* factors,
                                                 const uint8_t* ahead, int32_t* sums) {
  Sums<R> dots;
  unrolled<4 * R>([&](auto i)
                      __attribute__((always_inline)) { dots.at[i / 4][i % 4] = _mm512_setzero_si512(); });
  add_group<R, 4, kLines>(x, group, group, words, ahead, dots);
  unrolled<4>([&](auto c) __attribute__((always_inline)) {
    const Factors of_group(factors + 16 * c);
    unrolled<R>([&](auto m) __attribute__((always_inline)) {
      int32_t* const to = sums + m * kPanel + 16 * c;
      const __m512i products = of_group.apply(dots.at[m][c], x_sums[m]);
      _mm512_storeu_si512(to, _mm512_add_epi32(_mm512_loadu_si512(to), products));
    });
  });
}

// Multiplies at most kFewTiles row tiles, of two rows or more, by a panel of 4-bit codes, block by block.
void multiply_few(const LinearCall& call, const ChannelRows& x, const RowTiles& tiles, int panel) {
  const PackedShape& shape = call.weight->shape;
  const uint8_t *block = call.weight->panel(panel), *factors = call.weight->factors(panel);
  const std::size_t ahead = bytes_ahead(shape, call.rows), fetched = shape.block_bytes();
  alignas(64) int32_t sums[kFewTiles * kTileRows * kPanel] = {};
  for (int g = 0; g < shape.num_groups(); ++g, block += shape.block_bytes(), factors += 2 * kPanel) {
    const Fetch fetch(block + ahead, fetched, tiles.count, shape.group / 8);
    const int32_t* const x_sums = x.sums + static_cast<std::size_t>(g) * call.rows;
    for (int tile = 0; tile < tiles.count; ++tile) {
      const int row = tiles.first(tile);
      with_rows<kTileRows, 2>(tiles.size(tile), [&](auto count) {
        fetch.for_tile(tile, [&](auto lines, const uint8_t* next) {
          multiply_factored<decltype(count)::value, decltype(lines)::value>(
              x.at(g, row), x_sums + row, shape.group, block, factors, next, sums + row * kPanel);
        });
      });
    }
  }
  finish_channels(call, x, panel, 0, call.rows, sums);
}

// Multiplies a single row by a panel of 4-bit codes, with sums in registers.
void multiply_factored_row(const LinearCall& call, const ChannelRows& x, int panel) {
  const PackedShape& shape = call.weight->shape;
  const uint8_t *block = call.weight->panel(panel), *factors = call.weight->factors(panel);
  const std::size_t ahead = bytes_ahead(shape, call.rows);
  __m512i sums[4];
  unrolled<4>([&](auto c) __attribute__((always_inline)) { sums[c] = _mm512_setzero_si512(); });
  for (int g = 0; g < shape.num_groups(); ++g, block += shape.block_bytes(), factors += 2 * kPanel) {
    const Sums<1> dots = dot_row<4>(x.at(g, 0), shape.group, block, ahead);
    unrolled<4>([&](auto c) __attribute__((always_inline)) {
      sums[c] = _mm512_add_epi32(sums[c], Factors(factors + 16 * c).apply(dots.at[0][c], x.sums[g]));
    });
  }
  alignas(64) int32_t results[kPanel];
  unrolled<4>([&](auto c) __attribute__((always_inline)) { _mm512_store_si512(results + 16 * c, sums[c]); });
  finish_channels(call, x, panel, 0, 1, results);
}

// Multiplies row tiles [first_tile, last_tile) by a panel, some blocks at a time. `bytes`: the whole panel as
// bytes; if null, the panel's 4-bit codes are widened block by block.
void multiply_panel(const LinearCall& call, const ChannelRows& x, const RowTiles& tiles, int panel,
                    int first_tile, int last_tile, const PanelBytes* bytes) {
  const PackedShape& shape = call.weight->shape;
  const int first = tiles.first(first_tile), rows = tiles.first(last_tile) - first,
            count = last_tile - first_tile, groups = shape.num_groups();
  const int shared = bytes != nullptr && count == 1 ? groups : kSharedInputs / shape.group;
  alignas(64) int32_t sums[kItemTiles * kTileRows * kPanel];
  alignas(64) uint8_t widened[kSharedInputs * kPanel];
  const std::size_t stride = shape.block_bytes(), wide = std::size_t{kPanel} * shape.group;
  // Several row tiles prefetch the blocks that they will share next (of widened panels, the next panel); a
  // single tile prefetches less far ahead.
  const std::size_t ahead = bytes != nullptr && shape.bits == 4 ? shape.panel_bytes()
                            : rows > kTileRows                  ? stride * shared
                                                                : bytes_ahead(shape, rows);
  for (int g = 0; g < groups; g += shared) {
    const int count = std::min(shared, groups - g);
    const uint8_t* const codes = call.weight->panel(panel) + stride * g;
    const Fetch fetch(codes + ahead, stride * count, last_tile - first_tile, count * shape.group / 4);
    for (int b = 0; b < count && bytes == nullptr; ++b)
      widen_factored(codes + stride * b, call.weight->factors(panel) + 2 * kPanel * (g + b), shape.group,
                     widened + wide * b);
    const Blocks blocks{bytes == nullptr ? widened : bytes->codes + bytes->stride * g,
                        bytes == nullptr ? wide : bytes->stride, count, shape.group, g == 0};
    for (int tile = first_tile; tile < last_tile; ++tile) {
      const int row = tiles.first(tile);
      with_rows<kTileRows>(tiles.size(tile), [&](auto R) {
        fetch.for_tile(tile - first_tile, [&](auto lines, const uint8_t* next) {
          multiply_blocks<decltype(R)::value, decltype(lines)::value>(x.at(g, row), x.block_stride(), blocks,
                                                                      next, sums + (row - first) * kPanel);
        });
      });
    }
  }
  finish_channels(call, x, panel, first, rows, sums);
}

// Multiplies row tiles [first_tile, last_tile) by a panel, some tiles at a time.
void multiply_item(const LinearCall& call, const ChannelRows& x, const RowTiles& tiles, int panel,
                   int first_tile, int last_tile) {
  const int count = last_tile - first_tile, parts = (count + kItemTiles - 1) / kItemTiles;
  if (call.weight->shape.bits == 4 && parts == 1)
    return multiply_panel(call, x, tiles, panel, first_tile, last_tile, nullptr);
  const std::size_t wide = std::size_t{kPanel} * call.weight->shape.inputs;
  const PanelBytes bytes = panel_bytes(*call.weight, panel, static_cast<uint8_t*>(thread_scratch(wide)));
  for (int part = 0; part < parts; ++part)
    multiply_panel(call, x, tiles, panel, first_tile + count * part / parts,
                   first_tile + count * (part + 1) / parts, &bytes);
}

}  // namespace

void linear_channels(const LinearCall& call) {
  const ChannelRows x = channel_rows(call);
  constexpr int kRows = 16;  // most rows per item: the scales of 16 rows share a cache line
  for_row_items(call.rows, kRows, [&](int first, int last) { quantize_channel_rows(call, x, first, last); });
  const RowTiles tiles(call.rows, kTileRows);
  const bool is_wide = call.weight->shape.bits == 8;
  for_items(call, tiles, is_wide ? kItemTiles : kWidenedTiles, [&](int panel, int first_tile, int last_tile) {
    if (!is_wide && call.rows == 1) multiply_factored_row(call, x, panel);
    else if (!is_wide && tiles.count <= kFewTiles) multiply_few(call, x, tiles, panel);
    else multiply_item(call, x, tiles, panel, first_tile, last_tile);
  });
}

}  // namespace octavo::avx512
