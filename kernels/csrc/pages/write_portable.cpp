// Writes quantized rows to pages and gathers dense rows from them, for the instruction set OCTAVO_ISA.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention/attention.h"
#include "attention/rows.h"
#include "attention/tiles.h"
#include "pages/codes.h"
#include "pages/quantize.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Most rows stored together: rows of several heads of one token.
constexpr int kMostRows = 8;
constexpr int kRowFloats = 2 * kMaxDim;  // floats in all of these rows together
static_assert(kRowFloats == kMostRows * 256);

// Stores adjacent rows at `codes` and `scales`, and rotates them in place if the format rotates. Rows that
// cannot be stored become zeros; then it returns false.
bool store_page_rows(const RowFormat& format, float* rows, int count, uint8_t* const* codes,
                     uint8_t* const* scales) {
  bool storable[kMostRows], all = true;
  store_rows(format, rows, count, codes, scales, storable);
  for (int r = 0; r < count; ++r) {
    if (storable[r]) continue;
    std::memset(codes[r], 0, size_t(format.row_bytes));
    std::memset(scales[r], 0, size_t(format.scale_bytes));
    all = false;
  }
  return all;
}

// Prefetches a head's rows of a token before they are loaded, because another thread has just computed them.
// Always inlined, because GCC 12 drops calls of functions that only prefetch.
inline __attribute__((always_inline)) void prefetch_rows(const WriteArgs& args, int token, int head) {
  for (const RowsView* view : {&args.keys, &args.values})
    if (view->dim_stride == 1)
      prefetch_row(view->data, view->type, token * view->row_stride + head * view->head_stride,
                   view == &args.keys ? args.layout.k.dim : args.layout.v.dim);
}

// Writes heads [first, first + count) of a token's K or V.
bool write_heads(const WriteArgs& args, bool is_key, int token, int first, int count) {
  const PageLayout& layout = args.layout;
  const RowFormat& format = is_key ? layout.k : layout.v;
  const int page = args.slots[token] >> layout.page_shift;
  const int offset = args.slots[token] & (layout.page_size - 1);
  alignas(64) float rows[kRowFloats];
  uint8_t *codes[kMostRows], *scales[kMostRows];
  for (int i = 0; i < count; ++i) {
    const uint8_t* const base =
        args.pool + (int64_t(page) * layout.num_heads + first + i) * layout.head_bytes;
    codes[i] = const_cast<uint8_t*>(is_key ? k_codes(layout, base, offset) : v_codes(layout, base, offset));
    scales[i] = const_cast<uint8_t*>(is_key ? k_scale(layout, base, offset) : v_scale(layout, base, offset));
    load_row(is_key ? args.keys : args.values, token, first + i, format.dim, rows + i * format.dim);
  }
  return store_page_rows(format, rows, count, codes, scales);
}

void write(const WriteArgs& args, int first_token, int end_token) {
  const PageLayout& layout = args.layout;
  const int together = std::min(kMostRows, kRowFloats / std::max(layout.k.dim, layout.v.dim));
  for (int token = first_token; token < end_token; ++token) {
    bool storable = true;
    for (int head = 0; head < layout.num_heads; head += together) {
      const int count = std::min(together, layout.num_heads - head);
      for (int i = 0; token + 1 < end_token && i < count; ++i) prefetch_rows(args, token + 1, head + i);
      for (const bool is_key : {true, false}) storable &= write_heads(args, is_key, token, head, count);
    }
    if (!storable) args.flags[token] = 1;
  }
}

// Copies rows [first, end) of one sequence and head, dequantized and rotated back; zeros from kv_len on.
void gather(const GatherArgs& args, int sequence, int head, int first, int end) {
  const PageLayout& layout = args.layout;
  const int32_t* table = args.page_table + sequence * args.table_width;
  alignas(64) float row[kMaxDim];
  for (int position = first; position < end; ++position) {
    const bool written = position < args.kv_len[sequence];
    const uint8_t* base = written ? args.pool + page_offset(layout, table, position, head) : nullptr;
    const int offset = position & (layout.page_size - 1);
    const int64_t at = (int64_t(sequence) * layout.num_heads + head) * args.length + position;
    for (const bool is_key : {true, false}) {
      const RowFormat& format = is_key ? layout.k : layout.v;
      if (written) {
        dequantize_row(format, is_key ? k_codes(layout, base, offset) : v_codes(layout, base, offset),
                       is_key ? k_scale(layout, base, offset) : v_scale(layout, base, offset), row);
        if (format.rotated) hadamard(row, format.dim);
      } else {
        std::fill(row, row + format.dim, 0.0f);
      }
      store_floats(is_key ? args.keys : args.values, args.type, size_t(at * format.dim), format.dim, row);
    }
  }
}

}  // namespace

AttendKernel attend_kernel(const AttendArgs& args);  // attention/attend_portable.cpp

const AttentionKernels attention_kernels = {write, gather, attend_kernel};

}  // namespace octavo::OCTAVO_ISA
