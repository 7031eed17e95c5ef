// Common parts of the MLX primitives of attention and pages: checks, strided views and layouts.
#pragma once

#include <optional>
#include <string>
#include <vector>

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

// Adds optional numbers, one per head, to a call's inputs, as floats.
void add_per_head(std::vector<mx::array>& inputs, const char* name, const std::optional<mx::array>& values,
                  int num_query_heads, mx::Stream stream);

// Adds an optional mask [T, 1 or Hq, any], bool or float, to a call's inputs; returns its view.
void add_mask(std::vector<mx::array>& inputs, const std::optional<mx::array>& mask, const mx::array& queries,
              mx::Stream stream);
MaskView view_mask(const mx::array& mask);

// Adds optional rotary queries [T, Hq, layout.v.dim] of the type of `queries` to a call's inputs; throws if
// the layer cannot hold latents.
void add_rotary(std::vector<mx::array>& inputs, const std::optional<mx::array>& rotary,
                const PageLayout& layout, const mx::array& queries, float softcap);

// Returns a view of an evaluated array with any strides.
RowsView view_rows(const mx::array& rows);
const int32_t* view_ints(const mx::array& array);

// Turns `args` into a latent call, for a layer whose pages hold latents as K and rotary keys as V.
void attend_latents(AttendArgs& args, const RowsView& rotary_queries);

// Runs one call on all threads. Called by the thread that evaluates the primitive.
void run_attention(const AttendArgs& args);

// Runs the same attention over two pools: the second call joins both results into `second.out` and adds
// `second.sinks`.
void run_attention(const AttendArgs& first, const AttendArgs& second);

}  // namespace octavo
