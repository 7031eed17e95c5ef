// Small elementwise and row operations, declared once per instruction set.
#pragma once

#include "numeric.h"

namespace octavo {

#define OCTAVO_DECLARE_OPS(isa)                                                                      \
  namespace isa {                                                                                    \
  void rms_norm(const void* x, const void* weight, void* y, Float type, Float weight_type, int rows, \
                int size, float eps);                                                                \
  void swiglu(const void* gate, const void* up, void* y, Float type, std::size_t count);             \
  }
OCTAVO_DECLARE_OPS(generic)
OCTAVO_DECLARE_OPS(avx2)
OCTAVO_DECLARE_OPS(avx512)
#undef OCTAVO_DECLARE_OPS

}  // namespace octavo
