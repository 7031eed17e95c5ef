// Weights with one scale per output channel, declared once per instruction set; kernels/channel_weights.py
// says what they are, and these are its bits.
#pragma once

#include <cstdint>

#include "runtime/numeric.h"

namespace octavo {

struct ChannelsCall {
  // What is quantized, [rows, inputs]: floats, or in MLX's affine format of as many bits.
  const void* weights;  // floats, or codes
  const void* scales;   // of codes, else null
  const void* biases;
  Float type;  // of the floats, or of scales and biases
  int64_t rows;
  int inputs, group;
  int bits;  // 8: w8a8; 4: w4a8

  // The results, as MLX has them.
  uint32_t* new_codes;
  void* new_scales;
  void* new_biases;
};

namespace generic {
void quantize_channels(const ChannelsCall& call);
}
namespace avx2 {
void quantize_channels(const ChannelsCall& call);
}
namespace avx512 {
void quantize_channels(const ChannelsCall& call);
}

}  // namespace octavo
