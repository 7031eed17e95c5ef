// Common parts of the MLX primitives of attention and pages: checks, strided views and layouts.
#pragma once

#include <string>

#include "attention/attention.h"
#include "program/primitive.h"

namespace octavo {

// Returns the layout of a layer's pool; `k_format` and `v_format` are names of octavo.kernels.formats.
// Throws std::invalid_argument for a format, dimension or page size that the kernels do not support.
PageLayout make_layout(int64_t num_pages, int num_heads, int page_size, const std::string& k_format,
                       int k_dim, const std::string& v_format, int v_dim);

mx::Shape pool_shape(const PageLayout& layout);

// Throw unless `pool` has the shape and type of the layout, or `array` is int32 of `shape`.
void require_pool(const PageLayout& layout, const mx::array& pool);
void require_ints(const char* name, const mx::array& array, const mx::Shape& shape);

// Throws unless `rows` are floats [any, n, dim], where n is num_heads or, with `multiple`, a multiple of it.
void require_rows(const char* name, const mx::array& rows, int num_heads, int dim, bool multiple = false);

// Returns a view of an evaluated array with any strides.
RowsView view_rows(const mx::array& rows);
const int32_t* view_ints(const mx::array& array);

}  // namespace octavo
