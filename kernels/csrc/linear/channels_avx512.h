// Common parts of AVX-512 and AMX for weights with one scale per output channel and activations with one
// scale per row ("W8A8", and "W4A8" with two levels of scales). AVX-512 and AMX give bit-identical results.
//
// A weight is s (u - 128), with an unsigned byte u and a scale s per output. An activation is a xq, with a
// signed code xq and a scale a per row. So
//
//   y = a s (u . xq - 128 sum(xq))
//
// with one integer sum over all inputs, exact in any order. An 8-bit code is u; a 4-bit code q stands for u =
// k q + c with its group's k and c (see PackedWeight::factors). Rounding changes an activation by at most a /
// 2 = max|x| / 254, hence |error| <= max|x| / 254 * sum|w|. Internal linkage: see numeric.h.
#pragma once

#include "linear/int8_avx512.h"

namespace octavo {
namespace {

// Activations with one scale for each row: scales a and 128 * sum(codes), each [rows]. For 4-bit weights also
// the sums of each block's codes, [blocks][rows].
struct ChannelRows : CodeRows {
  float* scales;
  int32_t *starts, *sums;
};

// Returns memory for ChannelRows in thread_scratch slot 1, with `together` adjacent rows (0: all rows).
inline ChannelRows channel_rows(const LinearCall& call, int together = 0) {
  const PackedShape& shape = call.weight->shape;
  if (together == 0) together = std::max(1, call.rows);
  const std::size_t rows = call.rows, held = (rows + together - 1) / together * together,
                    code_bytes = (held * shape.inputs + 63) / 64 * 64;
  const std::size_t values = rows * (2 + (shape.bits == 4 ? shape.num_groups() : 0));
  uint8_t* const scratch = static_cast<uint8_t*>(thread_scratch(code_bytes + 4 * values, 1));
  float* const scales = reinterpret_cast<float*>(scratch + code_bytes);
  int32_t* const starts = reinterpret_cast<int32_t*>(scales + rows);
  return {{reinterpret_cast<int8_t*>(scratch), together, shape.num_groups(), shape.group},
          scales,
          starts,
          starts + rows};
}

// Converts rows [first, last) to codes. A row with a non-finite activation gets a scale of NaN.
inline void quantize_channel_rows(const LinearCall& call, const ChannelRows& out, int first, int last) {
  const PackedShape& shape = call.weight->shape;
  const std::size_t rows = call.rows, inputs = shape.inputs;
  for (int m = first; m < last; ++m) {
    const std::size_t start = m * inputs;
    const float limit = largest_magnitude(call, start, shape.inputs), inverse = inverse_scale(limit);
    // Prefetches the next row while this one is rounded, because another thread has probably computed it.
    const std::size_t ahead = m + 1 < call.rows ? inputs * float_size(call.x_type) : 0;
    __m512i sum = _mm512_setzero_si512();
    int8_t* codes = out.at(0, m);
    int32_t* sums = out.sums + m;
    for (std::size_t k = 0; k < inputs; k += shape.group, codes += out.block_stride(), sums += rows) {
      const __m512i of_block = round_codes(call, start + k, shape.group, inverse, codes, ahead);
      sum = _mm512_add_epi32(sum, of_block);
      if (shape.bits == 4) *sums = _mm512_reduce_add_epi32(of_block);
    }
    out.scales[m] = limit / 127.0f;
    // The sum may wrap in a row with non-finite values, whose results are NaN anyway.
    out.starts[m] = static_cast<int32_t>(128u * static_cast<uint32_t>(_mm512_reduce_add_epi32(sum)));
  }
}

// Widens 16 bytes to 32-bit words times `copies`; 0x01010101 repeats each byte four times.
inline __m512i spread16(const uint8_t* from, int32_t copies) {
  const __m512i words = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm512_mullo_epi32(words, _mm512_set1_epi32(copies));
}

// Widens a panel's group of 4-bit codes to bytes u [group / 4][64][4]. A 16-bit multiplication computes k q
// of two codes, because each product fits into a byte.
inline void widen_factored(const uint8_t* words, const uint8_t* factors, int group, uint8_t* to) {
  const __m512i low_half = _mm512_set1_epi8(15);
  for (int n = 0; n < kPanel; n += 16) {
    const __m512i factor = spread16(factors + n, 0x00010001);
    const __m512i start = spread16(factors + kPanel + n, 0x01010101);
    const auto put = [&](__m512i codes, uint8_t* at) __attribute__((always_inline)) {
      const __m512i product = _mm512_mullo_epi16(_mm512_and_si512(codes, low_half), factor);
      _mm512_store_si512(at, _mm512_add_epi8(product, start));
    };
    for (int k = 0; k < group; k += 8) {
      const __m512i codes = _mm512_loadu_si512(words + 32 * k + 4 * n);
      put(codes, to + 64 * k + 4 * n);
      put(_mm512_srli_epi16(codes, 4), to + 64 * k + 256 + 4 * n);
    }
  }
}

// A panel's bytes u; blocks are `stride` bytes apart.
struct PanelBytes {
  const uint8_t* codes;
  std::size_t stride;
};

// Returns a panel's bytes u; codes of 4 bits are widened to `bytes` [inputs][64].
inline PanelBytes panel_bytes(const PackedWeight& weight, int panel, uint8_t* bytes) {
  const PackedShape& shape = weight.shape;
  if (shape.bits == 8) return {weight.panel(panel), shape.block_bytes()};
  const std::size_t wide = std::size_t{kPanel} * shape.group;
  for (int g = 0; g < shape.num_groups(); ++g)
    widen_factored(weight.panel(panel) + shape.block_bytes() * g, weight.factors(panel) + 2 * kPanel * g,
                   shape.group, bytes + wide * g);
  return {bytes, wide};
}

// Writes the results of rows [row, row + count), given their integer sums [count][64].
inline void finish_channels(const LinearCall& call, const ChannelRows& x, int panel, int row, int count,
                            const int32_t* dots) {
  constexpr int kRows = 16;  // rows converted at once
  alignas(64) float floats[kRows * kPanel];
  const float* const channels = call.weight->channel_scales.data() + std::size_t{kPanel} * panel;
  for (int first = 0; first < count; first += kRows) {
    const int rows = std::min(kRows, count - first);
    for (int m = 0; m < rows; ++m, dots += kPanel) {
      const __m512i start = _mm512_set1_epi32(x.starts[row + first + m]);
      const __m512 scale = _mm512_set1_ps(x.scales[row + first + m]);
      for (int n = 0; n < kPanel; n += 16) {
        const __m512 dot = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_loadu_si512(dots + n), start));
        _mm512_store_ps(floats + m * kPanel + n,
                        _mm512_mul_ps(_mm512_mul_ps(dot, _mm512_loadu_ps(channels + n)), scale));
      }
    }
    finish_rows(call, panel, row + first, rows, floats);
  }
}

}  // namespace
}  // namespace octavo
