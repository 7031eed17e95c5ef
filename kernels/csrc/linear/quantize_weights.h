// Weights in MLX's affine format, declared once per instruction set: the bits of mx.quantize.
#pragma once

#include <cstdint>

#include "runtime/numeric.h"

namespace octavo {

struct AffineCall {
  const void* weights;  // floats, row-major, whole groups
  Float type;           // of these, and of scales and biases
  int64_t groups;
  int group, bits;  // 32, 64 or 128; 2, 4 or 8

  // The results, as MLX has them.
  uint32_t* codes;
  void* scales;
  void* biases;
};

namespace generic {
void quantize_weights(const AffineCall& call);
}
namespace avx2 {
void quantize_weights(const AffineCall& call);
}
namespace avx512 {
void quantize_weights(const AffineCall& call);
}

}  // namespace octavo
