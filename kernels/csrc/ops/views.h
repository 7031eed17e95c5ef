// Resolution of shape operations while a graph is built. Model code reshapes, slices and transposes the
// kernels' outputs; the next kernel can read the original with strides instead. Shape nodes that are then
// unused are never evaluated.
#pragma once

#include <optional>

#include "mlx/mlx.h"

namespace octavo {

namespace mx = mlx::core;

// A view: element [i, j, ...] of the array is element offset + i * strides[0] + j * strides[1] + ... of the
// contiguous `base`.
struct View {
  mx::array base;
  int64_t offset;
  mx::Strides strides;
};

// Returns `x` as a view of the contiguous output of one of Octavo's primitives; nullopt if `x` has been
// evaluated, or if other than shape operations are in between.
std::optional<View> find_view(const mx::array& x);

// Returns `x`, or an equal array whose shape operations are replaced by one reshape or one strided view.
mx::array shortcut(const mx::array& x);

// Whether `x` has yet to be evaluated.
bool is_pending(const mx::array& x);

// Whether `x` has yet to be evaluated and is the result of the named primitive.
bool made_by(const mx::array& x, const char* primitive);

// Returns x[0, count:] of x [1, count + T, ...]. If x is an unevaluated concatenation of `count` rows and
// others, returns the others.
mx::array rows_behind(const mx::array& x, int count);

// Returns the distance between rows (runs along the last axis) if rows are contiguous and all earlier axes
// can be merged.
std::optional<int64_t> row_stride(const mx::Shape& shape, const mx::Strides& strides);

}  // namespace octavo
