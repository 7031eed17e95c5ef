// Conversion of any weights to float32, in standard C++ that compilers vectorize. Internal linkage: see
// numeric.h.
#pragma once

#include "linear/packed.h"

namespace octavo {
namespace {

typedef uint32_t Word __attribute__((may_alias));  // a 32-bit word of codes

// Reads `bits` bits of one input's 64 codes from a plane of words, and adds them at bit `shift`.
inline void add_plane(const uint8_t* plane, int k, int bits, int shift, uint32_t* codes) {
  const int at = k / 4 * bits, right = 8 * (k % 4) + at % 8;
  const Word* const words = reinterpret_cast<const Word*>(plane) + at / 8 * kPanel;
  const uint32_t mask = (1u << bits) - 1;
  for (int n = 0; n < kPanel; ++n) codes[n] |= (words[n] >> right & mask) << shift;
}

// Converts a group to float32 [group][64].
inline void decode_group(const PackedShape& shape, const uint8_t* block, const uint8_t* parameters,
                         float* out) {
  alignas(64) float scale[2 * kPanel];
  const float* bias = scale + kPanel;
  if (shape.affine()) load_floats(parameters, shape.scale_type, 0, 2 * kPanel, scale);
  else
    for (int n = 0; n < kPanel; ++n) scale[n] = fp4_scale(shape.kind == WeightKind::mxfp4, parameters[n]);
  for (int k = 0; k < shape.group; ++k, out += kPanel) {
    alignas(64) uint32_t codes[kPanel] = {};
    const int low = shape.low_bits();
    add_plane(block, k, low, 0, codes);
    if (shape.bits > low)
      add_plane(block + PackedShape::plane_bytes(shape.group, low), k, shape.bits - low, low, codes);
    if (shape.affine())
      for (int n = 0; n < kPanel; ++n)
        out[n] = scale[n] * static_cast<float>(static_cast<int>(codes[n])) + bias[n];
    else
      for (int n = 0; n < kPanel; ++n) out[n] = scale[n] * kE2M1[codes[n] & 15];
  }
}

// Converts inputs [k, k + count) of `panel` to float32 [count][64]. These inputs must be one whole group if
// the weight is quantized, and whole pairs if it is bf16.
inline void decode(const PackedWeight& weight, int panel, int k, int count, float* out) {
  const PackedShape& shape = weight.shape;
  if (shape.quantized()) {
    const int group = k / shape.group;
    return decode_group(shape, weight.codes(panel, group), weight.parameters(panel, group), out);
  }
  const std::size_t at = static_cast<std::size_t>(k) * kPanel;
  if (shape.kind == WeightKind::bf16) {
    const Word* pairs = reinterpret_cast<const Word*>(weight.panel(panel)) + at / 2;
    for (int i = 0; i < count; i += 2, pairs += kPanel, out += 2 * kPanel)
      for (int n = 0; n < kPanel; ++n)
        out[n] = as_float(pairs[n] << 16), out[kPanel + n] = as_float(pairs[n] & 0xffff0000);
    return;
  }
  load_floats(weight.panel(panel), shape.scale_type, at, count * kPanel, out);
}

}  // namespace
}  // namespace octavo
