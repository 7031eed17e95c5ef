// AVX-512: bf16 weights by VDPBF16PS, affine ones of 8 and 4 bits by VPDPBUSD.
#include "linear_int8_avx512.h"

namespace octavo::avx512 {
namespace {

constexpr int kItemRows = 96;

inline __m512i broadcast4(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}

inline void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

// sums[R][64] = x[R][padded] panel, in bf16 pairs.
template <int R>
void multiply_bf16(const bf16_t* x, int padded, const uint8_t* panel, float* sums) {
  constexpr int kAhead = 4096;  // bytes: far enough to hide DRAM
  __m512 sum[R][4];
  for (int m = 0; m < R; ++m)
    for (int c = 0; c < 4; ++c) sum[m][c] = _mm512_setzero_ps();
  for (int pair = 0; pair < padded / 2; ++pair, panel += 256) {
    __m512bh w[4];
    for (int c = 0; c < 4; ++c) {
      w[c] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(panel + 64 * c));
      prefetch(panel + kAhead + 64 * c);
    }
#pragma GCC unroll 6
    for (int m = 0; m < R; ++m) {
      const __m512bh value =
          reinterpret_cast<__m512bh>(broadcast4(x + static_cast<std::size_t>(m) * padded + 2 * pair));
      for (int c = 0; c < 4; ++c) sum[m][c] = _mm512_dpbf16_ps(sum[m][c], w[c], value);
    }
  }
  for (int m = 0; m < R; ++m)
    for (int c = 0; c < 4; ++c) _mm512_storeu_ps(sums + m * kPanel + 16 * c, sum[m][c]);
}

// Integer dot products of one group: R rows by 16 * C outputs from column `column` on. Integers are
// exact, so the odd steps of a single row may go to sums of their own to shorten the chain.
template <int R, int C, int kBits>
inline __attribute__((always_inline)) void dot_group(const int8_t* x, std::size_t stride, int group,
                                                     const uint8_t* block, int column, __m512i (&sum)[R][C]) {
  const __m512i low_half = _mm512_set1_epi8(15);
  for (int m = 0; m < R; ++m)
    for (int c = 0; c < C; ++c) sum[m][c] = _mm512_setzero_si512();
  const uint8_t* words = block + 4 * column;
#pragma GCC unroll 4
  for (int k = 0; k < group; k += 32 / kBits, words += 256) {
    __m512i codes[C], high[C];
    for (int c = 0; c < C; ++c) {
      codes[c] = _mm512_loadu_si512(words + 64 * c);
      prefetch(words + 3072 + 64 * c);
      if (kBits == 4) {
        high[c] = _mm512_and_si512(_mm512_srli_epi16(codes[c], 4), low_half);
        codes[c] = _mm512_and_si512(codes[c], low_half);
      }
    }
#pragma GCC unroll 6
    for (int m = 0; m < R; ++m) {
      const __m512i value = broadcast4(x + m * stride + k);
      for (int c = 0; c < C; ++c) sum[m][c] = _mm512_dpbusd_epi32(sum[m][c], codes[c], value);
      if (kBits == 4) {
        const __m512i next = broadcast4(x + m * stride + k + 4);
        for (int c = 0; c < C; ++c) sum[m][c] = _mm512_dpbusd_epi32(sum[m][c], high[c], next);
      }
    }
  }
}

// sums[R][64] = R rows of activations from `row` on times one panel.
template <int R, int kBits>
void multiply_int8(const PackedShape& shape, const Int8Rows& x, std::size_t row, const uint8_t* panel,
                   float* sums) {
  constexpr int C = R <= 2 ? 4 : 2;
  const std::size_t groups = shape.num_groups();
  std::memset(sums, 0, sizeof(float) * kPanel * R);
  for (std::size_t g = 0; g < groups; ++g, panel += shape.block_bytes()) {
    const int8_t* codes = x.codes + row * shape.inputs + g * shape.group;
    for (int column = 0; column < kPanel; column += 16 * C) {
      __m512i dots[R][C];
      dot_group<R, C, kBits>(codes, shape.inputs, shape.group, panel, column, dots);
      for (int c = 0; c < C; ++c) {
        const int at = column + 16 * c;
        const uint8_t* parameters = panel + shape.code_bytes();
        const __m512 scale = load16(parameters, shape.scale_type, at);
        const __m512 bias = load16(parameters, shape.scale_type, kPanel + at);
#pragma GCC unroll 6
        for (int m = 0; m < R; ++m) {
          const std::size_t i = (row + m) * groups + g;
          float* target = sums + m * kPanel + at;
          add_products(dots[m][c], scale, bias, x.scales[i], x.code_sums[i], target);
        }
      }
    }
  }
}

// tile(integral constant R, row) for register tiles of R rows that cover [first, last).
template <class Tile>
inline void for_row_tiles(int first, int last, Tile&& tile) {
  int row = first;
  for (; last - row >= 6; row += 6) tile(std::integral_constant<int, 6>(), row);
  for (; last - row >= 4; row += 4) tile(std::integral_constant<int, 4>(), row);
  for (; last - row >= 2; row += 2) tile(std::integral_constant<int, 2>(), row);
  if (last > row) tile(std::integral_constant<int, 1>(), row);
}

}  // namespace

void linear_bf16(const LinearCall& call) {
  const bf16_t* x = bf16_rows(call);
  const int padded = call.weight->shape.padded_inputs();
  const Items items(call, kItemRows);
  parallel_for(items.count, [&](int i) {
    const Item item = items[i];
    const uint8_t* panel = call.weight->panel(item.panel);
    for_row_tiles(item.first, item.last, [&](auto tile_rows, int row) {
      constexpr int R = decltype(tile_rows)::value;
      alignas(64) float sums[R * kPanel];
      multiply_bf16<R>(x + static_cast<std::size_t>(row) * padded, padded, panel, sums);
      finish_rows(call, item.panel, row, R, sums);
    });
  });
}

void linear_int8(const LinearCall& call) {
  const Int8Rows x = quantize_rows(call);
  const PackedShape& shape = call.weight->shape;
  const Items items(call, kItemRows);
  parallel_for(items.count, [&](int i) {
    const Item item = items[i];
    const uint8_t* panel = call.weight->panel(item.panel);
    for_row_tiles(item.first, item.last, [&](auto tile_rows, int row) {
      constexpr int R = decltype(tile_rows)::value;
      alignas(64) float sums[R * kPanel];
      if (shape.bits == 4) multiply_int8<R, 4>(shape, x, row, panel, sums);
      else multiply_int8<R, 8>(shape, x, row, panel, sums);
      finish_rows(call, item.panel, row, R, sums);
    });
  });
}

}  // namespace octavo::avx512
