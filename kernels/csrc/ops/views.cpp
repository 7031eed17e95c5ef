#include "ops/views.h"

#include <cstring>

#include "mlx/primitives.h"
#include "program/primitive.h"

namespace octavo {
namespace {

mx::Strides gapless(const mx::Shape& shape) {
  mx::Strides strides(shape.size());
  int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0; stride *= shape[i]) strides[i] = stride;
  return strides;
}

bool ours(const mx::array& x) {
  if (!x.has_primitive()) return false;
  const char* name = x.primitive().name();
  return std::strncmp(name, "octavo.", 7) == 0 || std::strcmp(name, "OctavoAttend") == 0;
}

// Whether a primitive only changes the shape and keeps the order of elements.
bool reshapes(const char* name) {
  for (const char* known : {"Reshape", "Flatten", "Unflatten", "ExpandDims", "Squeeze"})
    if (std::strcmp(name, known) == 0) return true;
  return false;
}

// Returns strides that give the same elements in another shape, if there are any. It first merges adjacent
// axes without gaps in between, then splits the merged axes into axes of the new shape.
std::optional<mx::Strides> reshaped(const mx::Shape& from, const mx::Strides& strides, const mx::Shape& to) {
  mx::Shape runs;  // the old shape with adjacent axes merged
  mx::Strides steps;
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (from[i] == 1) continue;
    if (!runs.empty() && steps.back() == strides[i] * from[i]) {
      runs.back() *= from[i];
      steps.back() = strides[i];
    } else {
      runs.push_back(from[i]);
      steps.push_back(strides[i]);
    }
  }
  mx::Strides result(to.size(), 0);
  std::size_t at = runs.size();
  int64_t used = 1;  // elements of runs[at] that later axes of `to` use
  for (std::size_t i = to.size(); i-- > 0;) {
    if (to[i] == 1) continue;
    if (at == runs.size() || used == runs[at]) {
      if (at == 0) return std::nullopt;
      --at;
      used = 1;
    }
    if (runs[at] % (used * to[i]) != 0) return std::nullopt;
    result[i] = steps[at] * used;
    used *= to[i];
  }
  return result;
}

// Whether an array with these strides is contiguous; axes of length 1 do not matter.
bool is_gapless(const mx::Shape& shape, const mx::Strides& strides) {
  const mx::Strides wanted = gapless(shape);
  for (std::size_t i = 0; i < shape.size(); ++i)
    if (shape[i] != 1 && strides[i] != wanted[i]) return false;
  return true;
}

std::optional<View> through(const mx::array& x, View view) {
  const mx::array& input = x.inputs()[0];
  const char* name = x.primitive().name();
  const mx::Strides& strides = view.strides;
  mx::Strides result;
  if (reshapes(name)) {
    auto found = reshaped(input.shape(), strides, x.shape());
    if (!found) return std::nullopt;
    result = *std::move(found);
  } else if (std::strcmp(name, "Transpose") == 0) {
    for (const int axis : static_cast<const mx::Transpose&>(x.primitive()).state())
      result.push_back(strides[axis]);
  } else if (std::strcmp(name, "Slice") == 0) {
    const auto [starts, ends, steps] = static_cast<const mx::Slice&>(x.primitive()).state();
    for (std::size_t i = 0; i < strides.size(); ++i) {
      view.offset += starts[i] * strides[i];
      result.push_back(strides[i] * steps[i]);
    }
  } else {
    return std::nullopt;
  }
  view.strides = std::move(result);
  return view;
}

}  // namespace

bool is_pending(const mx::array& x) {
  return x.has_primitive() && x.status() == mx::array::Status::unscheduled;
}

bool made_by(const mx::array& x, const char* primitive) {
  return is_pending(x) && std::strcmp(x.primitive().name(), primitive) == 0;
}

std::optional<View> find_view(const mx::array& x) {
  if (!is_pending(x) || x.size() == 0) return std::nullopt;
  if (ours(x)) return View{x, 0, gapless(x.shape())};
  if (x.inputs().size() != 1) return std::nullopt;
  auto view = find_view(x.inputs()[0]);
  return view ? through(x, *std::move(view)) : std::nullopt;
}

mx::array shortcut(const mx::array& x) {
  const auto view = find_view(x);
  if (!view || view->base.id() == x.id()) return x;
  if (view->offset == 0 && view->base.size() == x.size() && is_gapless(x.shape(), view->strides))
    return mx::reshape(view->base, x.shape(), view->base.primitive().stream());
  if (view->base.id() == x.inputs()[0].id()) return x;
  return mx::as_strided(view->base, x.shape(), view->strides, view->offset, view->base.primitive().stream());
}

mx::array rows_behind(const mx::array& x, int count) {
  require(
      x.ndim() >= 2 && x.shape(0) == 1 && count >= 0 && count <= x.shape(1),
      "x must be [1, count + T, ...] with at least " + std::to_string(count) + " rows, got " + shape_text(x));
  if (made_by(x, "Concatenate") && x.inputs().size() == 2 && x.inputs()[0].shape(1) == count &&
      static_cast<const mx::Concatenate&>(x.primitive()).state() == 1)
    return mx::squeeze(x.inputs()[1], 0, x.primitive().stream());
  mx::Shape start(x.ndim(), 0);
  start[1] = count;
  return mx::squeeze(mx::slice(x, start, x.shape()), 0);
}

std::optional<int64_t> row_stride(const mx::Shape& shape, const mx::Strides& strides) {
  if (shape.empty() || (shape.back() != 1 && strides.back() != 1)) return std::nullopt;
  int64_t stride = 0, rows = 1;  // of the axes merged so far
  for (std::size_t i = shape.size() - 1; i-- > 0;) {
    if (shape[i] == 1) continue;
    if (rows == 1) stride = strides[i];
    else if (strides[i] != stride * rows) return std::nullopt;
    rows *= shape[i];
  }
  return rows == 1 ? shape.back() : stride;
}

std::size_t row_offset(const mx::array& x, std::size_t row) {
  std::size_t offset = 0;
  for (int dim = static_cast<int>(x.ndim()) - 2; dim >= 0; --dim) {
    offset += row % x.shape(dim) * x.strides(dim);
    row /= x.shape(dim);
  }
  return offset;
}

}  // namespace octavo
