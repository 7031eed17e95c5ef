// Weights of one scale per output channel, activations of one scale per row ("W8A8"), on AVX-512 and AMX:
// what both do alike, so that a row's result has the same bits from either.
//
// A weight is s (q - 128) with an unsigned code q and one s for all inputs of an output, an activation a xq
// with a signed code and one a for all inputs of a row, so that
//
//   y = a s (q . xq - 128 sum(xq))
//
// with one integer sum over all inputs, exact in any order. Rounding moves each activation by at most
// a / 2 = max|x| / 254 of its row, hence |error| <= max|x| / 254 * sum|w|.
// Internal linkage: see numeric.h.
#pragma once

#include "linear/int8_avx512.h"

namespace octavo {
namespace {

// Activations in 8 bits by blocks of inputs: codes [inputs / block][rows][block], so that what some rows have
// of a block lies together; scales a and 128 * sum(codes), each [rows].
struct ChannelRows {
  int8_t* codes;
  float* scales;
  int32_t* starts;
  int rows, block;

  // Those of `row` from the first input of a block on.
  const int8_t* at(int index, int row) const {
    return codes + (static_cast<std::size_t>(index) * rows + row) * block;
  }
  std::size_t block_stride() const { return static_cast<std::size_t>(rows) * block; }
};

// In the caller's scratch slot 1. A row that has an activation that is not finite gets a scale of NaN.
inline ChannelRows quantize_channel_rows(const LinearCall& call) {
  const PackedShape& shape = call.weight->shape;
  const std::size_t rows = call.rows, inputs = shape.inputs, code_bytes = (rows * inputs + 63) / 64 * 64;
  uint8_t* const scratch = static_cast<uint8_t*>(thread_scratch(code_bytes + 8 * rows, 1));
  float* const scales = reinterpret_cast<float*>(scratch + code_bytes);
  const ChannelRows out{reinterpret_cast<int8_t*>(scratch), scales, reinterpret_cast<int32_t*>(scales + rows),
                        call.rows, shape.group};
  const auto quantize = [&](std::size_t m) {
    const float limit = largest_magnitude(call, m * inputs, shape.inputs), inverse = inverse_scale(limit);
    __m512i sum = _mm512_setzero_si512();
    int8_t* codes = out.codes + m * shape.group;
    for (std::size_t k = 0; k < inputs; k += shape.group, codes += out.block_stride())
      sum = _mm512_add_epi32(sum, round_codes(call, m * inputs + k, shape.group, inverse, codes));
    out.scales[m] = limit / 127.0f;
    // Wraps where a row is not finite, whose results are NaN whatever this is.
    out.starts[m] = static_cast<int32_t>(128u * static_cast<uint32_t>(_mm512_reduce_add_epi32(sum)));
  };
  // Rows whose scales share a line of the cache are one thread's.
  constexpr int kRows = 16;
  parallel_for((call.rows + kRows - 1) / kRows, [&](int item) {
    for (int m = item * kRows; m < std::min(call.rows, (item + 1) * kRows); ++m) quantize(m);
  });
  return out;
}

// Integer sums [count][64] of rows from `row` on, to results: scaled, in place, and finished.
inline void finish_channels(const LinearCall& call, const ChannelRows& x, int panel, int row, int count,
                            int32_t* dots) {
  const PackedShape& shape = call.weight->shape;
  const uint8_t* const parameters = call.weight->panel(panel) + shape.code_bytes();
  for (int n = 0; n < kPanel; n += 16) {
    const __m512 scale = load16(parameters, shape.scale_type, n);
    for (int m = 0; m < count; ++m) {
      int32_t* const at = dots + m * kPanel + n;
      const __m512i dot = _mm512_sub_epi32(_mm512_loadu_si512(at), _mm512_set1_epi32(x.starts[row + m]));
      const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), scale);
      _mm512_storeu_ps(at, _mm512_mul_ps(product, _mm512_set1_ps(x.scales[row + m])));
    }
  }
  finish_rows(call, panel, row, count, reinterpret_cast<float*>(dots));
}

}  // namespace
}  // namespace octavo
