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

// Prefetches a head's rows of a token before they are loaded, because another thread has just computed them.
// Always inlined, because GCC 12 drops calls of functions that only prefetch.
inline __attribute__((always_inline)) void prefetch_rows(const WriteArgs& args, int token, int head) {
  for (const RowsView* view : {&args.keys, &args.values})
    if (view->dim_stride == 1)
      prefetch_row(view->data, view->type, token * view->row_stride + head * view->head_stride,
                   view == &args.keys ? args.layout.k.dim : args.layout.v.dim);
}

// Writes one head's K or V of a token. If it cannot be stored, writes zeros and returns false.
bool write_row(const WriteArgs& args, bool is_key, int token, int head) {
  const PageLayout& layout = args.layout;
  const RowFormat& format = is_key ? layout.k : layout.v;
  const int page = args.slots[token] >> layout.page_shift,
            offset = args.slots[token] & (layout.page_size - 1);
  uint8_t* const base = args.pool + (int64_t(page) * layout.num_heads + head) * layout.head_bytes;
  uint8_t* const codes =
      const_cast<uint8_t*>(is_key ? k_codes(layout, base, offset) : v_codes(layout, base, offset));
  uint8_t* const scales =
      const_cast<uint8_t*>(is_key ? k_scale(layout, base, offset) : v_scale(layout, base, offset));
  alignas(64) float row[kMaxDim];
  load_row(is_key ? args.keys : args.values, token, head, format.dim, row);
  if (store_row(format, row, codes, scales)) return true;
  std::memset(codes, 0, size_t(format.row_bytes));
  std::memset(scales, 0, size_t(format.scale_bytes));
  return false;
}

void write(const WriteArgs& args, int first_token, int end_token) {
  for (int token = first_token; token < end_token; ++token) {
    bool storable = true;
    for (int head = 0; head < args.layout.num_heads; ++head) {
      if (token + 1 < end_token) prefetch_rows(args, token + 1, head);
      for (const bool is_key : {true, false}) storable &= write_row(args, is_key, token, head);
    }
    if (!storable) args.flags[token] = 1;
  }
}

// Copies rows [first, end) of one sequence and head, dequantized and rotated back; zeros beyond kv_len.
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
