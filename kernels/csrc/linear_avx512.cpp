// AVX-512: bf16 weights by VDPBF16PS, q8 and q4 weights by VPDPBUSD.
//
// The integer path keeps MLX's affine format as it is: the unsigned codes are VPDPBUSD's unsigned
// operand, and activations are rounded to signed 8 bits with one scale a per row and group, so that
//
//   y = sum over groups of  a s (q . xq)  +  a b sum(xq)
//
// Rounding moves each activation by at most a / 2 = max|x| / 254 of its group, hence
//   |error| <= sum over groups of  max|x| / 254 * sum|w|.
#include <immintrin.h>

#include "linear_common.h"

namespace octavo::avx512 {
namespace {

constexpr int kItemRows = 96;

inline __m512 load_bf16(const void* p) {
  const __m256i half = _mm256_loadu_si256(static_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// Values [at, at + 16) of an array of `type`.
inline __m512 load16(const void* p, Float type, std::size_t at) {
  const uint8_t* from = static_cast<const uint8_t*>(p) + at * float_size(type);
  if (type == Float::bf16) return load_bf16(from);
  if (type == Float::f32) return _mm512_loadu_ps(from);
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

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

// Activations in 8 bits: codes [rows, inputs]; scales a and a * sum(codes), each [rows, groups].
struct Int8Rows {
  int8_t* codes;
  float* scales;
  float* code_sums;
};

void quantize_group(const LinearCall& call, std::size_t at, int group, int8_t* codes, float* scale,
                    float* code_sum) {
  __m512 largest = _mm512_setzero_ps();
  for (int k = 0; k < group; k += 16)
    largest = _mm512_max_ps(largest, _mm512_abs_ps(load16(call.x, call.x_type, at + k)));
  const float limit = _mm512_reduce_max_ps(largest);
  const __m512 inverse = _mm512_set1_ps(limit > 0 ? 127.0f / limit : 0.0f);
  __m512i sum = _mm512_setzero_si512();
  for (int k = 0; k < group; k += 16) {
    const __m512 value = _mm512_mul_ps(load16(call.x, call.x_type, at + k), inverse);
    const __m512i code = _mm512_cvtps_epi32(value);
    sum = _mm512_add_epi32(sum, code);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + k), _mm512_cvtsepi32_epi8(code));
  }
  *scale = limit / 127.0f;
  *code_sum = *scale * static_cast<float>(_mm512_reduce_add_epi32(sum));
}

Int8Rows quantize_rows(const LinearCall& call) {
  const PackedShape& shape = call.weight->shape;
  const std::size_t groups = shape.num_groups(), rows = call.rows;
  const std::size_t code_bytes = (rows * shape.inputs + 63) / 64 * 64;
  uint8_t* scratch = static_cast<uint8_t*>(thread_scratch(code_bytes + 8 * rows * groups, 1));
  float* scales = reinterpret_cast<float*>(scratch + code_bytes);
  const Int8Rows out{reinterpret_cast<int8_t*>(scratch), scales, scales + rows * groups};
  const auto quantize = [&](int m) {
    for (std::size_t g = 0; g < groups; ++g) {
      const std::size_t at = static_cast<std::size_t>(m) * shape.inputs + g * shape.group;
      const std::size_t i = m * groups + g;
      quantize_group(call, at, shape.group, out.codes + at, out.scales + i, out.code_sums + i);
    }
  };
  if (call.rows >= 16) parallel_for(call.rows, quantize);
  else
    for (int m = 0; m < call.rows; ++m) quantize(m);
  return out;
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
          const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(dots[m][c]), scale);
          __m512 sum = _mm512_loadu_ps(target);
          sum = _mm512_fmadd_ps(product, _mm512_set1_ps(x.scales[i]), sum);
          sum = _mm512_fmadd_ps(bias, _mm512_set1_ps(x.code_sums[i]), sum);
          _mm512_storeu_ps(target, sum);
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
      if (shape.kind == WeightKind::q4) multiply_int8<R, 4>(shape, x, row, panel, sums);
      else multiply_int8<R, 8>(shape, x, row, panel, sums);
      finish_rows(call, item.panel, row, R, sums);
    });
  });
}

}  // namespace octavo::avx512
