// AVX-512: quantized weights by VPDPBUSD, except weights with one scale per output.
//
// Affine codes of 8 and 4 bits are multiplied directly, group by group. All other codes are unpacked to bytes
// once for up to 72 rows. Results for such codes are bit-identical to linear/quantized_avx2.cpp, so a row may
// use either kernel: both add exact integer sums of blocks of at most 64 inputs, block by block. E2M1 values
// are looked up as 2 value + 12, and sums start at -12 sum(xq). Sums of narrow codes start at -c sum(xq),
// where c is the middle of the codes.
#include "linear/integer_tiles_avx512.h"
#include "linear/integer_weights.h"

namespace octavo::avx512 {
namespace {

constexpr int kMaxBlock = 64;   // most inputs that share a scale of activations, unless codes are plain
constexpr int kMaxGroup = 128;  // most inputs for plain (8- and 4-bit affine) codes

// Fewest rows for which plain 4-bit codes are first widened to bytes (measured). With fewer rows, each
// register tile widens codes itself, because widening costs as much as the products of some rows.
constexpr int kWidenedRows = 19;

// Adds products of R rows and one block, with codes of kBits bits (with kCentered, less `middle`), to
// sums[R][64]. Each step prefetches kLines lines of `ahead`.
template <bool kAffine, bool kCentered, int kBits, int R, int kLines>
__attribute__((noinline)) void multiply_block(const GroupRows& x, uint32_t middle, int block,
                                              const uint8_t* words, const uint8_t* ahead,
                                              const Parameters& parameters, float* sums) {
  for (int m = 0; m < R; ++m) prefetch(reinterpret_cast<const uint8_t*>(x.next + m * block));
  Sums<R> dots;
  unrolled<R>([&](auto m) __attribute__((always_inline)) {
    // The product may wrap in a row with non-finite values, whose results are NaN anyway.
    const uint32_t start = kCentered ? 0u - middle * static_cast<uint32_t>(x.sums[m]) : 0u;
    unrolled<4>([&](auto c) __attribute__((always_inline)) {
      dots.at[m][c] = _mm512_set1_epi32(static_cast<int32_t>(start));
    });
  });
  add_group<R, kBits, kLines>(x.codes, block, block, words, ahead, dots);
  unrolled<4>([&](auto c) __attribute__((always_inline)) {
    const __m512 scale = _mm512_load_ps(parameters.scale + 16 * c);
    unrolled<R>([&](auto m) __attribute__((always_inline)) {
      float* const to = sums + m * kPanel + 16 * c;
      if constexpr (kAffine) {
        const __m512 bias = _mm512_load_ps(parameters.bias + 16 * c);
        add_products(dots.at[m][c], scale, bias, x.scales[m], x.code_sums[m], to);
      } else {
        const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(dots.at[m][c]), scale);
        _mm512_storeu_ps(to, _mm512_fmadd_ps(product, _mm512_set1_ps(x.scales[m]), _mm512_loadu_ps(to)));
      }
    });
  });
}

// Multiplies row tiles [first_tile, last_tile), of at least two rows each, by a panel, block by block.
template <class F>
void multiply_tiles(const LinearCall& call, const Int8Rows& x, const RowTiles& tiles, int block, int panel,
                    int first_tile, int last_tile) {
  const PackedShape& shape = call.weight->shape;
  const int first = tiles.first(first_tile), rows = tiles.first(last_tile) - first;
  const std::size_t high_plane = PackedShape::plane_bytes(shape.group, F::kLow);
  alignas(64) float sums[kItemTiles * kTileRows * kPanel];
  constexpr bool kAsTheyLie = F::kPlain && F::kBits == 8;
  alignas(64) uint8_t bytes[kAsTheyLie ? 1 : (F::kPlain ? kMaxGroup : kMaxBlock) * kPanel];
  const bool unpacked = !F::kPlain || (F::kBits == 4 && rows >= kWidenedRows);
  std::memset(sums, 0, sizeof(float) * kPanel * rows);
  Parameters parameters;
  const std::size_t ahead = bytes_ahead(shape, rows), fetched = shape.block_bytes() * block / shape.group;
  for (int b = 0; b < shape.inputs / block; ++b) {
    const int k = b * block, inside = k % shape.group;
    const uint8_t* group = call.weight->panel(panel) + shape.block_bytes() * (k / shape.group);
    if (inside == 0) load_parameters<F>(shape, group + shape.code_bytes(), parameters);
    if constexpr (!kAsTheyLie)
      if (unpacked)
        unpack<F>(group + PackedShape::plane_bytes(inside, F::kLow),
                  group + high_plane + PackedShape::plane_bytes(inside, F::kHigh), block / 4, bytes);
    const Fetch fetch(group + fetched * (inside / block) + ahead, fetched, last_tile - first_tile,
                      block * (unpacked ? 8 : F::kBits) / 32);
    for (int tile = first_tile; tile < last_tile; ++tile) {
      const int row = tiles.first(tile);
      const int8_t* const codes = x.at(b, row);
      const float* const scales = x.scales_at(b, row);
      const GroupRows in{codes, codes + x.block_stride(), scales, scales + x.together,
                         x.sums + x.place(b, row)};
      with_rows<kTileRows, 2>(tiles.size(tile), [&](auto count) {
        fetch.for_tile(tile - first_tile, [&](auto lines, const uint8_t* next) {
          const auto multiply = [&](auto bits, const uint8_t* words) {
            multiply_block<F::kAffine, F::kMiddle != 0, decltype(bits)::value, decltype(count)::value,
                           decltype(lines)::value>(in, F::kMiddle, block, words, next, parameters,
                                                   sums + (row - first) * kPanel);
          };
          if (unpacked) multiply(std::integral_constant<int, 8>(), bytes);
          else if constexpr (F::kPlain) multiply(std::integral_constant<int, F::kBits>(), group);
        });
      });
    }
  }
  finish_rows(call, panel, first, rows, sums);
}

// Multiplies a single row by a panel, with sums in registers and scales read in place. A function call per
// group, with sums in memory, would take a Zen 4 up to 1.4 times as long.
template <int kBits, Float kType>
void multiply_row(const LinearCall& call, const Int8Rows& x, int panel) {
  const PackedShape& shape = call.weight->shape;
  const uint8_t* block = call.weight->panel(panel);
  // On a Zen 4, prefetching whole blocks is 2 to 5 % slower with 8 bits. Other CPUs were not measured.
  const std::size_t ahead = kCore == Core::zen4 ? row_ahead(kBits) : bytes_ahead(shape, call.rows);
  const int8_t* codes = x.codes;
  __m512 sums[4];
  unrolled<4>([&](auto c) __attribute__((always_inline)) { sums[c] = _mm512_setzero_ps(); });
  for (int g = 0; g < shape.num_groups(); ++g, codes += shape.group, block += shape.block_bytes()) {
    const Sums<1> dots = dot_row<kBits>(codes, shape.group, block, ahead);
    const uint8_t* const parameters = block + shape.code_bytes();
    unrolled<4>([&](auto c) __attribute__((always_inline)) {
      const __m512 scale = load16(parameters, kType, 16 * c);
      const __m512 bias = load16(parameters, kType, kPanel + 16 * c);
      sums[c] = plus_products(dots.at[0][c], scale, bias, x.scales[2 * g], x.scales[2 * g + 1], sums[c]);
    });
    for (std::size_t at = shape.code_bytes(); ahead > 0 && at < shape.block_bytes(); at += 64)
      fetch_weights(block + ahead + at);
  }
  alignas(64) float results[kPanel];
  unrolled<4>([&](auto c) __attribute__((always_inline)) { _mm512_store_ps(results + 16 * c, sums[c]); });
  finish_rows(call, panel, 0, 1, results);
}

template <class F>
void run(const LinearCall& call) {
  const PackedShape& shape = call.weight->shape;
  const RowTiles tiles(call.rows, kTileRows);
  const int block = F::kPlain ? shape.group : std::min(shape.group, kMaxBlock);
  const Int8Rows x = quantize_rows(call, block);
  if (!F::kPlain || call.rows > 1)
    return for_items(call, tiles, kItemTiles, [&](int panel, int first_tile, int last_tile) {
      multiply_tiles<F>(call, x, tiles, block, panel, first_tile, last_tile);
    });
  if constexpr (F::kPlain)
    for_items(call, tiles, 1, [&](int panel, int, int) {
      switch (shape.scale_type) {
        case Float::bf16: return multiply_row<F::kBits, Float::bf16>(call, x, panel);
        case Float::f16: return multiply_row<F::kBits, Float::f16>(call, x, panel);
        case Float::f32: return multiply_row<F::kBits, Float::f32>(call, x, panel);
      }
    });
}

}  // namespace

void linear_integer(const LinearCall& call) {
  const PackedShape& shape = call.weight->shape;
  if (!shape.affine()) return run<Format<4, true>>(call);
  switch (shape.bits) {
    case 1: return run<Format<1>>(call);
    case 2: return run<Format<2>>(call);
    case 3: return run<Format<3>>(call);
    case 4: return run<Format<4, false, true>>(call);
    case 5: return run<Format<5>>(call);
    case 6: return run<Format<6>>(call);
    default: return run<Format<8, false, true>>(call);
  }
}

}  // namespace octavo::avx512
