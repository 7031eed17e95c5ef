// Looking through shape operations while a graph is built: model code reshapes, slices and transposes
// what a kernel of ours wrote, and the next kernel can read the original with strides instead. Nodes
// that nobody reads then never become part of the graph that is evaluated.
#pragma once

#include <optional>

#include "mlx/mlx.h"

namespace octavo {

namespace mx = mlx::core;

// Element [i, j, ...] of the array lies at offset + i * strides[0] + j * strides[1] + ... of `base`,
// whose elements will lie without gaps.
struct View {
  mx::array base;
  int64_t offset;
  mx::Strides strides;
};

// `x` as a view of the output of one of our own primitives, which always allocate without gaps; none if
// `x` has been evaluated or something other than shape operations lies between.
std::optional<View> find_view(const mx::array& x);

// `x`, or the same values with fewer nodes: what its shape operations view, reshaped or strided at once.
mx::array shortcut(const mx::array& x);

// Whether `x` has yet to be evaluated.
bool is_pending(const mx::array& x);

// The same, as the result of the named primitive.
bool made_by(const mx::array& x, const char* primitive);

// x[0, count:] of x [1, count + T, ...]; where x is not evaluated yet and just that was put behind `count`
// rows, what was put there.
mx::array rows_behind(const mx::array& x, int count);

// The distance between rows (runs along the last axis) if all axes before the last can be counted as
// one and rows have no gaps in them.
std::optional<int64_t> row_stride(const mx::Shape& shape, const mx::Strides& strides);

}  // namespace octavo
