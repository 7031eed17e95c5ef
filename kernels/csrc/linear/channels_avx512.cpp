// AVX-512: 8-bit weights of one scale per output channel by VPDPBUSD. No float operation stands among the
// products, which is what groups of weights with scales of their own cost.
#include "linear/channels_avx512.h"
#include "linear/integer_tiles_avx512.h"

namespace octavo::avx512 {
namespace {

// Blocks of a panel that stay in the first cache while all row tiles of an item pass.
constexpr int kSharedBlocks = 4;

// Rows for which weights are asked for ahead: one or two wait for memory alone.
constexpr int kFetchedRows = 3;

// Some blocks of a panel, as row tiles meet them.
struct Blocks {
  const uint8_t* codes;
  std::size_t stride;  // bytes from block to block
  int count, inputs;   // `inputs` of each
  bool first;          // of the panel: sums start at zero
};

// sums[R][64] += products of some blocks; each step asks for kLines of `ahead`.
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
        if constexpr (c < kLines) prefetch(ahead + 64 * c);
      });
      add_words<R>(x + k, inputs, codes, dots);
    }
  }
  unrolled<4 * R>([&](auto i) __attribute__((always_inline)) {
    _mm512_storeu_si512(sums + i / 4 * kPanel + i % 4 * 16, dots.at[i / 4][i % 4]);
  });
}

// Row tiles [first_tile, last_tile) of a panel: some blocks of it at a time for all of them.
void multiply_panel(const LinearCall& call, const ChannelRows& x, const RowTiles& tiles, int panel,
                    int first_tile, int last_tile) {
  const PackedShape& shape = call.weight->shape;
  const int first = tiles.first(first_tile), rows = tiles.first(last_tile) - first,
            groups = shape.num_groups();
  const int shared = last_tile - first_tile == 1 ? groups : kSharedBlocks;
  alignas(64) int32_t sums[kItemTiles * kTileRows * kPanel];
  const uint8_t* const codes = call.weight->panel(panel);
  const std::size_t stride = shape.block_bytes();
  for (int g = 0; g < groups; g += shared) {
    const Blocks blocks{codes + stride * g, stride, std::min(shared, groups - g), shape.group, g == 0};
    // What several tiles share is asked for before they come to it; what one reads once, not so far ahead.
    const std::size_t ahead = rows > kTileRows ? stride * shared : bytes_ahead(shape);
    const Fetch fetch(blocks.codes + ahead, rows < kFetchedRows ? 0 : stride * blocks.count,
                      last_tile - first_tile, blocks.count * shape.group / 4);
    for (int tile = first_tile; tile < last_tile; ++tile) {
      const int row = tiles.first(tile);
      with_rows<kTileRows>(tiles.size(tile), [&](auto count) {
        fetch.for_tile(tile - first_tile, [&](auto lines, const uint8_t* next) {
          multiply_blocks<decltype(count)::value, decltype(lines)::value>(
              x.at(g, row), x.block_stride(), blocks, next, sums + (row - first) * kPanel);
        });
      });
    }
  }
  finish_channels(call, x, panel, first, rows, sums);
}

}  // namespace

void linear_channels(const LinearCall& call) {
  const ChannelRows x = quantize_channel_rows(call);
  const RowTiles tiles(call.rows, kTileRows);
  for_items(call, tiles, kItemTiles, [&](int panel, int first_tile, int last_tile) {
    multiply_panel(call, x, tiles, panel, first_tile, last_tile);
  });
}

}  // namespace octavo::avx512
