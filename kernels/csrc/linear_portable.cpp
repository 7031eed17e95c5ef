// y = x W^T in float32, in standard C++ with GCC vectors: every kind of weight, every instruction set.
//
// A chunk of a panel is decoded to float32 [chunk][64] once and used for all rows of the item; each
// sum runs over the inputs in ascending order, one fused (or, without FMA, one rounded) step per input.
#include "linear_common.h"

namespace octavo::OCTAVO_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16, kVectors = 4;  // 6 x 4 sums in 32 registers
#elif defined(__AVX2__)
constexpr int kWidth = 8, kVectors = 2;  // 6 x 2 sums in 16 registers
#else
constexpr int kWidth = 4, kVectors = 2;
#endif
constexpr int kRows = 6;         // rows of a register tile
constexpr int kItemRows = 96;    // rows that share a decoded chunk
constexpr int kDenseChunk = 64;  // inputs decoded at once; quantized weights decode a group

typedef float Vec __attribute__((vector_size(kWidth * 4), aligned(4)));

// The chunk of inputs [k, k + count) of `panel` as float32 [count][64].
void decode_dense(const PackedShape& shape, const uint8_t* panel, int k, int count, float* out) {
  const std::size_t at = static_cast<std::size_t>(k) * kPanel;
  if (shape.kind == WeightKind::f32) {
    std::memcpy(out, reinterpret_cast<const float*>(panel) + at, sizeof(float) * count * kPanel);
  } else if (shape.kind == WeightKind::f16) {
    const f16_t* from = reinterpret_cast<const f16_t*>(panel) + at;
    for (int i = 0; i < count * kPanel; ++i) out[i] = f16_to_float(from[i]);
  } else {  // pairs; an odd count reads the zero beside the last input
    const uint32_t* from = reinterpret_cast<const uint32_t*>(panel) + at / 2;
    for (int pair = 0; pair < (count + 1) / 2; ++pair, from += kPanel, out += 2 * kPanel)
      for (int n = 0; n < kPanel; ++n) {
        out[n] = as_float(from[n] << 16);
        out[kPanel + n] = as_float(from[n] & 0xffff0000);
      }
  }
}

void decode_group(const PackedShape& shape, const uint8_t* block, float* out) {
  alignas(64) float scale[2 * kPanel];
  load_floats(block + shape.code_bytes(), shape.scale_type, 0, 2 * kPanel, scale);
  const float* bias = scale + kPanel;
  const uint32_t* words = reinterpret_cast<const uint32_t*>(block);
  const int bits = shape.bits(), per_word = 32 / bits;
  const uint32_t mask = (1u << bits) - 1;
  for (int k = 0; k < shape.group; ++k, out += kPanel) {
    // q4: inputs 0..3 of eight lie in the low halves of the four bytes, 4..7 in the high halves.
    const int in_word = k % per_word;
    const int shift = bits == 8 ? 8 * in_word : 8 * (in_word % 4) + (in_word >= 4 ? 4 : 0);
    const uint32_t* row = words + static_cast<std::size_t>(k / per_word) * kPanel;
    for (int n = 0; n < kPanel; ++n)
      out[n] = scale[n] * static_cast<float>(static_cast<int>((row[n] >> shift) & mask)) + bias[n];
  }
}

// sums[R][64] += x[R][count] w[count][64]
template <int R>
void multiply(const float* x, std::size_t stride, const float* w, int count, float* sums) {
  constexpr int kColumns = kWidth * kVectors;
  for (int c = 0; c < kPanel; c += kColumns) {
    Vec sum[R][kVectors];
    for (int m = 0; m < R; ++m)
      for (int v = 0; v < kVectors; ++v)
        sum[m][v] = *reinterpret_cast<const Vec*>(sums + m * kPanel + c + v * kWidth);
    for (int k = 0; k < count; ++k) {
      Vec weight[kVectors];
      for (int v = 0; v < kVectors; ++v)
        weight[v] = *reinterpret_cast<const Vec*>(w + k * kPanel + c + v * kWidth);
      for (int m = 0; m < R; ++m)
        for (int v = 0; v < kVectors; ++v) sum[m][v] += weight[v] * x[m * stride + k];
    }
    for (int m = 0; m < R; ++m)
      for (int v = 0; v < kVectors; ++v)
        *reinterpret_cast<Vec*>(sums + m * kPanel + c + v * kWidth) = sum[m][v];
  }
}

void multiply_rows(const float* x, std::size_t stride, const float* w, int count, int rows, float* sums) {
  int m = 0;
  for (; m + kRows <= rows; m += kRows) multiply<kRows>(x + m * stride, stride, w, count, sums + m * kPanel);
  for (; m + 2 <= rows; m += 2) multiply<2>(x + m * stride, stride, w, count, sums + m * kPanel);
  for (; m < rows; ++m) multiply<1>(x + m * stride, stride, w, count, sums + m * kPanel);
}

// x as float32; where it is not already, in the caller's scratch slot 1.
const float* float_rows(const LinearCall& call) {
  if (call.x_type == Float::f32) return static_cast<const float*>(call.x);
  const int inputs = call.weight->shape.inputs;
  float* rows = static_cast<float*>(thread_scratch(sizeof(float) * inputs * call.rows, 1));
  parallel_for(call.rows, [&](int m) {
    const std::size_t at = static_cast<std::size_t>(m) * inputs;
    load_floats(call.x, call.x_type, at, inputs, rows + at);
  });
  return rows;
}

void run_item(const LinearCall& call, const float* x, Item item) {
  const PackedShape& shape = call.weight->shape;
  const int rows = item.last - item.first;
  const int chunk = shape.quantized() ? shape.group : kDenseChunk;
  float* w = static_cast<float*>(thread_scratch(sizeof(float) * kPanel * (chunk + rows)));
  float* sums = w + static_cast<std::size_t>(chunk) * kPanel;
  std::memset(sums, 0, sizeof(float) * kPanel * rows);
  const uint8_t* panel = call.weight->panel(item.panel);
  const float* x_rows = x + static_cast<std::size_t>(item.first) * shape.inputs;
  for (int k = 0; k < shape.inputs; k += chunk) {
    const int count = shape.inputs - k < chunk ? shape.inputs - k : chunk;
    if (shape.quantized()) decode_group(shape, panel + shape.block_bytes() * (k / chunk), w);
    else decode_dense(shape, panel, k, count, w);
    multiply_rows(x_rows + k, shape.inputs, w, count, rows, sums);
  }
  finish_rows(call, item.panel, item.first, rows, sums);
}

}  // namespace

void linear_float32(const LinearCall& call) {
  const float* x = float_rows(call);
  const Items items(call, kItemRows);
  parallel_for(items.count, [&](int i) { run_item(call, x, items[i]); });
}

}  // namespace octavo::OCTAVO_ISA
