// Skips shape operations while a graph is built. Model code reshapes, slices and transposes the kernels'
// outputs, but the next kernel can read the original with strides. Shape nodes that nothing reads are never
// evaluated.
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
// evaluated, or if an operation in between changes more than the shape.
std::optional<View> find_view(const mx::array& x);

// Returns `x`, or an equal array in which one reshape or strided view replaces all shape operations.
mx::array shortcut(const mx::array& x);

// Whether `x` has yet to be evaluated.
bool is_pending(const mx::array& x);

// Whether `x` has yet to be evaluated and is the result of the named primitive.
bool made_by(const mx::array& x, const char* primitive);

// Returns x[0, count:] of x [1, count + T, ...]. If x is an unevaluated concatenation of `count` rows and
// others, returns the others.
mx::array rows_behind(const mx::array& x, int count);

// Returns the constant distance between rows along the last axis; nullopt if rows have gaps or unequal
// distances.
std::optional<int64_t> row_stride(const mx::Shape& shape, const mx::Strides& strides);

// Returns where row number `row` of x begins, in elements. Rows lie along the last axis.
std::size_t row_offset(const mx::array& x, std::size_t row);

}  // namespace octavo
