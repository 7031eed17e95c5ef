// Functions that kernels use from mlx/backend/metal/kernels/utils.h, which MLX puts before every kernel.
#pragma once
#include "metal.h"

using namespace metal;
typedef bfloat bfloat16_t;
typedef half float16_t;
#define MLX_MTL_PRAGMA_UNROLL _Pragma("clang loop unroll(full)")

template <class U>
struct Limits {
  static constexpr constant U max = metal::numeric_limits<U>::max();
  static constexpr constant U min = metal::numeric_limits<U>::min();
  static constexpr constant U finite_max = metal::numeric_limits<U>::max();
  static constexpr constant U finite_min = metal::numeric_limits<U>::min();
};
#define MSL_MLX_LIMITS(T)                                                         \
  template <>                                                                     \
  struct Limits<T> {                                                              \
    static constexpr constant T max = metal::numeric_limits<T>::infinity();       \
    static constexpr constant T min = (T)(-metal::numeric_limits<T>::infinity()); \
    static constexpr constant T finite_max = metal::numeric_limits<T>::max();     \
    static constexpr constant T finite_min = metal::numeric_limits<T>::lowest();  \
  };
MSL_MLX_LIMITS(float)
MSL_MLX_LIMITS(half)
MSL_MLX_LIMITS(bfloat)

template <class T, class U>
inline T ceildiv(T n, U m) {
  return (n + m - 1) / m;
}
template <class Index = int64_t>
METAL_FUNC Index elem_to_loc(Index element, constant const int* shape, constant const int64_t* strides,
                             int ndim) {
  Index location = 0;
  for (int i = ndim - 1; i >= 0 && element > 0; --i) {
    location += (element % shape[i]) * Index(strides[i]);
    element /= shape[i];
  }
  return location;
}
template <class Index = int64_t>
METAL_FUNC Index elem_to_loc_1(uint element, constant const int64_t& stride) {
  return element * Index(stride);
}
