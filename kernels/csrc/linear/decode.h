// Weights of every kind as float32, in standard C++ that compilers vectorize. Internal linkage: see
// numeric.h.
#pragma once

#include "linear/packed.h"

namespace octavo {
namespace {

// The codes of one input for the 64 outputs of a panel.
inline void load_codes(const PackedShape& shape, const uint8_t* block, int k, uint32_t* codes) {
  const int low = shape.low_bits(), high = shape.bits - low, quad = k / 4, byte = 8 * (k % 4);
  const uint32_t* words = reinterpret_cast<const uint32_t*>(block) + quad * low / 8 * kPanel;
  const int shift = byte + quad * low % 8;
  const uint32_t mask = (1u << low) - 1;
  for (int n = 0; n < kPanel; ++n) codes[n] = words[n] >> shift & mask;
  if (high == 0) return;
  const uint8_t* plane = block + PackedShape::plane_bytes(shape.group, low);
  const uint32_t* above = reinterpret_cast<const uint32_t*>(plane) + quad * high / 8 * kPanel;
  const int above_shift = byte + quad * high % 8;
  const uint32_t above_mask = (1u << high) - 1;
  for (int n = 0; n < kPanel; ++n) codes[n] |= (above[n] >> above_shift & above_mask) << low;
}

// A group as float32 [group][64].
inline void decode_group(const PackedShape& shape, const uint8_t* block, const uint8_t* parameters,
                         float* out) {
  alignas(64) float scale[2 * kPanel];
  const float* bias = scale + kPanel;
  if (shape.affine()) load_floats(parameters, shape.scale_type, 0, 2 * kPanel, scale);
  else
    for (int n = 0; n < kPanel; ++n) scale[n] = fp4_scale(shape.kind == WeightKind::mxfp4, parameters[n]);
  for (int k = 0; k < shape.group; ++k, out += kPanel) {
    alignas(64) uint32_t codes[kPanel];
    load_codes(shape, block, k, codes);
    if (shape.affine())
      for (int n = 0; n < kPanel; ++n)
        out[n] = scale[n] * static_cast<float>(static_cast<int>(codes[n])) + bias[n];
    else
      for (int n = 0; n < kPanel; ++n) out[n] = scale[n] * kE2M1[codes[n] & 15];
  }
}

// Inputs [k, k + count) of `panel` as float32 [count][64]: a group of a quantized weight, or any run of
// inputs of an f16 or f32 one.
inline void decode(const PackedWeight& weight, int panel, int k, int count, float* out) {
  const PackedShape& shape = weight.shape;
  if (shape.quantized()) {
    const int group = k / shape.group;
    return decode_group(shape, weight.codes(panel, group), weight.parameters(panel, group), out);
  }
  const std::size_t at = static_cast<std::size_t>(k) * kPanel;
  load_floats(weight.panel(panel), shape.scale_type, at, count * kPanel, out);
}

}  // namespace
}  // namespace octavo
