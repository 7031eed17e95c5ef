#include "attention/primitives.h"

#include <bit>

#include "attention/rows.h"
#include "pages/codes.h"
#include "runtime/dispatch.h"

namespace octavo {
namespace {

// Layout of a row in each format. Scale bytes are per group of values, or per row if the group is 0.
struct FormatSpec {
  const char* name;
  CodeType codes;
  int bits;
  int multiple;  // of the head dimension
  bool rotated;
  int group, scale_bytes;
};

constexpr FormatSpec kFormats[] = {
    {"bf16", CodeType::bf16, 16, 1, false, 0, 0},
    {"fp16", CodeType::fp16, 16, 1, false, 0, 0},
    {"int8", CodeType::int8, 8, 4, true, 0, 2},
    {"int4", CodeType::int4, 4, 8, true, 0, 2},
    {"fp4", CodeType::fp4, 4, 8, true, 0, 2},
    {"fp5", CodeType::fp5, 4, 8, true, 8, 1},
    {"mxfp4", CodeType::mxfp4, 4, kMxGroup, false, kMxGroup, 1},
    {"nvfp4", CodeType::nvfp4, 4, kNvGroup, false, kNvGroup, 1},
    {"affine8", CodeType::affine8, 8, kAffineGroup, false, kAffineGroup, 4},
    {"affine4", CodeType::affine4, 4, kAffineGroup, false, kAffineGroup, 4},
};

RowFormat make_format(const std::string& part, const std::string& name, int dim) {
  require(dim >= 1 && dim <= kMaxDim, [&] {
    return part + " head dimension must lie in [1, " + std::to_string(kMaxDim) + "], got " +
           std::to_string(dim);
  });
  std::string names;
  for (const FormatSpec& spec : kFormats) {
    names += (names.empty() ? "" : ", ") + std::string(spec.name);
    if (name != spec.name) continue;
    require(dim % spec.multiple == 0, [&] {
      return part + " rows in " + name + " need a head dimension that is a multiple of " +
             std::to_string(spec.multiple) + ", got " + std::to_string(dim) + "; use bf16 pages";
    });
    const int groups = spec.group > 0 ? dim / spec.group : 1;
    return {spec.codes, dim, spec.rotated, dim * spec.bits / 8, groups * spec.scale_bytes};
  }
  throw std::invalid_argument(part + " page format \"" + name + "\" has no native kernel; use one of " +
                              names);
}

}  // namespace

const AttentionKernels& attention_kernels() {
#if defined(__x86_64__)
  if (isa() >= Isa::avx512) return avx512::attention_kernels;
  if (isa() == Isa::avx2) return avx2::attention_kernels;
#endif
  return generic::attention_kernels;
}

PageLayout make_layout(int64_t num_pages, int num_heads, int page_size, const std::string& k_format,
                       int k_dim, const std::string& v_format, int v_dim) {
  require(num_pages >= 1, [&] { return "num_pages must be at least 1, got " + std::to_string(num_pages); });
  require(num_heads >= 1, [&] { return "num_heads must be at least 1, got " + std::to_string(num_heads); });
  require(page_size >= 1 && page_size <= 1024 && std::has_single_bit(unsigned(page_size)), [&] {
    return "page_size must be a power of two from 1 to 1024, got " + std::to_string(page_size);
  });
  require(num_pages * page_size <= INT32_MAX, [&] {
    return "a pool holds at most 2^31 - 1 slots, got " + std::to_string(num_pages) + " pages of " +
           std::to_string(page_size);
  });
  PageLayout layout{};
  layout.num_pages = num_pages;
  layout.num_heads = num_heads;
  layout.page_size = page_size;
  layout.page_shift = std::countr_zero(unsigned(page_size));
  layout.k = make_format("K", k_format, k_dim);
  layout.v = make_format("V", v_format, v_dim);
  layout.k_scales = page_size * layout.k.row_bytes;
  layout.v_codes = layout.k_scales + page_size * layout.k.scale_bytes;
  layout.v_scales = layout.v_codes + page_size * layout.v.row_bytes;
  layout.head_bytes = layout.v_scales + page_size * layout.v.scale_bytes;
  require(layout.head_bytes <= INT32_MAX, [] { return "a page of one head must be smaller than 2 GiB"; });
  return layout;
}

mx::Shape pool_shape(const PageLayout& layout) {
  return {mx::ShapeElem(layout.num_pages), layout.num_heads, mx::ShapeElem(layout.head_bytes)};
}

void require_pool(const PageLayout& layout, const mx::array& pool) {
  require(pool.dtype() == mx::uint8 && pool.shape() == pool_shape(layout), [&] {
    return "pool must be uint8 " + shape_text(pool_shape(layout)) + " for this layout, got " +
           shape_text(pool.shape());
  });
}

void require_ints(const char* name, const mx::array& array, const mx::Shape& shape) {
  require(array.dtype() == mx::int32 && array.shape() == shape, [&] {
    return std::string(name) + " must be int32 " + shape_text(shape) + ", got shape " +
           shape_text(array.shape());
  });
}

void require_rows(const char* name, const mx::array& rows, int num_heads, int dim, bool multiple) {
  const bool fits = rows.ndim() == 3 && rows.shape(2) == dim && rows.shape(1) >= num_heads &&
                    (multiple ? rows.shape(1) % num_heads == 0 : rows.shape(1) == num_heads);
  require(fits, [&] {
    return std::string(name) + " must have shape [T, " + (multiple ? "a multiple of " : "") +
           std::to_string(num_heads) + ", " + std::to_string(dim) + "], got " + shape_text(rows.shape());
  });
  require(is_float(rows.dtype()),
          [&] { return std::string(name) + " must be float32, float16 or bfloat16"; });
}

RowsView view_rows(const mx::array& rows) {
  return {rows.data<void>(), float_of(rows.dtype()), rows.strides(0), rows.strides(1), rows.strides(2)};
}

const int32_t* view_ints(const mx::array& array) {
  if (!array.flags().row_contiguous) throw std::invalid_argument("index arrays must be row contiguous");
  return array.data<int32_t>();
}

}  // namespace octavo
