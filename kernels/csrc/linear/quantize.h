// Quantization of weights to MLX's affine format: kernels of each instruction set.
#pragma once

#include <cstdint>

#include "runtime/numeric.h"

namespace octavo {

struct QuantizeCall {
  // Input [rows, inputs]: floats, or codes in MLX's affine format with the same number of bits.
  const void* weights;  // floats, or codes
  const void* scales;   // scales of codes, else null
  const void* biases;
  Float type;  // type of the floats, or of scales and biases
  int64_t rows;
  int inputs, group;  // whole groups of 32, 64 or 128
  int bits;           // 4 or 8

  // Results in MLX's affine format.
  uint32_t* new_codes;
  void* new_scales;
  void* new_biases;
};

#define OCTAVO_DECLARE_QUANTIZE(isa)                                            \
  namespace isa {                                                               \
  /* Quantizes floats, bit-identical to mx.quantize. */                         \
  void quantize_weights(const QuantizeCall& call);                              \
  /* Quantizes to w8a8 or w4a8, bit-identical to kernels/channel_weights.py. */ \
  void quantize_channels(const QuantizeCall& call);                             \
  }
OCTAVO_DECLARE_QUANTIZE(generic)
OCTAVO_DECLARE_QUANTIZE(avx2)
OCTAVO_DECLARE_QUANTIZE(avx512)
#undef OCTAVO_DECLARE_QUANTIZE

}  // namespace octavo
